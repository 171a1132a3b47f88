"""How many columns random hard attention hits: the rank it has, and what the widths of heads make of it.

A hard attention map has one 1 in each row. Its rank is the number of columns that are hit, its singular values are the square
roots of how often.
"""

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, log_ndtr, ndtr

from .harmonics import angle_distribution, gauss_panels
from .inputs import first_whole, positive, whole


KEYS = ("gaussian", "unit")
LAWS = ("mean_field", "log_normal")
# points of [0, 12] and the logarithm of the normal distribution there; interpolation changes coverage by at most 2e-6
POINTS = np.linspace(0, 12, 6001)
LOG_NORMAL = POINTS, log_ndtr(POINTS)


def distinct_columns(num_keys: int, num_queries: int | None = None) -> float:
    """Expected number of columns hit when each row picks one of n at random: `n (1 - (1 - 1/n)^m)`, m = n by default.

    >>> round(distinct_columns(128), 2), round(distinct_columns(256, 64), 1), round(distinct_columns(64, 256), 1)
    (81.1, 56.7, 62.9)
    """
    n = whole("num_keys", num_keys, 1)
    m = n if num_queries is None else whole("num_queries", num_queries, 1)
    return 1.0 if n == 1 else -n * math.expm1(m * math.log1p(-1 / n))


def distinct_columns_deviation(num_keys: int, num_queries: int | None = None) -> float:
    """Standard deviation of the same number.

    >>> round(distinct_columns_deviation(128), 2)
    3.53
    """
    n = whole("num_keys", num_keys, 1)
    m = n if num_queries is None else whole("num_queries", num_queries, 1)
    if n == 1:
        return 0.0
    one, two = (1 - 1 / n) ** m, (1 - 2 / n) ** m
    return math.sqrt(max(0.0, n * (n - 1) * two + n * one - (n * one) ** 2))


def causal_columns(n: int) -> float:
    """Expected number of columns hit when row i picks one of the first i: `(n + 1) / 2`.

    Column j is missed by rows j to n with probability (j-1)/j j/(j+1) ... (n-1)/n = (j-1)/n.

    >>> causal_columns(256)
    128.5
    """
    return (whole("n", n, 1) + 1) / 2


def windowed_columns(n: int, window: int) -> float:
    """The same when row i picks one of the last `window` of the first i, itself included.

    >>> round(windowed_columns(512, 32) / 512, 3), windowed_columns(512, 512)
    (0.629, 256.5)
    """
    n, w = whole("n", n, 1), whole("window", window, 1)
    w = min(w, n)
    column = np.arange(1, n + 1)
    last = np.minimum(column + w - 1, n)
    # rows before the window is full choose among fewer; their factors telescope
    early = np.where(column < w, (column - 1) / np.minimum(last, w - 1).clip(min=1), 1.0)
    late = last - np.maximum(column, w) + 1
    return float((1 - early * (1 - 1 / w) ** np.maximum(late, 0)).sum())


def hardmax_limits() -> dict[str, float]:
    """Rank metrics of a large random hard map, divided by its size: what independent choices, Poisson(1) a column, give.

    >>> {name: round(value, 4) for name, value in hardmax_limits().items()}
    {'rank': 0.6321, 'effective_rank': 0.6153, 'participation_ratio': 0.5}
    """
    count = np.arange(1, 60)
    mass = np.exp(-1 - gammaln(count + 1))
    singular = np.sqrt(count)
    total = float(mass @ singular)
    entropy = math.log(total) - float(mass @ (singular * np.log(singular))) / total
    return {
        "rank": float(mass.sum()),
        "effective_rank": math.exp(entropy),
        "participation_ratio": float(mass @ count) ** 2 / float(mass @ count**2),
    }


def expected_maximum(n: int) -> float:
    """m_n, the mean of the largest of n independent standard normal numbers, integrated to 1e-12.

    >>> [round(expected_maximum(n), 3) for n in (1, 2, 64, 512)]
    [0.0, 0.564, 2.344, 3.044]
    """
    n = whole("n", n, 1)
    x, weight = gauss_panels(12.0)
    return float(weight @ (-np.expm1(n * log_ndtr(x)) - ndtr(-x) ** n))


@lru_cache
def cell_shape(dimension: int) -> float:
    """Shape of the Gamma distribution with the mean and the variance of the volume of a random Voronoi cell.

    The second moment is the mean of `exp(-|B_x union B_y|)` over pairs of points x, y, where B_x is the ball around x through
    the cell's own point; the radius integrates out, and two angles are left.

    >>> cell_shape(1), round(1 / cell_shape(2), 4), round(1 / cell_shape(3), 3)
    (2.0, 0.2802, 0.179)
    """
    dimension = whole("dimension", dimension, 1)
    if dimension == 1:
        return 2.0
    if dimension > 64:
        return math.inf  # the variance falls by half with each dimension and is below 1e-9
    alpha, alpha_weight = gauss_panels(math.pi / 4, panels=6)  # the two balls may change places
    phi, phi_weight = gauss_panels(math.pi, panels=6)
    first, second = np.cos(alpha)[:, None], np.sin(alpha)[:, None]
    union = 0.0
    for own, other in ((first, second), (second, first)):
        # half-angle of the cap of this ball that the other covers
        cap = np.arctan2(other * np.sin(phi), own - other * np.cos(phi)) - math.pi / 2
        covered = 0.5 * (1 + np.sign(cap) * angle_distribution(dimension + 2, np.abs(cap)))
        union = union + own**dimension * (1 - covered)
    integrand = np.sin(phi) ** (dimension - 2) * (first * second) ** (dimension - 1) / union**2
    constant = math.exp(math.lgamma(dimension / 2 + 1) - math.lgamma((dimension - 1) / 2)) * 2 / math.sqrt(math.pi)
    return 1 / (2 * constant * float(alpha_weight @ integrand @ phi_weight) - 1)


