"""Errors weighted by attention: they have no closed form, but a quadratic form that is gathered once and then solved.

A change `e_j` of the logits of a row changes its attention, to second order, by the Kullback-Leibler divergence
`1/2 Var(e)`, the variance under the attention of that row. Summed over rows `i` with queries `q_i` it is the quadratic form
`sum_i q_i^T D C_i D^T q_i` of the error `D` of the head's bilinear form, where `C_i` is the covariance of the keys under
the attention of row `i`. One tensor `sum_i (q_i q_i^T) x C_i`, which does not depend on the rank, determines all of it.
"""

import torch

from ..measure.threads import one_thread


# the share of equal weights: on other texts attention is on other keys
UNIFORM = 0.3
ROUNDS = 8


def packed_size(width: int) -> int:
    """The number of different products of two entries of a row of this width."""
    return width * (width + 1) // 2


def upper_products(rows: torch.Tensor) -> torch.Tensor:
    """The products `rows_a rows_c`, a <= c, of every row: (..., w) -> (..., w (w + 1) / 2)."""
    width = rows.shape[-1]
    packed = rows.new_empty(*rows.shape[:-1], packed_size(width))
    start = 0
    for first in range(width):
        packed[..., start : start + width - first] = rows[..., first : first + 1] * rows[..., first:]
        start += width - first
    return packed


def symmetric_index(width: int) -> torch.Tensor:
    """The index of entry (a, c) of a symmetric matrix among its upper products, (w, w)."""
    upper = torch.triu_indices(width, width)
    index = torch.empty(width, width, dtype=torch.long)
    index[upper[0], upper[1]] = index[upper[1], upper[0]] = torch.arange(upper.shape[1])
    return index


def paired_moment(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """`sum_i (q_i q_i^T) x C_i` in packed form, (heads, x (x + 1) / 2, y (y + 1) / 2), of one example.

    Takes queries (heads, n, x), keys (heads, m, y) and weights (heads, n, m) whose rows sum to one; `C_i` is the
    covariance of the keys under row i of the weights. It is added to `total` in place, if given, head by head: this tensor
    is the largest of a conversion beside the two models.
    """
    if total is None:
        total = query.new_zeros(len(query), packed_size(query.shape[-1]), packed_size(key.shape[-1]))
    for head, asking, asked, rows in zip(total, query, key, weights, strict=True):
        covariance = rows @ upper_products(asked) - upper_products(rows @ asked)
        head.addmm_(upper_products(asking).T, covariance)
    return total


def attention_weights(query: torch.Tensor, key: torch.Tensor, scale: float, visible: torch.Tensor) -> torch.Tensor:
    """Attention (heads, n, m), mixed with equal weights over the `visible` (n, m) keys."""
    logits = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    even = visible.to(logits.dtype)
    even = even / even.sum(-1, keepdim=True)
    return (1 - UNIFORM) * logits.softmax(-1) + UNIFORM * even


def weighted_loss(pairs: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`sum_i q_i^T D C_i D^T q_i` for the error `D = 1 - query key^T` of one head, from its packed `pairs`."""
    width = query.shape[0]
    index = symmetric_index(width)
    error = torch.eye(width, dtype=query.dtype) - query @ key.T
    # row by row of the error: the whole tensor has width^4 entries
    rows = [torch.einsum("b,cbd,cd->", error[a], pairs[index[a]][:, index], error) for a in range(width)]
    return torch.stack(rows).sum()


def fill_normal(normal: torch.Tensor, packed: torch.Tensor, rank: int) -> torch.Tensor:
    """The symmetric (rank * y, rank * y) matrix whose blocks (y, y) are packed, one for each pair of columns."""
    other = len(normal) // rank
    index, entry = symmetric_index(other), symmetric_index(rank)
    for column, rows in enumerate(normal.view(rank, other, rank, other)):
        rows.copy_(packed[entry[column]][:, index].transpose(0, 1))
    return normal


def solve_side(
    pairs: torch.Tensor,
    against: torch.Tensor,
    fixed: torch.Tensor,
    start: torch.Tensor,
    noise: float,
    normal: torch.Tensor,
) -> torch.Tensor:
    """The factor (y, r) that is best beside the `fixed` one (x, r); `pairs` (x-products, y-products) has x first.

    `against` (x, y) holds `sum_c pairs[(a, c), (b, c)]`, the right-hand side before its product with the fixed factor. In
    directions that the calibration does not have, to the relative precision `noise` of the pairs, it stays at `start`.
    `normal` (r y, r y) is a buffer for the normal equations.
    """
    width, rank = fixed.shape
    other = against.shape[1]
    upper = torch.triu_indices(width, width)
    columns = torch.triu_indices(rank, rank)
    first, second = fixed[:, columns[0]], fixed[:, columns[1]]
    products = first[upper[0]] * second[upper[1]] + first[upper[1]] * second[upper[0]]
    products[upper[0] == upper[1]] /= 2
    packed = products.T @ pairs
    right = (fixed.T @ against).reshape(-1, 1)
    stay = noise * fill_normal(normal, packed, rank).trace().clamp(min=torch.finfo(normal.dtype).tiny)
    added = 0 * stay
    for _ in range(8):
        added = added + stay
        normal.diagonal().add_(added)
        right = right + stay * start.T.reshape(-1, 1)
        # in place and in the order of LAPACK, so that this largest matrix is not copied: scipy would copy it
        root, failed = torch.linalg.cholesky_ex(normal.mT, out=(normal.mT, torch.empty((), dtype=torch.int32)))
        if not failed:
            half = torch.linalg.solve_triangular(root, right, upper=False)
            return torch.linalg.solve_triangular(root.mT, half, upper=True).view(rank, other).T
        stay = 10 * stay
        fill_normal(normal, packed, rank)
    return start


def balanced(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both factors scaled to equal column lengths, which leaves their product and helps solving and training."""
    balance = (right.norm(dim=0) / left.norm(dim=0).clamp(min=torch.finfo(left.dtype).tiny)).sqrt()
    balance = torch.where(balance > 0, balance, 1)
    return left * balance, right / balance


@torch.no_grad()
def refine_factors(pairs: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Alternately the best keys for the queries and the best queries for the keys, from a starting point.

    Takes packed `pairs` (heads, p, p) and factors (heads, w, r); the weighted loss of a head is never above its start.
    """
    refined = []
    width = query.shape[1]
    index = symmetric_index(width)
    noise = 10 * torch.finfo(pairs.dtype).eps  # of sums over many tokens
    # one buffer for all heads and rounds: repeated allocations would fragment the heap
    normal = torch.empty(width * query.shape[2], width * query.shape[2], dtype=torch.float64)
    with one_thread(pairs):
        for packed, left, right in zip(pairs, query.double().cpu(), key.double().cpu(), strict=True):
            head = packed.double().cpu()
            against = torch.stack([head[index[a]][:, index].diagonal(dim1=0, dim2=2).sum(-1) for a in range(width)])
            start = left, right = balanced(left, right)
            before = weighted_loss(head, left, right)
            # a start without loss leaves only rounding errors of the pairs to lower
            rounds = ROUNDS if before > noise * weighted_loss(head, 0 * left, right) else 0
            for _ in range(rounds):
                right = solve_side(head, against, left, right, noise, normal)
                left = solve_side(head.T, against.T, right, left, noise, normal)
            refined.append(balanced(left, right) if weighted_loss(head, left, right) < before else start)
    lefts, rights = zip(*refined, strict=True)
    return torch.stack(lefts).to(query), torch.stack(rights).to(key)
