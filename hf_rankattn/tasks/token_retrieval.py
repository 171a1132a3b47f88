"""Token retrieval: key-value recall in a sequence of n tokens."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._baselines import class_baselines
from ._building import TaskBuilder, TaskConfig, check_choice, check_count
from ._metrics import SequenceAccuracy, TokenAccuracy


LAYOUTS = ("joint", "pairs")


@dataclass
class TokenRetrievalConfig(TaskConfig):
    """
    Args:
        length (`int`, *optional*, defaults to 128): Tokens in a row, half of them queries; a multiple of 4.
        num_values (`int`, *optional*, defaults to 16): Number of values, and of classes.
        num_keys (`int`, *optional*, defaults to the number of records in a row):
            Number of different keys. The records of a row have distinct keys.
        layout (`str`, *optional*, defaults to `"joint"`):
            `"joint"`: a record is one token, so one layer can solve the task, and the query-key rank of its heads limits the
            result. `"pairs"`: a record is two tokens, a key and then its value, and needs two layers and positions.
    """

    LEAST: ClassVar = {"length": 8, "num_values": 2}
    length: int = 128
    num_values: int = 16
    num_keys: int | None = None
    layout: str = "joint"

    def geometry_name(self) -> str:
        name = f"n{self.length}" if self.layout == "joint" else f"{self.layout}_n{self.length}"
        return name if self.num_keys in (None, self.num_records) else f"{name}_k{self.num_keys}"

    @property
    def num_records(self) -> int:
        return self.length // (2 if self.layout == "joint" else 4)

    def check(self) -> None:
        super().check()
        check_choice("layout", self.layout, LAYOUTS)
        if self.length % 4:
            raise ValueError(f"`length` must be a multiple of 4, got {self.length}.")
        self.num_keys = check_count("num_keys", self.num_records if self.num_keys is None else self.num_keys, 1)
        if self.num_keys < self.num_records:
            raise ValueError(
                f"a row has {self.num_records} records with distinct keys, more than num_keys={self.num_keys}: give more "
                "keys or a smaller `length`."
            )


class TokenRetrieval(TaskBuilder):
    """Records of a key and a value, then keys that ask for their values: content retrieval at sequence length n, for sweeps
    over the query-key width of a head."""

    BUILDER_CONFIGS = [
        *(TokenRetrievalConfig(length=length) for length in (128, 32, 64, 256, 512)),
        *(TokenRetrievalConfig(length=length, layout="pairs") for length in (32, 64, 128, 256, 512)),
    ]
    metrics = (TokenAccuracy, SequenceAccuracy)
    baselines = staticmethod(class_baselines)
    LABELS = (
        "The first half of a row holds records with distinct random keys and independent uniform values, the second half "
        "queries, each the key of a record of the row, drawn uniformly. Id 0 is padding. The next ids are the keys, as queries "
        "(and as the first half of a pair), then one id for each key and value (joint) or one for each value (pairs). "
        "`labels` are the value of the asked key at queries, and elsewhere -100, which losses ignore."
    )

    def model_arguments(self):
        keys, values = self.config.num_keys, self.config.num_values
        symbols = keys * values if self.config.layout == "joint" else values
        return {"vocab_size": 1 + keys + symbols, "num_labels": values}

    def draw(self, rng, rows, *, split, first):
        config, records = self.config, self.config.num_records
        keys = np.argsort(rng.random((rows, config.num_keys)), axis=1)[:, :records]
        values = rng.integers(config.num_values, size=(rows, records))
        asked = rng.integers(records, size=(rows, config.length // 2))
        if config.layout == "joint":
            memory = 1 + config.num_keys + keys * config.num_values + values
        else:
            memory = np.stack([1 + keys, 1 + config.num_keys + values], axis=2).reshape(rows, -1)
        queries = 1 + np.take_along_axis(keys, asked, axis=1)
        labels = np.concatenate([np.full(memory.shape, -100), np.take_along_axis(values, asked, axis=1)], axis=1)
        return {"input_ids": np.concatenate([memory, queries], axis=1), "labels": labels}
