"""C, the matrix of how often rank-one heads agree, for as many heads as memory does not hold it for: products and solves.

What is made of C tile by tile are the arcsines, `A = asin(q.q') asin(k.k')`; `C = 1/2 + 2/pi^2 A` is put together behind the
products, where the constant costs neither time nor digits.
"""

import math
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement

import numpy as np


TILE = 256  # two tiles of scores stay in the cache while arcsines are taken of them
SCALE = 2 / np.pi**2
MOST_FEATURES = 4608  # enough for the degrees (1, 1) in 64 dimensions, and for (1, 3) and (3, 1) in 10
HIGHEST_DEGREE = 6
FEATURE_ROWS = 1024
# what a solve in float32 has to reach before its residual is looked at in float64
SINGLE_TOLERANCE = 1e-5

Product = Callable[[np.ndarray], np.ndarray]


def arcsine_tile(
    queries: np.ndarray, keys: np.ndarray, other_queries: np.ndarray, other_keys: np.ndarray, scratch=(None, None)
) -> np.ndarray:
    """A of two sets of heads that are known to be unit vectors, (H, d) and (G, d) -> (H, G), in given memory if any."""
    tile = np.matmul(queries, other_queries.T, out=scratch[0])
    factor = np.matmul(keys, other_keys.T, out=scratch[1])
    for scores in (tile, factor):
        np.clip(scores, -1, 1, out=scores)
        np.arcsin(scores, out=scores)
    tile *= factor
    return tile


def lower_tiles(count: int) -> Iterator[tuple[slice, slice]]:
    """Tiles that cover the lower half of a square matrix, the diagonal included; the last ones may be smaller."""
    for row in range(0, count, TILE):
        for column in range(0, row + 1, TILE):
            yield slice(row, min(row + TILE, count)), slice(column, min(column + TILE, count))


