"""Checks of the arguments of formulas, and the search for the smallest argument that is large enough."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..checks import whole


def positive(name: str, value: Any) -> float:
    """`value` as a float above zero, infinity included, or a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer) or not value > 0:
        raise ValueError(f"`{name}` must be a number above 0, got {value!r}.")
    return float(value)


def cosines(value: Any) -> np.ndarray:
    """An array of numbers in [-1, 1]; what rounding put outside is put back."""
    array = np.asarray(value, dtype=np.float64)
    if not bool(np.all(np.abs(array) <= 1 + 1e-9)):
        raise ValueError("cosines of angles lie in [-1, 1]; some given do not. Are the queries and keys unit vectors?")
    return np.clip(array, -1, 1)


def unit_heads(queries: Any, keys: Any) -> tuple[np.ndarray, np.ndarray]:
    """The query and key directions of rank-one heads, (H, d) each, or a ValueError where they are not unit vectors."""
    queries, keys = (np.ascontiguousarray(rows, dtype=np.float64) for rows in (queries, keys))
    if queries.ndim != 2 or queries.shape != keys.shape:
        raise ValueError(f"`queries` and `keys` must both be (heads, d), got {queries.shape} and {keys.shape}.")
    if len(queries) == 0:
        raise ValueError("there are no heads: `queries` and `keys` need at least one row.")
    whole("d", queries.shape[1], 2, "a head has a direction")
    for name, rows in (("queries", queries), ("keys", keys)):
        lengths = np.sqrt(np.einsum("hd,hd->h", rows, rows))
        wrong = ~(np.abs(lengths - 1) < 1e-6)
        if wrong.any():
            head = int(wrong.argmax())
            raise ValueError(
                f"`{name}` must be unit vectors, but that of head {head} has length {lengths[head]:.6g}: the formulas hold "
                "for unit vectors only, and rescaling a rank-one hard head does not change it. Divide each row by its length."
            )
    return queries, keys


def head_weights(weights: Any, count: int) -> np.ndarray:
    """One finite number for each head."""
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != (count,) or not np.isfinite(weights).all():
        raise ValueError(f"`weights` must be {count} finite numbers, one for each head, got shape {weights.shape}.")
    return weights


def first_whole(low: int, limit: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest whole number from `low` on that is enough, by doubling and bisection; None if it is above `limit`."""
    if enough(low):
        return low
    high = 2 * low
    while not enough(high):
        low, high = high, 2 * high
        if high > limit:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
