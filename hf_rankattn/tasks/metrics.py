"""Metrics as classes to import and instantiate, which `evaluate` runs without a network."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import evaluate
import numpy as np
from datasets import Features, List, Value


IGNORED = -100
VECTORS = List(List(Value("float32")))
CLASSES = List(Value("int64"))


class TaskMetric(evaluate.Metric):
    """One row of `predictions` and `references` for each row of the data; rows may differ in length."""

    inputs = CLASSES
    more_inputs: tuple[str, ...] = ()

    def _info(self) -> evaluate.MetricInfo:
        names = ("predictions", "references", *self.more_inputs)
        return evaluate.MetricInfo(
            description=" ".join((type(self).__doc__ or "").split()),
            citation="",
            inputs_description=", ".join(names),
            features=Features(dict.fromkeys(names, self.inputs)),
        )

    def _compute(self, **inputs) -> dict[str, float]:
        return self.measure(**inputs)

    @staticmethod
    def measure(predictions, references) -> dict[str, float]:
        """The metric of whole arrays, without the tables in which `evaluate` collects batches."""
        raise NotImplementedError


def paired(predictions: list, references: list) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of predictions and references as arrays of equal shape."""
    pairs = [(np.asarray(p), np.asarray(r)) for p, r in zip(predictions, references, strict=True)]
    for row, (prediction, reference) in enumerate(pairs):
        if prediction.shape != reference.shape:
            raise ValueError(
                f"row {row}: predictions of shape {prediction.shape} do not fit references of shape {reference.shape}."
            )
    if not pairs:
        raise ValueError("there are no rows to compare.")
    return pairs


def labelled(predictions: list, references: list) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows without the tokens that are labelled -100, and without the rows that have no others."""
    kept = [(p[r != IGNORED], r[r != IGNORED]) for p, r in paired(predictions, references)]
    kept = [(prediction, reference) for prediction, reference in kept if len(reference)]
    if not kept:
        raise ValueError(f"all tokens are labelled {IGNORED}: there is nothing to compare.")
    return kept


class NeighborError(TaskMetric):
    """Squared distance of predicted and true vectors: summed over the entries of a vector, averaged over tokens. Predicting
    zero for unit vectors costs 1. It is the loss of `RankEncoderForPointRegression`.

    >>> NeighborError().compute(predictions=[[[0.0, 0.0]]], references=[[[0.0, 1.0]]])
    {'neighbor_error': 1.0}
    """

    inputs = VECTORS

    @staticmethod
    def measure(predictions, references) -> dict[str, float]:
        squares = [np.square(p - r).sum(-1) for p, r in paired(predictions, references)]
        return {"neighbor_error": float(np.concatenate(squares).mean())}


class NeighborAccuracy(TaskMetric):
    """Share of tokens whose prediction is nearer to the right point than to any other of its row's `points`.

    >>> row = {"predictions": [[[0.4, 0.1]]], "references": [[[1.0, 0.0]]], "points": [[[1.0, 0.0], [0.0, 1.0]]]}
    >>> NeighborAccuracy().compute(**row)
    {'neighbor_accuracy': 1.0}
    """

    inputs = VECTORS
    more_inputs = ("points",)

    @staticmethod
    def measure(predictions, references, points) -> dict[str, float]:
        right = []
        for (prediction, reference), candidates in zip(paired(predictions, references), points, strict=True):
            chosen, true = (nearest(vectors, np.asarray(candidates)) for vectors in (prediction, reference))
            right.append(chosen == true)
        return {"neighbor_accuracy": float(np.concatenate(right).mean())}


def nearest(vectors: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """For each of (m, d) vectors the nearest of (n, d) candidates."""
    distances = np.square(candidates).sum(-1) - 2 * vectors @ candidates.T
    return distances.argmin(-1)


class TokenAccuracy(TaskMetric):
    """Share of tokens with the right class; those labelled -100 do not count.

    >>> TokenAccuracy().compute(predictions=[[0, 1, 1, 5]], references=[[0, 1, 2, -100]])["token_accuracy"]
    0.6666666666666666
    """

    @staticmethod
    def measure(predictions, references) -> dict[str, float]:
        right = [p == r for p, r in labelled(predictions, references)]
        return {"token_accuracy": float(np.concatenate(right).mean())}


class SequenceAccuracy(TaskMetric):
    """Share of rows in which every token has the right class; tokens labelled -100 do not count.

    >>> SequenceAccuracy().compute(predictions=[[0, 1], [0, 1]], references=[[0, 1], [0, 2]])
    {'sequence_accuracy': 0.5}
    """

    @staticmethod
    def measure(predictions, references) -> dict[str, float]:
        right = [np.array_equal(p, r) for p, r in labelled(predictions, references)]
        return {"sequence_accuracy": float(np.mean(right))}


class InvertedPairs(TaskMetric):
    """Share of the pairs of positions that the prediction orders the other way round than the reference: 0 for the right
    order, 1 for its reverse where all values differ. A constant prediction inverts nothing, so read it with an accuracy.

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


class HullVertexF1(TaskMetric):
    """F1 of class 1, the vertices, over all points; 0 where no vertex is predicted and there are some.

    >>> HullVertexF1().compute(predictions=[[1, 1, 0]], references=[[1, 0, 0]])["hull_vertex_f1"]
    0.6666666666666666
    """

    @staticmethod
    def measure(predictions, references) -> dict[str, float]:
        pairs = labelled(predictions, references)
        prediction, reference = (np.concatenate(part) == 1 for part in zip(*pairs, strict=True))
        both = 2 * int((prediction & reference).sum())
        either = int(prediction.sum() + reference.sum())
        return {"hull_vertex_f1": both / either if either else 1.0}


METRICS: dict[str, tuple[type[TaskMetric], ...]] = {
    "farthest_neighbor": (NeighborError, NeighborAccuracy),
    "nearest_neighbor": (NeighborError, NeighborAccuracy),
    "biased_nearest_neighbor": (NeighborError, NeighborAccuracy),
    "sorting": (TokenAccuracy, SequenceAccuracy, InvertedPairs),
    "convex_hull": (TokenAccuracy, SequenceAccuracy, HullVertexF1),
    "memorization": (TokenAccuracy, SequenceAccuracy),
    "circle": (NeighborError,),
    "token_retrieval": (TokenAccuracy, SequenceAccuracy),
}


def score(task: str, predictions: Any, references: Any, points: Any = None) -> dict[str, float]:
    """All metrics of a task; those that need the `points` are left out where there are none."""
    found: dict[str, float] = {}
    for metric in METRICS[task]:
        more = {"points": points} if metric.more_inputs else {}
        if not more or points is not None:
            found |= metric.measure(predictions, references, **more)
    return found


def trainer_metrics(task: str) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` for `Trainer`: the metrics of a task, from the logits or the vectors that a model predicts.

    The accuracy of neighbours needs the points, which `Trainer` passes on with `include_for_metrics=["inputs"]`.
    """
    if task not in METRICS:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(METRICS)}.")

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        predictions, references = np.asarray(evaluated.predictions), np.asarray(evaluated.label_ids)
        if predictions.ndim > references.ndim:
            predictions = predictions.argmax(-1)
        return score(task, predictions, references, getattr(evaluated, "inputs", None))

    return compute_metrics
