"""Biased nearest neighbour: an alternating sum of nearest-neighbour functions, each with its bias."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._baselines import neighbor_baselines
from ._building import BENEFITS, TaskBuilder, TaskConfig, points_feature
from ._metrics import NeighborAccuracy, NeighborError
from ._sampling import orthonormal_vectors, take_points


@dataclass
class BiasedNearestNeighborConfig(TaskConfig):
    """
    Args:
        dim (`int`, *optional*, defaults to 8): Dimension d of points and queries; the target sums 2 d^2 + 1 functions.
        num_queries (`int`, *optional*, defaults to 1): Number of queries in a row, each with its own label.
    """

    LEAST: ClassVar = {"dim": 2, "num_queries": 1}
    dim: int = 8
    num_queries: int = 1

    def geometry_name(self) -> str:
        queries = "" if self.num_queries == 1 else f"_m{self.num_queries}"
        return f"d{self.dim}{queries}"


class BiasedNearestNeighbor(TaskBuilder):
    """Two orthonormal points and a Gaussian query whose label alternates between them as the query moves: solved by 2 d^2 + 1
    biased full-rank heads, and almost invisible to a head of low rank. This is a reconstruction: only
    second-hand reports of the published statement were available, without the definition of its target."""

    BUILDER_CONFIGS = [BiasedNearestNeighborConfig(), BiasedNearestNeighborConfig(dim=16)]
    metrics = (NeighborError, NeighborAccuracy)
    baselines = staticmethod(neighbor_baselines)
    CITATION = BENEFITS
    LABELS = (
        "`points` are two orthonormal vectors, rotation invariant; `queries` are normal with variance d in each entry. Let "
        "f_b(X, y) be x_1 where (x_1 - x_2).y + b > 0 and x_2 elsewhere. The label is (-1)^d times the sum of (-1)^n f_b "
        "with b = -n over n = -d^2 ... d^2. It is one of the two points, and alternates between them with the integer part of "
        "(x_1 - x_2).y. This reconstructs a target that is known from reports only, so that its stated properties hold."
    )
    DIFFERENCES = "There is no published code or experiment: the whole task is a reconstruction."

    def columns(self):
        queries = points_feature(self.config.num_queries, self.config.dim)
        return {"points": points_feature(2, self.config.dim), "queries": queries, "labels": queries}

    def draw(self, rng, rows, *, split, first):
        dim = self.config.dim
        points = orthonormal_vectors(rng, rows, 2, dim)
        queries = rng.standard_normal((rows, self.config.num_queries, dim), dtype=np.float32) * np.float32(dim**0.5)
        # in double precision: the label jumps at every integer, so rounding errors of single precision would show
        difference = points[:, 0].astype(np.float64) - points[:, 1]
        projection = np.einsum("rmd,rd->rm", queries, difference)
        steps = np.clip(np.ceil(projection) - 1, -(dim**2) - 1, dim**2).astype(np.int64)
        return {"points": points, "queries": queries, "labels": take_points(points, (steps + dim) % 2)}
