"""Spherical harmonics, as far as the sign of a coordinate needs them.

A point uniform on the unit sphere of R^d has a coordinate u of density `c_d (1 - u^2)^((d - 3) / 2)`. Functions of u are
expanded in `sqrt(N(d, l)) P_l(u)`, which are orthonormal, where P_l is the Legendre polynomial of dimension d with
P_l(1) = 1.
"""

import math

import numpy as np
from scipy.special import betainc

from .inputs import cosines, whole


NODES = 32


def harmonic_dimension(d: int, degree: int) -> int:
    """N(d, l): how many independent harmonics of a degree there are on the sphere of R^d. An exact integer.

    >>> [harmonic_dimension(64, degree) for degree in (1, 3, 5)]
    [64, 45696, 10378368]
    """
    d, degree = whole("d", d, 2), whole("degree", degree, 0)
    return math.comb(d + degree - 1, degree) - (math.comb(d + degree - 3, degree - 2) if degree > 1 else 0)


def log_harmonic_dimension(d: int, degree: int) -> float:
    """The logarithm of N(d, l) = (2 l + d - 2) Gamma(l + d - 2) / (Gamma(d - 1) l!), of any size."""
    if degree == 0:
        return 0.0
    return math.log(2 * degree + d - 2) + math.lgamma(degree + d - 2) - math.lgamma(d - 1) - math.lgamma(degree + 1)


def dimension_growth(d: int, degree: np.ndarray) -> np.ndarray:
    """N(d, l + 2) / N(d, l)."""
    growth = (2 * degree + d + 2) / (2 * degree + d - 2)
    return growth * ((degree + d - 1) * (degree + d - 2) / ((degree + 1) * (degree + 2)))


def sphere_constant(d: int) -> float:
    """c_d, the density of a coordinate at zero: Gamma(d / 2) / (sqrt(pi) Gamma((d - 1) / 2)).

    >>> round(sphere_constant(3), 12)
    0.5
    """
    d = whole("d", d, 2)
    return math.exp(math.lgamma(d / 2) - math.lgamma((d - 1) / 2)) / math.sqrt(math.pi)


def angle_distribution(d: int, angle: np.ndarray) -> np.ndarray:
    """P(asin|u| <= angle) for a coordinate u, whose square has a beta distribution."""
    return betainc(0.5, (d - 1) / 2, np.sin(angle) ** 2)


def gauss_panels(stop: float, panels: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss and Legendre on [0, stop], panel by panel, for smooth functions of one hump."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    width = stop / panels
    starts = np.arange(panels) * width
    return (starts[:, None] + (nodes + 1) * width / 2).ravel(), np.tile(weights * width / 2, panels)


def sign_coefficient(d: int, degree: int) -> float:
    """eta_l, the coefficient of sign(u) at a degree: zero for even ones, of alternating sign for odd ones.

    With l = 2 k + 1 it is `(-1)^k sqrt(N(d, l)) 2 c_d / (d - 1) (1/2)_k / ((d + 1) / 2)_k`, (x)_k the rising factorial.

    >>> round(sign_coefficient(3, 1) ** 2, 12), round(sign_coefficient(3, 3), 6)
    (0.75, -0.330719)
    """
    d, degree = whole("d", d, 2), whole("degree", degree, 0)
    if degree % 2 == 0:
        return 0.0
    k = degree // 2
    logarithm = (
        log_harmonic_dimension(d, degree) / 2
        + math.log(2 * sphere_constant(d) / (d - 1))
        + math.lgamma(k + 0.5)
        - math.lgamma(0.5)
        - math.lgamma(k + (d + 1) / 2)
        + math.lgamma((d + 1) / 2)
    )
    return (-1) ** k * math.exp(logarithm)


def sign_energies(d: int, count: int) -> np.ndarray:
    """eta_l^2 of the first `count` odd degrees, (count,): the share of each in the variance of a sign. They sum to 1.

    Each follows from the one before by a ratio near 1, which loses fewer digits than logarithms of large factorials.

    >>> sign_energies(3, 3)
    array([0.75      , 0.109375  , 0.04296875])
    """
    d, count = whole("d", d, 2), whole("count", count, 1)
    k = np.arange(count - 1, dtype=np.float64)
    ratios = dimension_growth(d, 2 * k + 1) * ((k + 0.5) / (k + (d + 1) / 2)) ** 2
    return sign_coefficient(d, 1) ** 2 * np.concatenate([[1.0], np.cumprod(ratios)])


def legendre(d: int, degree: int, x) -> np.ndarray:
    """P_0(x) to P_l(x) of dimension d, stacked in front of the shape of x: (degree + 1, ...).

    >>> legendre(3, 2, [0.5, 1.0])
    array([[ 1.   ,  1.   ],
           [ 0.5  ,  1.   ],
           [-0.125,  1.   ]])
    """
    d, degree, x = whole("d", d, 2), whole("degree", degree, 0), cosines(x)
    return np.stack(list(legendre_steps(d, degree, x)))


def legendre_steps(d: int, degree: int, x: np.ndarray):
    """The same one degree after the other, so that a caller does not have to keep all of them."""
    before, value = np.ones_like(x), x.copy()
    yield before
    if degree:
        yield value
    for step in range(1, degree):
        before, value = value, ((2 * step + d - 2) * x * value - step * before) / (step + d - 2)
        yield value


def degree_floor(d: int, degree: int) -> float:
    """The best error on two orthonormal points when only degrees up to `degree` are captured: (1 - sum of eta_l^2) / 2.

    >>> round(degree_floor(64, 1), 5), round(degree_floor(64, 3), 5)
    (0.17919, 0.12498)
    """
    count = (whole("degree", degree, 0) + 1) // 2
    return 0.5 * (1 - float(sign_energies(d, count).sum())) if count else 0.5


def continuous_weight(d: int, degree: int, cosine) -> np.ndarray:
    """u(q.k), the weight of a rank-one head in a continuum of them that gives the sign of w.y, up to a degree.

    `sign(w.y) = E[u(q.k) sign(q.y) sign(k.w)]` over independent uniform q and k, if the expansion of u in orthonormal
    polynomials has the coefficients N(d, l) / eta_l at odd degrees. They grow without limit with the degree.

    >>> float(abs(continuous_weight(4, 49, 1.0)).round(-4))
    2650000.0
    """
    d, degree, x = whole("d", d, 2), whole("degree", degree, 1), cosines(cosine)
    total = np.zeros_like(x)
    for step, value in enumerate(legendre_steps(d, degree, x)):
        if step % 2:
            total += float(harmonic_dimension(d, step)) ** 1.5 / sign_coefficient(d, step) * value
    return total
