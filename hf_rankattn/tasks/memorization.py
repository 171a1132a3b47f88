"""Memorization: real text with random labels."""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import datasets
import numpy as np

from ..files.texts import package_text
from ._baselines import class_baselines
from ._building import COLLAPSE, TaskBuilder, TaskConfig, check_count, ids_feature
from ._metrics import SequenceAccuracy, TokenAccuracy


@dataclass
class MemorizationConfig(TaskConfig):
    """
    Args:
        num_examples (`int`, *optional*): Train rows; by default all rows that are not in the other splits.
        num_eval_examples (`int`, *optional*): Validation rows, and test rows; by default a tenth of all rows each.
        texts (`str`, list of `str` or `datasets.Dataset`, *optional*): The text; by default the text of this package.
        text_column (`str`, *optional*, defaults to `"text"`): The column of a dataset to read.
        tokenizer (`str` or tokenizer, *optional*, defaults to `"words"`):
            `"words"` (words and marks of the text, lower-cased, numbered in alphabetical order), `"bytes"`, the name or
            folder of a tokenizer of transformers, or such a tokenizer itself.
        max_length (`int`, *optional*, defaults to 128): Tokens in a row. A longer text makes several rows, a shorter one is
            padded.
        num_labels (`int`, *optional*, defaults to 2): Number of classes.
    """

    LEAST: ClassVar = {"max_length": 2, "num_labels": 2}
    num_examples: int | None = None
    num_eval_examples: int | None = None
    texts: Any = None
    text_column: str = "text"
    tokenizer: Any = "words"
    max_length: int = 128
    num_labels: int = 2

    def geometry_name(self) -> str:
        source = "package_text" if self.texts is None else "text"
        labels = "" if self.num_labels == 2 else f"_c{self.num_labels}"
        return f"{source}_l{self.max_length}{labels}"

    def check(self) -> None:
        self.check_counts(self.LEAST)
        rows = len(self.encoded[0])
        if rows < 3:
            raise ValueError(
                f"the text gives {rows} rows of at most {self.max_length} tokens, and three splits need at least three rows: "
                "give more text or a smaller `max_length`."
            )
        if self.num_eval_examples is None:
            self.num_eval_examples = max(1, rows // 10)
        if self.num_examples is None:
            self.num_examples = rows - 2 * check_count("num_eval_examples", self.num_eval_examples, 1)
        super().check()
        asked = self.num_examples + 2 * self.num_eval_examples
        if asked > rows:
            raise ValueError(
                f"{asked} rows were asked for ({self.num_examples} train, twice {self.num_eval_examples} for the other "
                f"splits), and the text gives {rows} rows of at most {self.max_length} tokens."
            )

    @cached_property
    def passages(self) -> list[str]:
        """The texts, one by one."""
        texts = package_text() if self.texts is None else self.texts
        if isinstance(texts, str):
            texts = [part for part in re.split(r"\n\s*\n", texts) if part.strip()]
        elif isinstance(texts, datasets.Dataset | datasets.IterableDataset):
            if texts.column_names is not None and self.text_column not in texts.column_names:
                raise ValueError(
                    f"the dataset has no column {self.text_column!r}; it has {', '.join(texts.column_names)}: choose one "
                    "with text_column."
                )
            texts = [row[self.text_column] for row in texts.select_columns(self.text_column)]
        if isinstance(texts, dict) or not isinstance(texts, Iterable):
            raise ValueError(
                f"`texts` must be a string, a list of strings or one split of a dataset, got a {type(texts).__name__}."
            )
        texts = list(texts)
        if others := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"`texts` must hold strings, got {others[0]!r:.80}.")
        return texts

    def encoder(self) -> tuple[Callable[[str], list[int]], int, int]:
        """A function from a text to its ids, the number of different ids, and the padding id."""
        tokenizer = self.tokenizer
        if tokenizer == "words":
            words = sorted({word for text in self.passages for word in words_of(text)})
            ids = {word: number for number, word in enumerate(words, start=1)}
            return (lambda text: [ids[word] for word in words_of(text)]), len(words) + 1, 0
        if tokenizer == "bytes":
            return (lambda text: [1 + byte for byte in text.encode()]), 257, 0
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
            except Exception as error:  # every tokenizer format has its own errors
                raise ValueError(
                    f"`tokenizer` must be 'words', 'bytes', a tokenizer, or the folder or name of one; {self.tokenizer!r} "
                    "could not be loaded."
                ) from error
        if not callable(tokenizer) or not hasattr(tokenizer, "pad_token_id"):
            raise ValueError(
                f"`tokenizer` must be 'words', 'bytes', or a tokenizer of transformers, got a {type(tokenizer).__name__}."
            )
        padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return (lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]), len(tokenizer), padding

    @cached_property
    def encoded(self) -> tuple[list[list[int]], int, int]:
        """Ids of all rows without padding, the number of different ids, and the padding id."""
        encode, vocab_size, padding = self.encoder()
        name = self.tokenizer if isinstance(self.tokenizer, str) else type(self.tokenizer).__name__
        try:
            ids = [encode(text) for text in self.passages]
        except Exception as error:  # tokenizers has an exception type of its own for each fault
            raise ValueError(f"the tokenizer {name!r} fails on the text: {error}") from error
        if len(set().union(*ids)) < 2 and any(text.strip() for text in self.passages):
            raise ValueError(
                f"the tokenizer {name!r} finds fewer than two different tokens in the whole text: it has no vocabulary for it. "
                "Give a folder that holds the files of a tokenizer (tokenizer.json, vocab.txt, ...), 'words' or 'bytes'."
            )
        size = self.max_length
        pieces = [row[start : start + size] for row in ids for start in range(0, len(row), size)]
        return pieces, vocab_size, padding

    def contents(self) -> dict[str, Any]:
        # the rows depend on text and tokenizer through the ids alone
        digest = hashlib.sha256(repr(self.encoded).encode()).hexdigest()
        return super().contents() | {"texts": digest, "tokenizer": None, "text_column": None}