def hit_share(rate: np.ndarray, shape: float) -> np.ndarray:
    """Probability that a cell of mean rate is hit at least once, if its size is Gamma of this shape: 1 - (1 + rate/a)^-a."""
    if math.isinf(shape):
        return -np.expm1(-rate)
    return -np.expm1(-shape * np.log1p(rate / shape))


def coverage(n: int, qk_rank: int, keys: str = "gaussian", law: str = "mean_field") -> float:
    """Expected share of n columns that n random queries of a head hit, when each takes its best key.

    Args:
        n (`int`): Number of queries and of keys.
        qk_rank (`int`): Their width.
        keys (`str`, *optional*, defaults to `"gaussian"`):
            `"gaussian"`, or `"unit"` (QK-norm), whose cells are alike but for their random sizes. The length of queries
            plays no part.
        law (`str`, *optional*, defaults to `"mean_field"`):
            For Gaussian keys: `"mean_field"` gives a key of length rho the probability E[Phi(rho u)^(n-1)] of winning a
            query, u a coordinate on the sphere, and a cell of random size; `"log_normal"` is its limit for wide heads,
            where the number of queries won has a logarithm of variance m_n^4 / (2 qk_rank).

    >>> [round(coverage(512, width), 3) for width in (8, 32, 128)], round(coverage(512, 2, "unit"), 4)
    ([0.245, 0.477, 0.585], 0.5556)
    """
    n, d = whole("n", n, 2), whole("qk_rank", qk_rank, 2, "in one dimension two keys win everything")
    check_choices(keys, law)
    if keys == "unit":
        return float(hit_share(np.ones(()), cell_shape(d - 1)))
    if law == "log_normal":
        return log_normal_coverage(expected_maximum(n) ** 4 / (2 * d))
    log_length = np.linspace(-40 / d, 8 / math.sqrt(d), 400)  # e^-40 of the mass is shorter, e^-60 longer
    density = np.exp(d * log_length - d * np.expm1(2 * log_length) / 2)
    length = math.sqrt(d) * np.exp(log_length)
    angle, weight = gauss_panels(math.pi / 2, panels=6)
    weight = weight * np.cos(angle) ** (d - 2)
    log_below = np.interp(length[:, None] * np.sin(angle), *LOG_NORMAL)
    wins = 0.5 * (np.exp((n - 1) * log_below) @ weight) / weight.sum()
    wins += 0.5 * (-np.expm1(log_below)) ** (n - 1) @ weight / weight.sum()
    return float(density @ hit_share(n * wins, cell_shape(d - 1)) / density.sum())


def check_choices(keys: str, law: str) -> None:
    for name, value, choices in (("keys", keys, KEYS), ("law", law, LAWS)):
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}.")


def log_normal_coverage(variance: float) -> float:
    """E[1 - exp(-exp(sigma z - sigma^2 / 2))] of a normal z: about 0.632 - 0.184 sigma^2 where sigma is small.

    >>> round(log_normal_coverage(0.0), 4)
    0.6321
    """
    z = np.linspace(-12, 12, 4801)  # equal steps: for a function that is flat at both ends nothing converges faster
    weight = np.exp(-(z**2) / 2)
    won = np.exp(math.sqrt(variance) * z - variance / 2)
    return float(weight @ -np.expm1(-won) / weight.sum())


def saturation_width(n: int, reached: float, keys: str = "gaussian", law: str = "mean_field") -> float:
    """The width at which a head reaches a share of the ceiling `1 - (1 - 1/n)^n`, interpolated between whole widths in the
    logarithm; for Gaussian keys it grows like (ln n)^2.

    >>> round(saturation_width(512, 0.5), 1), round(saturation_width(512, 0.95, "unit"), 1)
    (11.6, 4.0)
    """
    n, reached = whole("n", n, 2), positive("reached", reached)
    if reached >= 1:
        raise ValueError(f"`reached` must lie strictly between 0 and 1, got {reached!r}.")
    check_choices(keys, law)
    goal = reached * distinct_columns(n) / n
    width = first_whole(2, 2**20, lambda width: coverage(n, width, keys, law) >= goal)
    if width is None:
        raise ValueError(f"no width up to 2**20 reaches {reached} of the ceiling for n={n}; ask for a smaller share.")
    if width == 2:
        return 2.0
    below, above = (coverage(n, near, keys, law) for near in (width - 1, width))
    return (width - 1) * (width / (width - 1)) ** ((goal - below) / (above - below))