class Tiles:
    """Tiles of A from its heads, made in the same memory one after the other: fresh pages cost more than arcsines."""

    def __init__(self, queries: np.ndarray, keys: np.ndarray):
        self.queries, self.keys = queries, keys
        self.scratch = np.empty((2, TILE * TILE), dtype=queries.dtype)

    def make(self, rows: slice, columns: slice) -> np.ndarray:
        """One tile, valid until the next is made."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        parts = self.queries[rows], self.keys[rows], self.queries[columns], self.keys[columns]
        tile = arcsine_tile(*parts, [piece[: shape[0] * shape[1]].reshape(shape) for piece in self.scratch])
        if rows == columns:
            # the arcsine is steep at 1, where rounding would cost half the digits
            np.fill_diagonal(tile, np.pi**2 / 4)
        return tile


def lower_kernel(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """C (H, H) with what lies above the tiles of its diagonal left as it comes."""
    kernel, tiles = np.empty((len(queries), len(queries))), Tiles(queries, keys)
    for rows, columns in lower_tiles(len(queries)):
        tile = tiles.make(rows, columns)
        tile *= SCALE
        np.add(tile, 0.5, out=kernel[rows, columns])
    np.fill_diagonal(kernel, 1.0)
    return kernel


class AgreementProduct:
    """Products of C with vectors, from tiles of its lower half: each serves twice, and as many are kept as memory allows.

    In float32 a tile takes half of the time and of the memory; what tiles contribute is summed in float64 all the same.
    """

    def __init__(self, queries: np.ndarray, keys: np.ndarray, memory: int, dtype: type = np.float64):
        self.tiles, self.memory, self.dtype = Tiles(queries.astype(dtype), keys.astype(dtype)), memory, dtype
        self.kept: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        product = np.zeros(len(vector))
        short: np.ndarray = vector.astype(self.dtype)
        for rows, columns in lower_tiles(len(vector)):
            tile = self.tile(rows, columns)
            product[rows] += tile @ short[columns]
            if rows != columns:
                product[columns] += short[rows] @ tile
        return SCALE * product + 0.5 * vector.sum()

    def tile(self, rows: slice, columns: slice) -> np.ndarray:
        place = rows.start, columns.start
        if place in self.kept:
            return self.kept[place]
        tile = self.tiles.make(rows, columns)
        if tile.nbytes <= self.memory:
            self.memory -= tile.nbytes
            self.kept[place] = tile.copy()
        return tile


def monomials(vectors: np.ndarray, degree: int) -> np.ndarray:
    """Features (H, C(d + degree - 1, degree)) of vectors (H, d) whose inner products are powers of those of the vectors."""
    choices = list(combinations_with_replacement(range(vectors.shape[1]), degree))
    ways = [math.factorial(degree) / math.prod(math.factorial(c.count(i)) for i in set(c)) for c in choices]
    features = np.full((len(vectors), len(choices)), np.sqrt(ways))
    for column in np.array(choices).T:
        features *= vectors[:, column]
    return features


def arcsine_series(degree: int) -> float:
    """The coefficient of x^degree in asin x, of an odd degree."""
    half = degree // 2
    return math.comb(2 * half, half) / (4**half * degree)


class Polynomials:
    """An approximate inverse of C: of its largest part, which is low in degree, exactly, of the rest as a multiple of one.

    Term by term of the series of the arcsines, `(q.q')^i (k.k')^j` is an inner product of monomials in q and k. Of random
    heads in d dimensions C has d^2 eigenvalues of the order H / d^2 from the degrees (1, 1), next smaller ones from (1, 3)
    and (3, 1), and so on; they are what makes conjugate gradients slow. With the features F (H, m) of as many degrees as
    give at most `most` of them, `F F^T + r I` is inverted by Woodbury's formula, r being what F leaves of the diagonal of C.
    """

    def __init__(self, queries: np.ndarray, keys: np.ndarray, most: int):
        self.degrees = feature_degrees(queries.shape[1], most)
        powers = sorted({i for i, _ in self.degrees})
        self.queries = {i: monomials(queries, i) for i in powers}
        self.keys = {i: monomials(keys, i) for i in powers}
        self.weights = {pair: SCALE * arcsine_series(pair[0]) * arcsine_series(pair[1]) for pair in self.degrees}
        self.rest = 0.5 - sum(self.weights.values())
        gram: np.ndarray | float = 0.0
        for start in range(0, len(queries), FEATURE_ROWS):
            rows = self.features(slice(start, start + FEATURE_ROWS), len(queries[start : start + FEATURE_ROWS]))
            gram = gram + rows.T @ rows
        self.inverse = np.linalg.inv(gram + self.rest * np.eye(len(gram)))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.queries.values(), *self.keys.values(), self.inverse))

    def features(self, rows: slice, count: int) -> np.ndarray:
        """F of some heads, (count, m)."""
        parts = [np.full((count, 1), math.sqrt(0.5))]
        for (i, j), weight in self.weights.items():
            product = (math.sqrt(weight) * self.queries[i][rows])[:, :, None] * self.keys[j][rows][:, None, :]
            parts.append(product.reshape(count, -1))
        return np.concatenate(parts, axis=1)

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """`(vector - F (F^T F + r)^-1 F^T vector) / r`, by products of monomials, without a row of F."""
        parts = [np.array([math.sqrt(0.5) * vector.sum()])]
        for (i, j), weight in self.weights.items():
            parts.append((math.sqrt(weight) * (self.queries[i].T @ (vector[:, None] * self.keys[j]))).ravel())
        along = self.inverse @ np.concatenate(parts)
        image, place = np.full(len(vector), math.sqrt(0.5) * along[0]), 1
        for (i, j), weight in self.weights.items():
            shape = self.queries[i].shape[1], self.keys[j].shape[1]
            part = along[place : place + shape[0] * shape[1]].reshape(shape)
            image += math.sqrt(weight) * np.einsum("hk,hk->h", self.queries[i] @ part, self.keys[j])
            place += part.size
        return (vector - image) / self.rest


def feature_degrees(d: int, most: int) -> list[tuple[int, int]]:
    """Pairs of odd degrees in q and k, whole sums of degrees at a time, with at most `most` features, a constant included."""
    found: list[tuple[int, int]] = []
    size = 1
    for total in range(2, 2 * HIGHEST_DEGREE, 2):
        pairs = [(i, total - i) for i in range(1, total, 2)]
        size += sum(math.comb(d + i - 1, i) * math.comb(d + j - 1, j) for i, j in pairs)
        if size > most:
            break
        found += pairs
    return found


def solve(
    queries: np.ndarray, keys: np.ndarray, target: np.ndarray, memory: int, tolerance: float, max_steps: int
) -> np.ndarray:
    """C^-1 b by conjugate gradients, behind [`Polynomials`].

    If C fits into memory, all is done in float64. Else tiles are made anew in each step, in float32, which is twice as fast;
    what is left of b is then looked at in float64, and solved for again, until it is small enough.
    """
    tiles = lower_tiles(len(target))
    fits = 8 * sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in tiles) <= memory
    # what the features cost, H m^2 products, should be a fraction of what the steps do that they save
    most = min(MOST_FEATURES, int((8 if fits else 24) * math.sqrt(len(target))))
    inverse = Polynomials(queries, keys, most)
    exact = AgreementProduct(queries, keys, memory if fits else 0)
    product = exact if fits else AgreementProduct(queries, keys, max(0, memory - inverse.nbytes), np.float32)
    solution, residual, size = np.zeros_like(target), target.copy(), float(np.linalg.norm(target))
    goal, left, steps = tolerance * size, size, 0
    while steps < max_steps:
        reach = goal / 2 if product is exact else max(goal / 2, SINGLE_TOLERANCE * left)
        update, taken = conjugate_gradients(product, inverse, residual, reach, max_steps - steps)
        steps += taken
        solution += update
        residual = target - exact(solution)
        before, left = left, float(np.linalg.norm(residual))
        if left <= goal:
            return solution
        if left > before / 10:
            if product is exact:
                break
            product = exact  # heads that nearly coincide differ in digits that float32 does not have
    raise ValueError(
        f"conjugate gradients are at a relative residual of {left / size:.1e} after {steps} steps, above the tolerance "
        f"{tolerance:.1e}. Raise `tolerance` or `max_steps`, or use method='cholesky'."
    )


def conjugate_gradients(
    product: Product, inverse: Product, target: np.ndarray, goal: float, max_steps: int
) -> tuple[np.ndarray, int]:
    """A solution whose residual is at most `goal` long, or what `max_steps` made of it, and the steps they took."""
    solution, residual = np.zeros_like(target), target.copy()
    direction = inverse(residual)
    square = float(residual @ direction)
    for step in range(1, max_steps + 1):
        image = product(direction)
        curvature = float(direction @ image)
        if not curvature > 0:  # rounding has made an almost singular C indefinite
            return solution, step
        solution += square / curvature * direction
        residual -= square / curvature * image
        if np.linalg.norm(residual) <= goal:
            return solution, step
        preconditioned = inverse(residual)
        before, square = square, float(residual @ preconditioned)
        direction = preconditioned + square / before * direction
    return solution, max_steps
