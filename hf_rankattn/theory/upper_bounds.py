"""What constructions reach on the nearest of two orthonormal points: one soft head of full rank, many heads of rank one,
and two layers of them. The constructions themselves are models, in `constructions`."""

import math

import numpy as np

from .harmonics import angle_distribution, gauss_panels, sphere_constant
from .inputs import positive, whole


def soft_error(d: int, beta: float) -> float:
    """The error of one softmax head of full rank, softmax(beta y.x), on two orthonormal points: `E 2 / (1 + e^z)^2` with
    z = beta sqrt(2) |u|, u a coordinate on the sphere. It has no closed form, so it is integrated, to 1e-12.

    >>> [round(soft_error(16, beta), 4) for beta in (1, 10, 100, 1000)]
    [0.3742, 0.0809, 0.0083, 0.0008]
    """
    d, beta = whole("d", d, 2), positive("beta", beta)
    if math.isinf(beta):
        return 0.0
    rate = beta * math.sqrt(2)
    # beyond these angles the density (in dimension) or the error (in beta) is below 1e-17
    stop = min(math.pi / 2, math.asin(min(1.0, 40 / rate)), 9 / math.sqrt(max(d - 2, 1)))
    angle, weight = gauss_panels(stop)
    wrong = 1 / (1 + np.exp(np.minimum(rate * np.sin(angle), 700)))
    return float(4 * sphere_constant(d) * (weight * np.cos(angle) ** (d - 2) * wrong**2).sum())


def soft_error_limit(d: int, beta: float) -> float:
    """What [`soft_error`] tends to for large beta: `2 sqrt(2) (ln 2 - 1/2) c_d / beta`.

    >>> round(soft_error_limit(16, 1000), 6), round(soft_error(16, 1000), 6)
    (0.00083, 0.00083)
    """
    return 2 * math.sqrt(2) * (math.log(2) - 0.5) * sphere_constant(d) / positive("beta", beta)


def matched_accuracy(d: int) -> float:
    """b of a rank-one head with q = k, a finite sum: `1/2 + E asin|u| / pi`.

    With n = d - 2 and W_n the integral of cos^n over a quarter turn, the mean of asin|u| falls by 1 / (n^2 W_n) from n - 2
    to n, beginning with pi / 4 for n = 0 and pi / 2 - 1 for n = 1.

    >>> [round(matched_accuracy(d), 6) for d in (2, 3, 4, 8, 64)]
    [0.75, 0.68169, 0.648679, 0.596892, 0.532039]
    """
    n = whole("d", d, 2) - 2
    mean, wallis = (math.pi / 4, math.pi / 2) if n % 2 == 0 else (math.pi / 2 - 1, 1.0)
    for step in range(2 + n % 2, n + 1, 2):
        wallis *= (step - 1) / step
        mean -= 1 / (step**2 * wallis)
    return 0.5 + mean / math.pi


def mean_square_arcsine(d: int) -> float:
    """E asin(u)^2 of a coordinate u: pi^2 / 12 less 2 / j^2 for even j up to d - 2, or pi^2 / 4 less those of odd j."""
    n = whole("d", d, 2) - 2
    return math.pi**2 / (4 if n % 2 else 12) - math.fsum(2 / step**2 for step in range(1 if n % 2 else 2, n + 1, 2))


def average_error(d: int, num_heads: int | None = None) -> float:
    """The expected error of the plain average of H rank-one heads with q = k uniform on the sphere; of infinitely many
    where `num_heads` is None. One layer of such heads cannot do better with more of them.

    >>> [round(average_error(d), 4) for d in (8, 16, 64)], round(average_error(16, 1601), 3)
    ([0.335, 0.3817, 0.4391], 0.382)
    """
    agreement = 0.5 + 2 / math.pi**2 * mean_square_arcsine(d)
    limit = 1 - 2 * matched_accuracy(d) + agreement
    return limit if num_heads is None else limit + (1 - agreement) / whole("num_heads", num_heads, 1)


def spaced_error(num_heads: int | None = None, best_scalar: bool = False) -> float:
    """The error of equally spaced heads of the plane, averaged: `1/6 + 1 / (3 H^2)`; infinitely many where H is None.

    With `best_scalar` the average is multiplied by the best number: `1 - (9/16) / (2/3 + 1 / (3 H^2))`.

    >>> [round(spaced_error(H), 5) for H in (1, 2, 4, 8)], round(spaced_error(best_scalar=True), 5)
    ([0.5, 0.25, 0.1875, 0.17188], 0.15625)
    """
    more = 0.0 if num_heads is None else 1 / (3 * whole("num_heads", num_heads, 1) ** 2)
    return 1 - (9 / 16) / (2 / 3 + more) if best_scalar else 1 / 6 + more


def majority_error(d: int, num_heads: int) -> float:
    """The expected error of the two-layer majority vote of H random rank-one heads with q = k: twice the probability that
    most of them are wrong, a tie being broken by a coin.

    A head is right with probability 1/2 + t/pi at the angle t = asin|w.y|. The binomial tail is integrated by parts, so that
    the work does not grow with H; it is exact to 1e-12.

    >>> [round(majority_error(16, H), 4) for H in (17, 161, 1601)]
    [0.611, 0.28, 0.0945]
    """
    d, num_heads = whole("d", d, 2), whole("num_heads", num_heads, 1)
    num_heads -= 1 - num_heads % 2  # a coin at a tie makes one vote of an even number worthless
    half = (num_heads - 1) // 2
    angle, weight = gauss_panels(min(math.pi / 2, 9 * math.pi / math.sqrt(num_heads)))
    logarithm = (
        math.log(num_heads / math.pi)
        + math.lgamma(num_heads)
        - 2 * math.lgamma(half + 1)
        - 2 * half * math.log(2)
        + half * np.log1p(-np.minimum((2 * angle / math.pi) ** 2, 1 - 1e-16))
    )
    return float(1 - 2 * (weight * np.exp(logarithm) * (1 - angle_distribution(d, angle))).sum())


def majority_limit(d: int, num_heads: int) -> float:
    """What [`majority_error`] tends to for large d and H: `(2 / pi) arctan((pi / 2) sqrt(d / H))`.

    >>> round(majority_limit(64, 6401), 3)
    0.099
    """
    d, num_heads = whole("d", d, 2), whole("num_heads", num_heads, 1)
    return 2 / math.pi * math.atan(math.pi / 2 * math.sqrt(d / num_heads))
