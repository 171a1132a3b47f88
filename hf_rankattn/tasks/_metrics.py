"""Metrics as classes to import and instantiate: `evaluate` needs no network for them."""

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
    """Rows without the tokens that are labelled -100; rows without any other label are left out."""
    kept = [(p[r != IGNORED], r[r != IGNORED]) for p, r in paired(predictions, references) if (r != IGNORED).any()]
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
    """For each of (m, d) vectors the index of the nearest of (n, d) candidates."""
    return (np.square(candidates).sum(-1) - 2 * vectors @ candidates.T).argmin(-1)


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
