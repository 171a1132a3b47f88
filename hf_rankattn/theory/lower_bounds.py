"""How far H heads of rank r must stay from the nearer of two orthonormal points of R^d, and how many they would have to be.

The target's part of degree l in w has N(d, l) equal singular values, whose squares sum to eta_l^2 / 2 of error. What a head
can do depends on w through K^T w alone, r numbers; functions of those span C(l + r - 1, r - 1) dimensions in degree l. So H
heads leave at least the share `1 - H C(l + r - 1, r - 1) / N(d, l)` of each degree.
"""

import numpy as np

from .harmonics import dimension_growth, sign_energies
from .inputs import first_whole, positive, whole


LARGEST_COUNT = 2**20  # odd degrees
# a head of rank d - 1 sees half of every high degree: its share tends to 1/2, not to 0
LARGEST_COUNT_OF_HALVES = 2**14


def seen_shares(d: int, r: int, count: int) -> np.ndarray:
    """C(l + r - 1, r - 1) / N(d, l) of the first odd degrees, (count,), falling from r / d."""
    degree = 2 * np.arange(count - 1, dtype=np.float64) + 1
    seen = (degree + r) * (degree + r + 1) / ((degree + 1) * (degree + 2))
    return r / d * np.concatenate([[1.0], np.cumprod(seen / dimension_growth(d, degree))])


def check_geometry(d: int, r: int) -> tuple[int, int]:
    d, r = whole("d", d, 3, "the bound counts harmonics on a sphere"), whole("r", r, 1)
    if r > d:
        raise ValueError(f"the rank of a head cannot exceed the dimension: `r` must be at most d={d}, got {r}.")
    return d, r


def lower_bound(d: int, r: int, num_heads: int) -> float:
    """LB(d, r, H): no H softmax or hardmax heads of rank r, whose values are multiples of the points, have a smaller error.

    `1/2 sum over odd l of eta_l^2 max(0, 1 - H C(l + r - 1, r - 1) / N(d, l))`, for r < d; a head of rank d has none to fear.

    >>> round(lower_bound(64, 1, 64), 4), round(lower_bound(64, 32, 16), 3), lower_bound(64, 64, 1)
    (0.1791, 0.107, 0.0)
    """
    (d, r), num_heads = check_geometry(d, r), whole("num_heads", num_heads, 1)
    if r == d:
        return 0.0
    count, largest = 1024, LARGEST_COUNT if r < d - 1 else LARGEST_COUNT_OF_HALVES
    shares = seen_shares(d, r, count)
    while num_heads * shares[-1] > 1e-3 and count < largest:
        count *= 4
        shares = seen_shares(d, r, count)
    captured = np.minimum(1.0, num_heads * shares)
    if captured[-1] == 1 and r < d - 1:
        raise ValueError(
            f"{num_heads} heads of rank {r} fill the first {count} odd degrees in {d} dimensions: the bound is too small to "
            "be summed. Ask for fewer heads."
        )
    energies = sign_energies(d, count)
    # Beyond the last degree l energies fall like l^-2 and shares like l^-(d - 1 - r), which makes their mean share this.
    rest = (1 - energies.sum()) * (1 - captured[-1] / (d - r))
    return float(max(0.0, 0.5 * (energies @ (1 - captured) + rest)))


def heads_needed(d: int, r: int, error: float) -> int:
    """The smallest H for which LB(d, r, H) does not forbid an error: fewer heads of rank r cannot reach it.

    >>> [heads_needed(8, 1, error) for error in (0.15, 0.10)], heads_needed(8, 8, 0.01)
    ([20, 108], 1)
    """
    (d, r), error = check_geometry(d, r), positive("error", error)
    found = first_whole(1, 10**300, lambda num_heads: lower_bound(d, r, num_heads) <= error)
    if found is None:
        raise ValueError(f"an error of {error} needs more than 1e300 heads of rank {r} in {d} dimensions.")
    return found
