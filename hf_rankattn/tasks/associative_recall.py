"""Associative recall with many queries: key-value pairs at the start of a row, and later some of its keys again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._building import Arrays, TaskBuilder, TaskConfig
from ._metrics import IGNORED, SequenceAccuracy, TokenAccuracy
from ._sampling import Rng


ZOOLOGY = """@misc{arora2023zoology,
  title = {Zoology: Measuring and Improving Recall in Efficient Language Models},
  author = {Simran Arora and Sabri Eyuboglu and Aman Timalsina and Isys Johnson and Michael Poli and James Zou and Atri Rudra
    and Christopher Re},
  year = {2023},
  eprint = {2312.04927},
  archivePrefix = {arXiv}
}"""


@dataclass
class AssociativeRecallConfig(TaskConfig):
    """
    Args:
        vocab_size (`int`, *optional*, defaults to 8192):
            Number of token ids. The lower half are keys, the upper half values, and id 0 is padding.
        length (`int`, *optional*, defaults to 64): Tokens in a row; even, and at least four for each pair.
        num_kv_pairs (`int`, *optional*, defaults to 4): Pairs of a key and a value; each key is asked once.
        power_a (`float`, *optional*, defaults to 0.01):
            Exponent of the law of the queries' places: place k after the pairs has the weight `k ** (power_a - 1)`, so 1 is
            uniform, and a small value puts most queries soon after the pairs.
        random_non_queries (`bool`, *optional*, defaults to `True`):
            Whether the tokens that are neither pairs nor queries are random ids. Without it they are padding, id 0.
    """

    LEAST: ClassVar = {"vocab_size": 4, "length": 4, "num_kv_pairs": 1}
    vocab_size: int = 8192
    length: int = 64
    num_kv_pairs: int = 4
    power_a: float = 0.01
    random_non_queries: bool = True

    def geometry_name(self) -> str:
        name = f"n{self.length}_p{self.num_kv_pairs}"
        name += f"_v{self.vocab_size}" if self.vocab_size != 8192 else ""
        name += f"_a{self.power_a:g}" if self.power_a != 0.01 else ""
        return name if self.random_non_queries else f"{name}_padded"

    @property
    def num_keys(self) -> int:
        """Keys are the ids from 1 to `num_keys`, and the values follow them."""
        return self.vocab_size // 2 - 1

    def check(self) -> None:
        super().check()
        if not isinstance(self.random_non_queries, bool):
            raise ValueError(f"`random_non_queries` must be True or False, got {self.random_non_queries!r}.")
        self.power_a = float(self.power_a)
        if not 0 < self.power_a < np.inf:
            raise ValueError(f"`power_a` must be above 0 and finite, got {self.power_a}.")
        if self.length % 2 or self.length < 4 * self.num_kv_pairs:
            raise ValueError(
                f"`length` must be even and at least 4 * num_kv_pairs = {4 * self.num_kv_pairs}, two tokens for a pair and two "
                f"for a query; got {self.length}."
            )
        if self.num_keys < self.num_kv_pairs:
            raise ValueError(
                f"a row has {self.num_kv_pairs} pairs with distinct keys, more than the {self.num_keys} keys of "
                f"vocab_size={self.vocab_size}: give a larger `vocab_size` or fewer pairs."
            )


def distinct_numbers(rng: Rng, rows: int, count: int, below: int) -> np.ndarray:
    """(rows, count) numbers in random order, none of them twice in a row: Floyd's method, for all rows at once.

    Sorting `below` random numbers for each row would cost fifty times more for the usual vocabulary.
    """
    found = np.empty((rows, count), dtype=np.int64)
    for place, last in enumerate(range(below - count, below)):
        drawn = rng.integers(last + 1, size=rows)
        taken = (found[:, :place] == drawn[:, None]).any(1)
        found[:, place] = np.where(taken, last, drawn)
    return rng.permuted(found, axis=1)


def recall_baselines(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The most frequent value, and values of the row that are chosen without reading keys."""
    labels = test["labels"]
    yield "majority", np.full_like(labels, np.bincount(train["labels"][train["labels"] != IGNORED]).argmax())
    asked = labels != IGNORED
    order = np.cumsum(asked, axis=1) - 1  # how many queries came before
    yield "first_value", np.broadcast_to(test["input_ids"][:, 1:2], labels.shape)
    # early pairs tend to be asked early
    yield "values_in_order", np.take_along_axis(test["input_ids"], np.where(asked, 2 * order + 1, 0), axis=1)


class AssociativeRecall(TaskBuilder):
    """Pairs of a key and a value, and later the keys again, each labelled with its value: multi-query associative recall, the
    test of recall in language models."""

    BUILDER_CONFIGS = [
        AssociativeRecallConfig(length=length, num_kv_pairs=pairs)
        for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64))
    ]
    metrics = (TokenAccuracy, SequenceAccuracy)
    baselines = staticmethod(recall_baselines)
    CITATION = ZOOLOGY
    LABELS = (
        "A row starts with `num_kv_pairs` pairs, each a key and then its value. Keys and values are drawn uniformly, and none "
        "of them occurs in two pairs. Each key is asked once, at an even distance from the end of the pairs that is drawn by "
        "the power law, two queries never at one place. `labels` are the value of the asked key at the query itself, and "
        "elsewhere -100, which losses ignore. A loss that shifts labels, as those of causal language models do, needs them one "
        "token later."
    )
    DIFFERENCES = (
        "The published code draws the tokens between the queries from all ids, 0 included. Here they start at 1, because 0 is "
        "padding. The rows are drawn in blocks that have their own seeds, so they do not depend on the number of rows."
    )

    def model_arguments(self):
        return {"vocab_size": self.config.vocab_size, "num_labels": self.config.vocab_size}

    def draw(self, rng, rows, *, split, first):
        config, pairs = self.config, self.config.num_kv_pairs
        num_values = config.vocab_size - config.num_keys - 1
        keys = 1 + distinct_numbers(rng, rows, pairs, config.num_keys)
        values = 1 + config.num_keys + distinct_numbers(rng, rows, pairs, num_values)
        context = 2 * pairs
        weights = np.arange(1, (config.length - context) // 2 + 1) ** (config.power_a - 1)
        # The order of exponential waiting times is that of drawing places one after the other, without replacement.
        waits = rng.standard_exponential((rows, len(weights))) / weights
        places = context + 2 * np.argsort(waits, axis=1)[:, :pairs]
        ids = np.zeros((rows, config.length), dtype=np.int64)
        if config.random_non_queries:
            ids[:, context:] = rng.integers(1, config.vocab_size, size=(rows, config.length - context))
        ids[:, 0:context:2], ids[:, 1:context:2] = keys, values
        np.put_along_axis(ids, places, keys, axis=1)
        labels = np.full_like(ids, IGNORED)
        np.put_along_axis(labels, places, values, axis=1)
        return {"input_ids": ids, "labels": labels}
