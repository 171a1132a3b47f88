"""How many paths through attention layers with skips there are, and how long they are.

A path takes in each of L layers one of H heads, or the skip; its length is the number of heads. There are (H + 1)^L paths,
C(L, k) H^k of length k: lengths are binomial, of L trials with probability H / (H + 1).
"""

import math
from dataclasses import dataclass

import numpy as np

from .inputs import whole


# name -> layers, heads; the encoder's where there are two stacks
ARCHITECTURES = {
    "distilbert-base": (6, 12),
    "mobilebert": (12, 4),
    **dict.fromkeys(("bert-base", "albert-base", "xlnet-base", "vit-base"), (12, 12)),
    **dict.fromkeys(("bert-large", "vit-large"), (24, 16)),
    "vit-huge": (32, 16),
    "t5-3b": (24, 32),
    "t5-11b": (24, 128),
    "gpt3-175b": (96, 96),
    "deit-tiny": (12, 3),
}


@dataclass(frozen=True)
class PathCounts:
    """The paths of a network of `num_layers` layers of `num_heads` heads.

    >>> bert = path_counts("bert-base")
    >>> bert.total, round(bert.mean, 4), bert.modes
    (23298085122481, 11.0769, (11, 12))
    """

    num_layers: int
    num_heads: int

    @property
    def total(self) -> int:
        """(H + 1)^L, exactly."""
        return (self.num_heads + 1) ** self.num_layers

    @property
    def log10_total(self) -> float:
        return self.num_layers * math.log10(self.num_heads + 1)

    @property
    def mean(self) -> float:
        return self.num_layers * self.num_heads / (self.num_heads + 1)

    @property
    def standard_deviation(self) -> float:
        return math.sqrt(self.num_layers * self.num_heads) / (self.num_heads + 1)

    @property
    def modes(self) -> tuple[int, ...]:
        """The most frequent length, or two of them where they tie."""
        counts = self.counts()
        return tuple(length for length, count in enumerate(counts) if count == max(counts))

    def counts(self) -> list[int]:
        """How many paths of each length 0 ... L there are, exactly."""
        return [math.comb(self.num_layers, k) * self.num_heads**k for k in range(self.num_layers + 1)]

    def distribution(self) -> np.ndarray:
        """The share of each length 0 ... L, (L + 1,): quotients of exact integers, each rounded once."""
        return np.array([count / self.total for count in self.counts()])


def path_counts(architecture: str | None = None, *, num_layers: int | None = None, num_heads: int | None = None):
    """The paths of a named architecture, or of any number of layers and heads.

    >>> round(path_counts("t5-11b").distribution()[24], 4)
    np.float64(0.8296)
    >>> path_counts(num_layers=2, num_heads=3).counts()
    [1, 6, 9]
    """
    if architecture is not None:
        if num_layers is not None or num_heads is not None:
            raise ValueError("give an architecture, or `num_layers` and `num_heads`, not both.")
        if architecture not in ARCHITECTURES:
            raise ValueError(f"{architecture!r} is not in the table, which has {', '.join(ARCHITECTURES)}.")
        num_layers, num_heads = ARCHITECTURES[architecture]
    if num_layers is None or num_heads is None:
        raise ValueError("give an architecture, or both `num_layers` and `num_heads`.")
    return PathCounts(whole("num_layers", num_layers, 1), whole("num_heads", num_heads, 1))
