"""Errors weighted by the attention they meet: no closed form, but a quadratic that is gathered once and then solved.

A change `e_j` of the logits of a row moves its attention, to second order, by the Kullback-Leibler divergence
`1/2 Var(e)`, the variance under the attention of that row. Summed over rows `i` with queries `q_i` it is the quadratic form
`sum_i q_i^T D C_i D^T q_i` of the error `D` of the head's bilinear form, where `C_i` is the covariance of the keys under
the attention of row `i`. All of it lives in one tensor `sum_i (q_i q_i^T) x C_i`, which does not depend on the rank.
"""

import torch

from ...measure.threads import one_thread


# the share of plain, unweighted rows: attention meets other keys on other texts
UNIFORM = 0.3
ROUNDS = 8


def upper_products(rows: torch.Tensor) -> torch.Tensor:
    """The products `rows_a rows_c`, a <= c, of every row: (..., w) -> (..., w (w + 1) / 2)."""
    width = rows.shape[-1]
    packed = rows.new_empty(*rows.shape[:-1], width * (width + 1) // 2)
    start = 0
    for first in range(width):
        packed[..., start : start + width - first] = rows[..., first : first + 1] * rows[..., first:]
        start += width - first
    return packed


def symmetric_index(width: int) -> torch.Tensor:
    """Where entry (a, c) of a symmetric matrix stands among its upper products, (w, w)."""
    upper = torch.triu_indices(width, width)
    index = torch.empty(width, width, dtype=torch.long)
    index[upper[0], upper[1]] = index[upper[1], upper[0]] = torch.arange(upper.shape[1])
    return index


def paired_moment(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum_i (q_i q_i^T) x C_i` in packed form, (heads, x (x + 1) / 2, y (y + 1) / 2), of one example.

    Takes queries (heads, n, x), keys (heads, m, y) and weights (heads, n, m) whose rows sum to one; `C_i` is the
    covariance of the keys under row i of the weights.
    """
    mean = weights @ key
    covariance = weights @ upper_products(key) - upper_products(mean)
    return upper_products(query).transpose(-1, -2) @ covariance


def attention_weights(query: torch.Tensor, key: torch.Tensor, scale: float, visible: torch.Tensor) -> torch.Tensor:
    """Attention (heads, n, m) with a share of its rows spread evenly over the `visible` (n, m) keys."""
    logits = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    even = visible / visible.sum(-1, keepdim=True)
    return (1 - UNIFORM) * logits.softmax(-1) + UNIFORM * even


def weighted_loss(pairs: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`sum_i q_i^T D C_i D^T q_i` for the error `D = 1 - query key^T` of one head, from its packed `pairs`."""
    width = query.shape[0]
    index = symmetric_index(width)
    error = torch.eye(width, dtype=query.dtype) - query @ key.T
    full = pairs[index][:, :, index]
    return torch.einsum("ab,acbd,cd->", error, full, error)


def solve_side(pairs: torch.Tensor, against: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """The factor (y, r) that is best beside the `fixed` one (x, r); `pairs` (x-products, y-products) has x first.

    `against` (x, y) holds `sum_c pairs[(a, c), (b, c)]`, the right-hand side before it meets the fixed factor.
    """
    width, rank = fixed.shape
    other = against.shape[1]
    upper = torch.triu_indices(width, width)
    columns = torch.triu_indices(rank, rank)
    first, second = fixed[:, columns[0]], fixed[:, columns[1]]
    products = first[upper[0]] * second[upper[1]] + first[upper[1]] * second[upper[0]]
    products[upper[0] == upper[1]] /= 2
    packed = products.T @ pairs
    index, entry = symmetric_index(other), symmetric_index(rank)
    normal = packed[entry][:, :, index].permute(0, 2, 1, 3).reshape(rank * other, rank * other)
    ridge = 1e-9 * normal.diagonal().mean().clamp(min=torch.finfo(normal.dtype).tiny)
    normal.diagonal().add_(ridge)
    right = (fixed.T @ against).reshape(-1, 1)
    solution = torch.cholesky_solve(right, torch.linalg.cholesky(normal))
    return solution.view(rank, other).T


def refine_factors(pairs: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn about, the best keys for the queries and the best queries for the keys, from a starting point on.

    Takes packed `pairs` (heads, p, p) and factors (heads, w, r); no turn raises the weighted loss of a head.
    """
    refined = []
    width = query.shape[1]
    index = symmetric_index(width)
    with one_thread(pairs):
        for head, left, right in zip(pairs.double().cpu(), query.double().cpu(), key.double().cpu(), strict=True):
            against = torch.stack([head[index[a]][:, index].diagonal(dim1=0, dim2=2).sum(-1) for a in range(width)])
            for _ in range(ROUNDS):
                right = solve_side(head, against, left)
                left = solve_side(head.T, against.T, right)
            # both factors at one length, as their product leaves the choice open and training is better off so
            balance = (right.norm(dim=0) / left.norm(dim=0).clamp(min=torch.finfo(left.dtype).tiny)).sqrt()
            balance = torch.where(balance > 0, balance, 1)
            refined.append((left * balance, right / balance))
    lefts, rights = zip(*refined, strict=True)
    return torch.stack(lefts).to(query), torch.stack(rights).to(key)
