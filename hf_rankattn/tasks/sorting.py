"""Sorting: a sequence of small numbers, labelled with the same numbers in order."""

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np

from ._baselines import class_baselines
from ._building import COLLAPSE, TaskBuilder, TaskConfig
from ._metrics import SequenceAccuracy, TaskMetric, TokenAccuracy, labelled


@dataclass
class SortingConfig(TaskConfig):
    """
    Args:
        length (`int`, *optional*, defaults to 8): Numbers in a row.
        num_values (`int`, *optional*, defaults to 10): The numbers are drawn from 0 to `num_values - 1`, with repeats.
    """

    LEAST: ClassVar = {"length": 2, "num_values": 2}
    num_examples: int | None = 1_000
    num_eval_examples: int | None = 200
    length: int = 8
    num_values: int = 10

    def geometry_name(self) -> str:
        return f"l{self.length}_v{self.num_values}"


class InvertedPairs(TaskMetric):
    """Share of the pairs of positions that the prediction orders the other way round than the reference: 0 for the right
    order, 1 for its reverse if all values differ. A constant prediction inverts nothing, so read it with an accuracy.

    >>> InvertedPairs().compute(predictions=[[1, 0, 2]], references=[[0, 1, 2]])["inverted_pairs"]
    0.3333333333333333
    """

    @staticmethod
    def measure(predictions, references) -> dict[str, float]:
        inverted = total = 0
        for prediction, reference in labelled(predictions, references):
            first, second = np.array(list(combinations(range(len(reference)), 2)), dtype=int).reshape(-1, 2).T
            orders = [np.sign(values[second] - values[first]) for values in (prediction, reference)]
            inverted += int((orders[0] * orders[1] < 0).sum())
            total += len(first)
        return {"inverted_pairs": inverted / max(1, total)}


class Sorting(TaskBuilder):
    """A sequence of small numbers, each position labelled with the number at this position after sorting."""

    BUILDER_CONFIGS = [SortingConfig(), SortingConfig(length=16, num_examples=10_000, num_eval_examples=1_000)]
    metrics = (TokenAccuracy, SequenceAccuracy, InvertedPairs)
    baselines = staticmethod(class_baselines)
    CITATION = COLLAPSE
    LABELS = (
        "The numbers are independent and uniform, with repeats. `input_ids` are the numbers plus one (0 is padding, whose "
        "embedding BERT-like models freeze), `labels` are the numbers in ascending order."
    )
    DIFFERENCES = (
        "The published code draws a reference line at an accuracy of 0.1 for guessing; a predictor that sees only the "
        "position reaches 0.34, and is listed below. The published code also leaves the seed out of its cache keys for "
        "models, and never shuffles the training rows."
    )

    def model_arguments(self):
        return {"vocab_size": self.config.num_values + 1, "num_labels": self.config.num_values}

    def draw(self, rng, rows, *, split, first):
        numbers = rng.integers(self.config.num_values, size=(rows, self.config.length))
        return {"input_ids": numbers + 1, "labels": np.sort(numbers, axis=1)}
