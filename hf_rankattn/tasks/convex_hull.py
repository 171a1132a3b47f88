"""Convex hull: which of N points of the plane are vertices of their hull."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._building import COLLAPSE, Arrays, TaskBuilder, TaskConfig, ids_feature, points_feature
from ._metrics import SequenceAccuracy, TaskMetric, TokenAccuracy, labelled


@dataclass
class ConvexHullConfig(TaskConfig):
    """
    Args:
        num_points (`int`, *optional*, defaults to 10): Points in a row; at least 3.
        side (`float`, *optional*, defaults to 10.0): Side of the square that the points are drawn from.
        shift (`float`, *optional*, defaults to 3.3): Standard deviation of the shift that all points of a row share.
    """

    LEAST: ClassVar = {"num_points": 3}
    num_eval_examples: int | None = 300
    num_points: int = 10
    side: float = 10.0
    shift: float = 3.3

    def geometry_name(self) -> str:
        return f"n{self.num_points}"

    def check(self) -> None:
        super().check()
        self.side, self.shift = float(self.side), float(self.shift)
        if not 0 < self.side < np.inf or not 0 <= self.shift < np.inf:
            raise ValueError(
                f"`side` must be above 0 and `shift` at least 0, both finite; got {self.side}, {self.shift}."
            )


class HullVertexF1(TaskMetric):
    """F1 of class 1, the vertices, over all points; 0 if no vertex is predicted although there are some.

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


def hull_baselines(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The most frequent class, and the best threshold on the distance from the mean of the points."""
    yield "majority", np.full_like(test["labels"], int(train["labels"].mean() > 0.5))
    distance, asked = (
        np.linalg.norm(rows["points"] - rows["points"].mean(1, keepdims=True), axis=-1) for rows in (train, test)
    )
    order = np.argsort(distance, axis=None)
    labels = train["labels"].ravel()[order]
    # correct answers for each threshold, if all points below it are called inside and all others vertices
    right = np.concatenate([[0], np.cumsum(1 - labels)]) + np.concatenate([np.cumsum(labels[::-1])[::-1], [0]])
    threshold = np.append(distance.ravel()[order], np.inf)[right.argmax()]
    yield "own_token_and_mean_pool", (asked >= threshold).astype(np.int64)


class ConvexHull(TaskBuilder):
    """Points of the plane, each labelled with whether it is a vertex of the convex hull of its row."""

    BUILDER_CONFIGS = [ConvexHullConfig()]
    metrics = (TokenAccuracy, SequenceAccuracy, HullVertexF1)
    baselines = staticmethod(hull_baselines)
    CITATION = COLLAPSE
    LABELS = (
        "`points` are uniform in a square, moved by one normal shift that the points of a row share. `labels` are 1 for "
        "vertices of the convex hull and 0 for points inside."
    )
    DIFFERENCES = (
        "The published code draws the line of the majority class at 0.54. With its own generator, which is also used here, the "
        "majority class reaches 0.59, and the distance from the mean of the points alone reaches 0.83."
    )

    def columns(self):
        return {"points": points_feature(self.config.num_points, 2), "labels": ids_feature(self.config.num_points)}

    def scratch_numbers(self):
        return self.config.num_points**2

    def model_arguments(self):
        return super().model_arguments() | {"num_labels": 2}

    def draw(self, rng, rows, *, split, first):
        points = rng.uniform(0, self.config.side, size=(rows, self.config.num_points, 2))
        points = (points + rng.normal(0, self.config.shift, size=(rows, 1, 2))).astype(np.float32)
        return {"points": points, "labels": hull_vertices(points).astype(np.int64)}


def hull_vertices(points: np.ndarray) -> np.ndarray:
    """(rows, n, 2) points -> (rows, n), whether each is a vertex of the convex hull of its row.

    A point is a vertex if all other points lie on one side of the ray from it to one of them. Products of differences of
    single-precision numbers are exact in double precision, so the sides are exact, too.
    """
    points = points.astype(np.float64)
    vertices = np.zeros(points.shape[:2], dtype=bool)
    for i in range(points.shape[1]):
        x, y = np.moveaxis(points - points[:, i : i + 1], 2, 0)
        sides = x[:, :, None] * y[:, None, :] - y[:, :, None] * x[:, None, :]
        on_one_side = (sides >= 0).all(-1)
        on_one_side[:, i] = False  # there is no ray to the point itself
        vertices[:, i] = on_one_side.any(-1)
    return vertices
