"""Sorting: a sequence of small numbers, labelled with the same numbers in order."""

from dataclasses import dataclass

import numpy as np

from .building import TaskBuilder, TaskConfig, check_count, ids_feature
from .papers import COLLAPSE


@dataclass
class SortingConfig(TaskConfig):
    """
    Args:
        length (`int`, *optional*, defaults to 8): Numbers in a row.
        num_values (`int`, *optional*, defaults to 10): The numbers are drawn from 0 to `num_values - 1`, with repeats.
    """

    num_examples: int | None = 1_000
    num_eval_examples: int | None = 200
    length: int = 8
    num_values: int = 10

    def geometry_name(self) -> str:
        return f"l{self.length}_v{self.num_values}"

    def check(self) -> None:
        super().check()
        self.length = check_count("length", self.length, 2)
        self.num_values = check_count("num_values", self.num_values, 2)


class Sorting(TaskBuilder):
    """A sequence of small numbers, each position labelled with the number that stands there after sorting."""

    BUILDER_CONFIG_CLASS = SortingConfig
    BUILDER_CONFIGS = [SortingConfig(), SortingConfig(length=16, num_examples=10_000, num_eval_examples=1_000)]
    DEFAULT_CONFIG_NAME = "l8_v10"
    CITATION = COLLAPSE
    LABELS = (
        "The numbers are independent and uniform, with repeats. `input_ids` are the numbers plus one (0 is left to padding, "
        "whose embedding BERT-like models freeze), `labels` are the numbers in ascending order."
    )
    DIFFERENCES = (
        "The published code draws a reference line at an accuracy of 0.1 for guessing; a predictor that looks at nothing but "
        "the position reaches 0.34, and is listed below. Models there are cached without their seed, and training rows are "
        "never shuffled."
    )

    def columns(self):
        ids = ids_feature(self.config.length)
        return {"input_ids": ids, "labels": ids}

    def model_arguments(self):
        return {"vocab_size": self.config.num_values + 1, "num_labels": self.config.num_values}

    def draw(self, rng, rows, *, split, first):
        numbers = rng.integers(self.config.num_values, size=(rows, self.config.length))
        return {"input_ids": numbers + 1, "labels": np.sort(numbers, axis=1)}
