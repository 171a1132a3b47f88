"""How much one head of rank r can see of where the better of two orthonormal points lies, plain or biased.

With w = (x_1 - x_2) / sqrt(2), uniform on the sphere, the target is a sign psi((x_1 - x_2).y), and a head of rank r knows w by r
numbers only, K^T w. What it can say of psi is at best E[psi | K^T w, y], and the share of the target's energy in that is what
its values, multiples of the points, can take away from an error of 1/2.
"""

import numpy as np

from .harmonics import angle_distribution
from .inputs import whole


def visible_energy(d: int, r: int, *, biased: bool = False, draws: int = 4096, seed: int = 0) -> tuple[float, float]:
    """E[E[psi | K^T w, y]^2], averaged over random w and y, with its standard error.

    Args:
        d (`int`): Dimension of the points.
        r (`int`): Rank of the head, at most d.
        biased (`bool`, *optional*, defaults to `False`):
            Whether psi is the square wave of `biased_nearest_neighbor`, which alternates with the whole part of
            (x_1 - x_2).y for a query of variance d in each entry, instead of the sign of the nearest neighbour.
        draws (`int`, *optional*, defaults to 4096): How many pairs (w, y).
        seed (`int`, *optional*, defaults to 0): Of the draws.

    For the nearest neighbour this is `1 - 2 lower_bound(d, r, 1)`. What is hidden lies in the remaining d - r dimensions, where w
    is uniform on a sphere again.

    >>> plain, biased = visible_energy(8, 4)[0], visible_energy(8, 4, biased=True)[0]
    >>> 0.34 < plain < 0.40, biased < 0.01
    (True, True)
    """
    d, r, draws = whole("d", d, 2), whole("r", r, 1), whole("draws", draws, 2)
    if r > d:
        raise ValueError(f"the rank of a head cannot exceed the dimension: `r` must be at most d={d}, got {r}.")
    if r == d:
        return 1.0, 0.0
    rng = np.random.default_rng(np.random.SeedSequence([whole("seed", seed, 0), d, r]))
    difference = rng.standard_normal((draws, d))
    difference *= np.sqrt(2) / np.linalg.norm(difference, axis=1, keepdims=True)
    query = rng.standard_normal((draws, d)) * np.sqrt(d)
    known = np.einsum("id,id->i", difference[:, :r], query[:, :r])
    hidden = np.linalg.norm(difference[:, r:], axis=1) * np.linalg.norm(query[:, r:], axis=1)
    if not biased:
        means = 1 - 2 * hidden_distribution(d - r, -known / hidden)
    else:
        # psi is constant between whole numbers: its mean is a sum of differences of the distribution of what is hidden
        reach = int(np.ceil((np.abs(known) + hidden).max()))
        jumps = np.arange(-reach, reach + 1)
        below = hidden_distribution(d - r, (jumps - known[:, None]) / hidden[:, None])
        means = np.diff(below, axis=1) @ (1.0 - 2 * (jumps[:-1] % 2))
    energies = means**2
    return float(energies.mean()), float(energies.std() / np.sqrt(draws))


def hidden_distribution(dimension: int, value: np.ndarray) -> np.ndarray:
    """P(t <= value) of a coordinate t of a uniform point on the sphere of a dimension."""
    if dimension == 1:
        return 0.5 * (value >= -1) + 0.5 * (value >= 1)
    below = angle_distribution(dimension, np.arcsin(np.minimum(np.abs(value), 1.0)))
    return 0.5 + 0.5 * np.sign(value) * below
