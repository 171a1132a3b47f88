"""Convex hull: which of N points of the plane are vertices of their hull."""

from dataclasses import dataclass

import numpy as np

from .building import TaskBuilder, TaskConfig, check_count, ids_feature, points_feature
from .papers import COLLAPSE


@dataclass
class ConvexHullConfig(TaskConfig):
    """
    Args:
        num_points (`int`, *optional*, defaults to 10): Points in a row; at least 3.
        side (`float`, *optional*, defaults to 10.0): Side of the square that the points are drawn from.
        shift (`float`, *optional*, defaults to 3.3): Standard deviation of the shift that all points of a row share.
    """

    num_eval_examples: int | None = 300
    num_points: int = 10
    side: float = 10.0
    shift: float = 3.3

    def geometry_name(self) -> str:
        return f"n{self.num_points}"

    def check(self) -> None:
        super().check()
        self.num_points = check_count("num_points", self.num_points, 3)
        self.side, self.shift = float(self.side), float(self.shift)
        if not 0 < self.side < np.inf or not 0 <= self.shift < np.inf:
            raise ValueError(
                f"`side` must be above 0 and `shift` at least 0, both finite; got {self.side} and {self.shift}."
            )


class ConvexHull(TaskBuilder):
    """Points of the plane, each labelled with whether it is a vertex of the convex hull of its row."""

    BUILDER_CONFIG_CLASS = ConvexHullConfig
    BUILDER_CONFIGS = [ConvexHullConfig()]
    DEFAULT_CONFIG_NAME = "n10"
    CITATION = COLLAPSE
    LABELS = (
        "`points` are uniform in a square, moved by one normal shift that the points of a row share. `labels` are 1 for "
        "vertices of the convex hull and 0 for points inside."
    )
    DIFFERENCES = (
        "The published code draws the line of the majority class at 0.54; with its own generator, which is the one used here, "
        "it is at 0.59, and the distance from the mean of the points alone reaches 0.83."
    )

    def columns(self):
        return {"points": points_feature(self.config.num_points, 2), "labels": ids_feature(self.config.num_points)}

    def scratch_numbers(self):
        return self.config.num_points**2

    def model_arguments(self):
        return {"input_dim": 2, "num_labels": 2}

    def draw(self, rng, rows, *, split, first):
        points = rng.uniform(0, self.config.side, size=(rows, self.config.num_points, 2))
        points = (points + rng.normal(0, self.config.shift, size=(rows, 1, 2))).astype(np.float32)
        return {"points": points, "labels": hull_vertices(points).astype(np.int64)}


def hull_vertices(points: np.ndarray) -> np.ndarray:
    """(rows, n, 2) points -> (rows, n), whether each is a vertex of the convex hull of its row.

    A point is a vertex if, seen from it, all others lie on one side of the ray to one of them. Products of differences of
    single precision are exact in double, so the sides are, too.
    """
    points = points.astype(np.float64)
    vertices = np.zeros(points.shape[:2], dtype=bool)
    for i in range(points.shape[1]):
        x, y = np.moveaxis(points - points[:, i : i + 1], 2, 0)
        sides = x[:, :, None] * y[:, None, :] - y[:, :, None] * x[:, None, :]
        on_one_side = (sides >= 0).all(-1)
        on_one_side[:, i] = False  # the ray to itself has no sides
        vertices[:, i] = on_one_side.any(-1)
    return vertices
