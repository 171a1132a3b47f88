"""Biased nearest neighbour: an alternating sum of nearest-neighbour functions, each with its bias."""

from dataclasses import dataclass

import numpy as np

from .building import TaskBuilder, TaskConfig, check_count, points_feature
from .papers import BENEFITS
from .sampling import orthonormal_vectors, take_points


@dataclass
class BiasedNearestNeighborConfig(TaskConfig):
    """
    Args:
        dim (`int`, *optional*, defaults to 8): Dimension d of points and queries; the target sums 2 d^2 + 1 functions.
        num_queries (`int`, *optional*, defaults to 1): Number of queries in a row, each with its own label.
    """

    dim: int = 8
    num_queries: int = 1

    def geometry_name(self) -> str:
        queries = "" if self.num_queries == 1 else f"_m{self.num_queries}"
        return f"d{self.dim}{queries}"

    def check(self) -> None:
        super().check()
        self.dim = check_count("dim", self.dim, 2)
        self.num_queries = check_count("num_queries", self.num_queries, 1)


class BiasedNearestNeighbor(TaskBuilder):
    """Two orthonormal points and a Gaussian query whose label alternates between them as the query moves: solved by 2 d^2 + 1
    biased full-rank heads, and almost invisible to a head of low rank. A reconstruction: the published statement was
    available second-hand only, without the definition of its target."""

    BUILDER_CONFIG_CLASS = BiasedNearestNeighborConfig
    BUILDER_CONFIGS = [BiasedNearestNeighborConfig(), BiasedNearestNeighborConfig(dim=16)]
    DEFAULT_CONFIG_NAME = "d8"
    CITATION = BENEFITS
    LABELS = (
        "`points` are two orthonormal vectors, rotation invariant; `queries` are normal with variance d in each entry. Let "
        "f_b(X, y) be x_1 where (x_1 - x_2).y + b > 0 and x_2 elsewhere. The label is (-1)^d times the sum of (-1)^n f_b "
        "with b = -n over n = -d^2 ... d^2, which is one of the two points: which one alternates with the whole part of "
        "(x_1 - x_2).y. This is a reconstruction of a target known second-hand, chosen so that its stated properties hold."
    )
    DIFFERENCES = "There is no published code or experiment: the whole task is a reconstruction."

    def columns(self):
        queries = points_feature(self.config.num_queries, self.config.dim)
        return {"points": points_feature(2, self.config.dim), "queries": queries, "labels": queries}

    def model_arguments(self):
        return {"input_dim": self.config.dim}

    def draw(self, rng, rows, *, split, first):
        dim = self.config.dim
        points = orthonormal_vectors(rng, rows, 2, dim)
        queries = rng.standard_normal((rows, self.config.num_queries, dim), dtype=np.float32) * np.float32(dim**0.5)
        # in double precision, as a jump at every whole number would show the rounding of single
        difference = points[:, 0].astype(np.float64) - points[:, 1]
        projection = np.einsum("rmd,rd->rm", queries, difference)
        steps = np.clip(np.ceil(projection) - 1, -(dim**2) - 1, dim**2).astype(np.int64)
        return {"points": points, "queries": queries, "labels": take_points(points, (steps + dim) % 2)}
