"""Nearest neighbour: the label of a query is the nearest of N points."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._baselines import neighbor_baselines
from ._building import BENEFITS, TaskBuilder, TaskConfig, check_choice, points_feature
from ._metrics import NeighborAccuracy, NeighborError
from ._sampling import Rng, orthonormal_vectors, take_points, unit_vectors


DISTRIBUTIONS = ("uniform", "orthogonal", "doubled")


@dataclass
class NearestNeighborConfig(TaskConfig):
    """
    Args:
        dim (`int`, *optional*, defaults to 64): Dimension of points and queries.
        num_points (`int`, *optional*, defaults to 2):
            Number of points in a row, negatives included where the distribution is `"doubled"`.
        num_queries (`int`, *optional*, defaults to 1): Number of queries in a row, each with its own label.
        distribution (`str`, *optional*, defaults to `"orthogonal"`):
            `"uniform"` (independent on the sphere), `"orthogonal"` (orthonormal, rotation invariant; at most `dim`) or
            `"doubled"` (independent points, and then their negatives in the same order).
    """

    LEAST: ClassVar = {"dim": 2, "num_points": 2, "num_queries": 1}
    dim: int = 64
    num_points: int = 2
    num_queries: int = 1
    distribution: str = "orthogonal"

    def geometry_name(self) -> str:
        queries = "" if self.num_queries == 1 else f"_m{self.num_queries}"
        return f"{self.distribution}_d{self.dim}_n{self.num_points}{queries}"

    def check(self) -> None:
        super().check()
        check_choice("distribution", self.distribution, DISTRIBUTIONS)
        if self.distribution == "orthogonal" and self.num_points > self.dim:
            raise ValueError(
                f"{self.num_points} points cannot be orthogonal in {self.dim} dimensions: give `num_points` <= `dim`, or "
                "distribution='uniform'."
            )
        if self.distribution == "doubled" and self.num_points % 2:
            raise ValueError(f"'doubled' points are pairs x, -x: `num_points` must be even, got {self.num_points}.")


class NearestNeighbor(TaskBuilder):
    """Points and queries on the unit sphere, each query labelled with the nearest of the points: the target of the lower
    bounds on heads of low rank."""

    BUILDER_CONFIGS = [
        *(NearestNeighborConfig(dim=dim) for dim in (64, 4, 8, 16, 32)),
        NearestNeighborConfig(num_points=16),
        NearestNeighborConfig(num_points=16, distribution="uniform"),
        NearestNeighborConfig(num_points=16, distribution="doubled"),
        NearestNeighborConfig(dim=16, num_queries=4),
    ]
    metrics = (NeighborError, NeighborAccuracy)
    baselines = staticmethod(neighbor_baselines)
    CITATION = BENEFITS
    LABELS = (
        "`points` are drawn as the name of the config says, `queries` are independent and uniform on the unit sphere. The "
        "label of a query is the point with the largest inner product with it, which is the nearest."
    )
    DIFFERENCES = (
        "The published code uses the Q of a QR decomposition unchanged, which is not rotation invariant: the first entry of "
        "the first point is always negative. Here the signs are corrected, so that the points follow the Haar measure. The "
        "data are held out and never repeated, as in `farthest_neighbor`."
    )

    def columns(self):
        config = self.config
        queries = points_feature(config.num_queries, config.dim)
        return {"points": points_feature(config.num_points, config.dim), "queries": queries, "labels": queries}

    def scratch_numbers(self):
        return self.config.num_points * self.config.num_queries

    def draw(self, rng, rows, *, split, first):
        points = self.draw_points(rng, rows)
        queries = unit_vectors(rng, rows, self.config.num_queries, self.config.dim)
        nearest = (queries @ np.swapaxes(points, 1, 2)).argmax(-1)
        return {"points": points, "queries": queries, "labels": take_points(points, nearest)}

    def draw_points(self, rng: Rng, rows: int) -> np.ndarray:
        count, dim = self.config.num_points, self.config.dim
        if self.config.distribution == "orthogonal":
            return orthonormal_vectors(rng, rows, count, dim)
        if self.config.distribution == "uniform":
            return unit_vectors(rng, rows, count, dim)
        half = unit_vectors(rng, rows, count // 2, dim)
        return np.concatenate([half, -half], axis=1)
