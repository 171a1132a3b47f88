"""Rank-one hard heads on two orthonormal points: how often they are right, how often they agree, how best to weigh them.

A head (q, k) sends a query y to the point x_i with the largest (q.y)(k.x_i). On two orthonormal points x_1, x_2 it is right
when sign(q.y) sign(k.w) = sign(w.y), where w = (x_1 - x_2) / sqrt(2) is uniform on the sphere and independent of y. A layer
that adds up heads with the values a_h x has the expected squared error `1 - 2 b.a + a.C a`, where b_h is the probability
that head h is right and C_gh that heads g and h agree.
"""

import math
from functools import lru_cache

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from .agreement import SCALE, TILE, AgreementProduct, arcsine_tile, lower_kernel, solve
from .harmonics import legendre_steps, log_harmonic_dimension, sign_energies
from .inputs import cosines, head_weights, unit_heads, whole


# up to here a direct factorisation is as fast as conjugate gradients
LARGEST_DIRECT = 1024
LARGEST_DEGREE = 4095
PAIRINGS = ("independent", "equal", "uniform_cosine")


def head_accuracy(d: int, cosine) -> np.ndarray:
    """b, the probability that a rank-one head with q.k = cosine picks the nearer of two orthonormal points of R^d.

    `1/2 + 1/2 sum over odd l of eta_l^3 N(d, l)^(-1/2) P_l(q.k)`; in two dimensions the sum is elementary.

    >>> head_accuracy(8, [1.0, 0.0, -1.0]).round(6)
    array([0.596892, 0.5     , 0.403108])
    """
    d, x = whole("d", d, 2), cosines(cosine)
    if d == 2:
        turn = np.pi / 2 - np.arccos(x)
        return 0.5 + np.sign(turn) * (0.25 - (0.5 - np.abs(turn) / np.pi) ** 2)
    terms, total = accuracy_terms(d), np.zeros_like(x)
    for degree, value in enumerate(legendre_steps(d, 2 * len(terms) - 1, x)):
        if degree % 2:
            total += terms[degree // 2] * value
    return 0.5 + 0.5 * total


@lru_cache
def accuracy_terms(d: int) -> np.ndarray:
    """eta_l^3 N(d, l)^(-1/2) of odd degrees, as far as float64 can see them beside 1/2."""
    energies = sign_energies(d, (LARGEST_DEGREE + 1) // 2)
    degrees = range(1, LARGEST_DEGREE + 1, 2)
    terms = energies**1.5 * [math.exp(-log_harmonic_dimension(d, degree) / 2) for degree in degrees]
    terms[1::2] *= -1
    return terms[: int(np.flatnonzero(np.abs(terms) > 1e-18)[-1]) + 1]


def head_agreement(queries, keys, other_queries=None, other_keys=None) -> np.ndarray:
    """C, the probability that two rank-one heads pick the same point: `1/2 + 2/pi^2 asin(q.q') asin(k.k')`.

    Args:
        queries, keys (`(H, d)` arrays): Unit query and key directions of the heads.
        other_queries, other_keys (`(G, d)` arrays, *optional*): Those of the heads to compare with; the same by default.

    Returns an (H, G) array.

    >>> head_agreement([[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.8], [0.6, 0.8]])
    array([[1. , 0.5],
           [0.5, 1. ]])
    """
    queries, keys = unit_heads(queries, keys)
    if other_queries is None and other_keys is None:
        kernel = lower_kernel(queries, keys)
        for start in range(0, len(kernel), TILE):
            stop = min(start + TILE, len(kernel))
            kernel[start:stop, stop:] = kernel[stop:, start:stop].T
        return kernel
    if other_queries is None or other_keys is None:
        raise ValueError("give both `other_queries` and `other_keys`, or neither.")
    others = unit_heads(other_queries, other_keys)
    if others[0].shape[1] != queries.shape[1]:
        raise ValueError(f"heads of {queries.shape[1]} and of {others[0].shape[1]} dimensions cannot be compared.")
    return 0.5 + SCALE * arcsine_tile(queries, keys, *others)


def optimal_weights(
    queries, keys, *, method: str | None = None, memory: int = 2**30, tolerance: float = 1e-10, max_steps: int = 2000
) -> np.ndarray:
    """The weights a = C^-1 b of rank-one heads with the least expected error, (H,).

    Args:
        queries, keys (`(H, d)` arrays): Unit query and key directions of the heads.
        method (`str`, *optional*):
            `"cholesky"` (H^2 numbers of memory, H^3 / 3 products) or `"conjugate_gradients"` (any memory, ten to fifty
            products with C); by default the first up to 1,024 heads and the second above.
        memory (`int`, *optional*, defaults to 2**30):
            Bytes of C that conjugate gradients keep. Tiles beyond it are computed anew in each step, in float32, and
            the residual is refined in float64 until it meets the tolerance.
        tolerance (`float`, *optional*, defaults to 1e-10):
            Conjugate gradients stop when |C a - b| is below this share of |b|. The error of a in the expected error is of
            the order of its square.
        max_steps (`int`, *optional*, defaults to 2000): A ValueError is raised when they do not stop before.

    >>> heads = random_heads(8, 64, seed=0)
    >>> a = optimal_weights(*heads)
    >>> bool(abs(head_agreement(*heads) @ a - head_accuracy(8, (heads[0] * heads[1]).sum(1))).max() < 1e-12)
    True
    """
    queries, keys = unit_heads(queries, keys)
    if method not in (None, "cholesky", "conjugate_gradients"):
        raise ValueError(f"`method` must be 'cholesky' or 'conjugate_gradients', got {method!r}.")
    if not 0 < tolerance < 1:
        raise ValueError(f"`tolerance` must lie between 0 and 1, got {tolerance!r}.")
    target = accuracy_of(queries, keys)
    if method is None:
        method = "cholesky" if len(queries) <= LARGEST_DIRECT else "conjugate_gradients"
    if method == "cholesky":
        try:
            # the part above the diagonal is not initialised, so it cannot be checked for NaN
            factor = cho_factor(lower_kernel(queries, keys), lower=True, overwrite_a=True, check_finite=False)
            return cho_solve(factor, target, check_finite=False)
        except LinAlgError:
            raise ValueError(
                f"the kernel of these {len(target)} heads is singular: two of them are equal, up to a common sign of query "
                "and key, or they are more than their dimension can tell apart. Leave some out, or use "
                "method='conjugate_gradients', which finds one of the many optima."
            ) from None
    memory, max_steps = whole("memory", memory, 0), whole("max_steps", max_steps, 1)
    return solve(queries, keys, target, memory, tolerance, max_steps)


def accuracy_of(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return head_accuracy(queries.shape[1], np.einsum("hd,hd->h", queries, keys))


def expected_error(queries, keys, weights=None, *, method: str | None = None) -> float:
    """The expected squared error of rank-one heads on two orthonormal points: `1 - 2 b.a + a.C a`.

    Args:
        queries, keys (`(H, d)` arrays): Unit query and key directions of the heads.
        weights (`(H,)` array, *optional*):
            What each head multiplies the point it picks with. By default the best, for which the error is 1 - b.C^-1 b.
        method (`str`, *optional*): How the best are found, as in [`optimal_weights`].

    >>> round(expected_error([[1.0, 0.0]], [[1.0, 0.0]]), 6), expected_error([[1.0, 0.0]], [[1.0, 0.0]], [1.0])
    (0.4375, 0.5)
    """
    queries, keys = unit_heads(queries, keys)
    target = accuracy_of(queries, keys)
    if weights is None:
        return float(1 - target @ optimal_weights(queries, keys, method=method))
    weights = head_weights(weights, len(queries))
    return float(1 - 2 * target @ weights + weights @ AgreementProduct(queries, keys, memory=0)(weights))


def random_heads(d: int, num_heads: int, seed: int, pairing: str = "independent") -> tuple[np.ndarray, np.ndarray]:
    """Unit queries and keys of rank-one heads, (H, d) each, uniform on the sphere.

    Args:
        d (`int`): Dimension.
        num_heads (`int`): H.
        seed (`int`): Seed of both.
        pairing (`str`, *optional*, defaults to `"independent"`):
            `"independent"`; `"equal"`, where the key of a head is its query; or `"uniform_cosine"`, where q.k is uniform in
            [-1, 1].

    >>> queries, keys = random_heads(8, 5, seed=0, pairing="equal")
    >>> queries.shape, bool((queries == keys).all())
    ((5, 8), True)
    """
    d, num_heads, seed = whole("d", d, 2), whole("num_heads", num_heads, 1), whole("seed", seed, 0)
    if pairing not in PAIRINGS:
        raise ValueError(f"`pairing` must be one of {', '.join(PAIRINGS)}; got {pairing!r}.")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(d, num_heads, PAIRINGS.index(pairing))))
    queries = normalized(rng.standard_normal((num_heads, d)))
    if pairing == "equal":
        return queries, queries.copy()
    keys = normalized(rng.standard_normal((num_heads, d)))
    if pairing == "uniform_cosine":
        # what is left of a vector without its part along the query is shorter, so it has to be made a unit vector again
        beside = normalized(keys - np.einsum("hd,hd->h", keys, queries)[:, None] * queries)
        cosine = rng.uniform(-1, 1, num_heads)[:, None]
        keys = normalized(cosine * queries + np.sqrt(1 - cosine**2) * beside)
    return queries, keys


def normalized(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def spaced_heads(num_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Heads of the plane with q = k at the angles j pi / H, (H, 2) each.

    >>> spaced_heads(2)[0].round(12)
    array([[1., 0.],
           [0., 1.]])
    """
    angles = np.arange(whole("num_heads", num_heads, 1)) * np.pi / num_heads
    queries = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return queries, queries.copy()
