"""Farthest neighbour: the label of each of N points is the farthest of the others."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._baselines import neighbor_baselines
from ._building import BENEFITS, TaskBuilder, TaskConfig, points_feature
from ._metrics import NeighborAccuracy, NeighborError
from ._sampling import take_points, unit_vectors


@dataclass
class FarthestNeighborConfig(TaskConfig):
    """
    Args:
        dim (`int`, *optional*, defaults to 64): Dimension of the points.
        num_points (`int`, *optional*, defaults to 16): Number of points in a row.
    """

    LEAST: ClassVar = {"dim": 2, "num_points": 2}
    dim: int = 64
    num_points: int = 16

    def geometry_name(self) -> str:
        return f"d{self.dim}_n{self.num_points}"


class FarthestNeighbor(TaskBuilder):
    """Points on the unit sphere, each labelled with the farthest of the others: self-attention of full query-key rank
    solves it with one head, heads of low rank need very many."""

    BUILDER_CONFIGS = [
        FarthestNeighborConfig(),
        FarthestNeighborConfig(num_points=4),
        FarthestNeighborConfig(num_points=64, num_examples=4_000, num_eval_examples=1_000),
        FarthestNeighborConfig(num_points=256, num_examples=1_000, num_eval_examples=250),
        FarthestNeighborConfig(dim=16),
        FarthestNeighborConfig(dim=128),
        FarthestNeighborConfig(dim=256, num_examples=4_000, num_eval_examples=1_000),
    ]
    metrics = (NeighborError, NeighborAccuracy)
    baselines = staticmethod(neighbor_baselines)
    CITATION = BENEFITS
    LABELS = (
        "`points` are independent and uniform on the unit sphere. The label of a point is the point of the same row that "
        "is farthest from it, which is the one with the smallest inner product."
    )
    DIFFERENCES = (
        "The published code seeds its data again at every epoch, so that all epochs use one set of batches. It reports the "
        "error on these batches, and runs with neighbouring seeds share most of their data. Here the splits are disjoint, "
        "the stream never repeats, and seeds share nothing."
    )

    def columns(self):
        shape = self.config.num_points, self.config.dim
        return {"points": points_feature(*shape), "labels": points_feature(*shape)}

    def scratch_numbers(self):
        return self.config.num_points**2

    def draw(self, rng, rows, *, split, first):
        points = unit_vectors(rng, rows, self.config.num_points, self.config.dim)
        # a point is never its own farthest: its product with itself is the largest
        farthest = (points @ np.swapaxes(points, 1, 2)).argmin(-1)
        return {"points": points, "labels": take_points(points, farthest)}