class Memorization(TaskBuilder):
    """Real text with a random label for each token. There is no rule to learn, so accuracy on the train split measures what
    a model stores. Validation and test hold other passages of the text, also labelled at random: a control at chance level."""

    BUILDER_CONFIGS = [MemorizationConfig(), MemorizationConfig(max_length=32)]
    metrics = (TokenAccuracy, SequenceAccuracy)
    baselines = staticmethod(class_baselines)
    scored_split = "train"
    CITATION = COLLAPSE
    LABELS = (
        "The text is cut into rows of at most `max_length` tokens; `labels` are independent and uniform, one for each token, "
        "and -100 at padding. Score the train split, which a model has to memorize. No model can be better than chance on the "
        "others. The rows are one fixed set, so there is no stream of new ones."
    )
    DIFFERENCES = (
        "The published code labels padding with -1, which losses count by default; here the label is -100. It cuts texts at "
        "128 tokens; here the rest of a text makes further rows. It scores 11 batches of the train rows; score all of them. A "
        "misplaced argument in the published code switches the MLPs on in its pure attention. Its line for guessing, 0.5, is "
        "the accuracy of a predictor without any input; a predictor that sees the token, without context, reaches more."
    )
    endless = False

    def columns(self):
        ids = ids_feature(self.config.max_length)
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}

    def model_arguments(self):
        _, vocab_size, padding = self.config.encoded
        return {"vocab_size": vocab_size, "num_labels": self.config.num_labels, "pad_token_id": padding}

    def draw(self, rng, rows, *, split, first):
        size, (pieces, _, padding) = self.config.max_length, self.config.encoded
        train, held_out = self.config.num_examples, self.config.num_eval_examples
        start = first + {"train": 0, "validation": train, "test": train + held_out}[split]
        pieces = pieces[start : start + rows]
        mask = np.arange(size) < np.array([len(piece) for piece in pieces])[:, None]
        ids = np.full(mask.shape, padding)
        ids[mask] = np.concatenate(pieces)
        labels = rng.integers(self.config.num_labels, size=(rows, size))[: len(pieces)]
        return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "labels": np.where(mask, labels, -100)}


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())
