"""The error that calibration minimises: the error of each text's logits on its own rows.

A row has a query `x_i` and sees keys `y_ij`. An error `D` of a head's form changes its logits by `x_i^T D y_ij`. Softmax
ignores a constant along a row, so the error of a row is the variance of this change over the keys it sees, with equal
weights, and the error of a head is the sum over all rows of all texts (and over all applications of shared weights):

    sum_i Var_j(x_i^T D y_ij) = sum_i x_i^T D C_i D^T x_i,   C_i the covariance of the keys that row i sees.

There is no closed form for the best `D` of a given rank, as each query has its own keys. The closed form of `factors.py`
pools all queries and all keys; `refine` starts there and descends by alternating least squares.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..measure.threads import one_thread
from .factors import PRIOR


ROUNDS = 30
STEPS = 4
# the descent ends when a round lowers the error by a smaller share than this, as a mean over heads
TOLERANCE = 1e-4
TINY = torch.finfo(torch.float64).tiny


class TextMoments(NamedTuple):
    """Texts all of whose rows see the same keys: `sum_i x_i x_i^T` (texts, heads, x, x) and `C` (texts, heads, y, y)."""

    query: torch.Tensor
    key: torch.Tensor

    def error(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return ((left.mT @ self.query @ left) * (right.mT @ self.key @ right)).sum((0, 2, 3))


class MaskedRows(NamedTuple):
    """One text: queries (heads, n, x), keys (heads, m, y), and which keys each row sees (n, m)."""

    query: torch.Tensor
    key: torch.Tensor
    visible: torch.Tensor

    def error(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return row_variance((self.query @ left) @ (self.key @ right).mT, self.visible)


class RelativeRows(NamedTuple):
    """One text of XLNet: queries (heads, n, x), content keys (heads, n, w), position keys (heads, p, w) of which the pair
    (i, j) has number `places[i, j]`, two segments (heads, 2, w) of which it has the mix `codes[i, j]`, and `visible` (n, n).
    """

    query: torch.Tensor
    content: torch.Tensor
    position: torch.Tensor
    segment: torch.Tensor
    places: torch.Tensor
    codes: torch.Tensor | None
    visible: torch.Tensor

    def error(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        query = self.query @ left
        content, position, segment = right.chunk(3, dim=1)
        by_place = query @ (self.position @ position).mT
        logits = query @ (self.content @ content).mT + by_place.gather(-1, self.places.expand(len(query), -1, -1))
        if self.codes is not None:
            logits = logits + torch.einsum("hns,nms->hnm", query @ (self.segment @ segment).mT, self.codes)
        return row_variance(logits, self.visible)


# `D` is the product `left right^T` of factors (heads, x, k) and (heads, y, k); `error` is (heads,)
Piece = TextMoments | MaskedRows | RelativeRows


def row_variance(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """The variance of each row (heads, n, m) over its visible keys (n, m), summed over the rows: (heads,)."""
    weights = visible.to(logits.dtype)
    weights = weights / weights.sum(-1, keepdim=True)
    centred = logits - (weights * logits).sum(-1, keepdim=True)
    return (weights * centred.square()).sum((-2, -1))


def half_gradient(pieces: Iterable[Piece], left: torch.Tensor, right: torch.Tensor, of_right: bool):
    """The error of `left right^T`, (heads,), and half its gradient in one of the two factors."""
    left, right = left.detach(), right.detach()
    moving = (right if of_right else left).requires_grad_()
    error, gradient = left.new_zeros(len(left)), torch.zeros_like(moving)
    with torch.enable_grad():
        for piece in pieces:
            part = piece.error(left, right)
            (slope,) = torch.autograd.grad(part.sum(), moving)
            error, gradient = error + part.detach(), gradient + slope / 2
    return error, gradient.detach()


class Refined(NamedTuple):
    """Factors (heads, x, r) and (heads, y, r), the error that they leave, and that of no factors at all, each (heads,)."""

    query: torch.Tensor
    key: torch.Tensor
    lost: torch.Tensor
    total: torch.Tensor


def remaining(pieces: Sequence[Piece], form: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
    """The error of `form - query key^T`, (heads,), and half its gradient in the transposed difference, (heads, y, x)."""
    kind = pieces[0].query.dtype
    identity = torch.eye(form.shape[1], dtype=kind, device=form.device).expand(len(form), -1, -1)
    error, slope = half_gradient(pieces, identity, (form - query @ key.mT).mT.to(kind), of_right=True)
    return error.to(form), slope.to(form)


def errors(pieces: Sequence[Piece], form: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Refined:
    """The given factors with their error."""
    lost, total = (remaining(pieces, form, factor, key)[0] for factor in (query, torch.zeros_like(query)))
    return Refined(query, key, lost, total)


@torch.no_grad()
def refine(
    pieces: Sequence[Piece],
    form: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    moments: Sequence[torch.Tensor],
) -> Refined:
    """Lower the error of `form - query key^T` (heads, x, y) by alternating least squares; no head ends above its start.

    The best key factor for a query factor solves a linear system, and the reverse. Each system is solved approximately by a
    few steps of conjugate gradients, preconditioned with the pooled `moments` (of queries, of keys), for which it would be
    a Kronecker product. Directions that no row has do not change.
    """
    # below this share of the largest eigenvalue a direction is rounding error, or the prior of the start
    noise = max(10 * torch.finfo(pieces[0].query.dtype).eps, PRIOR)
    with one_thread(form):
        lost, slope = remaining(pieces, form, query, key)
        total, _ = remaining(pieces, form, torch.zeros_like(query), key)
        # a start without error leaves only rounding errors to lower
        open_heads = lost > noise * total
        best = lost
        pools = [moment.to(form) for moment in moments]
        inverses = [inverse(pool, noise) for pool in pools]
        left, right = query, key
        for _ in range(ROUNDS if bool(open_heads.any()) else 0):
            beside = inverse(left.mT @ pools[0] @ left, noise)
            right = right + conjugate_steps(pieces, left, slope @ left, inverses[1], beside, of_right=True)
            _, slope = remaining(pieces, form, left, right)
            beside = inverse(right.mT @ pools[1] @ right, noise)
            left = left + conjugate_steps(pieces, right, slope.mT @ right, inverses[0], beside, of_right=False)
            lost, slope = remaining(pieces, form, left, right)
            better = (lost < best) & open_heads
            query, key = (torch.where(better[:, None, None], new, old) for new, old in ((left, query), (right, key)))
            before, best = best, torch.where(better, lost, best)
            if bool((1 - best / before.clamp(min=TINY))[open_heads].mean() < TOLERANCE):
                break
    return Refined(query, key, best, total)


def inverse(moment: torch.Tensor, noise: float) -> torch.Tensor:
    """The pseudo-inverse of a moment (heads, w, w), zero in directions that are only rounding errors."""
    return torch.linalg.pinv(moment, rtol=noise, hermitian=True)


def conjugate_steps(
    pieces: Sequence[Piece],
    fixed: torch.Tensor,
    residual: torch.Tensor,
    by_pool: torch.Tensor,
    by_fixed: torch.Tensor,
    of_right: bool,
) -> torch.Tensor:
    """The change of the other factor than the `fixed` one, by a few steps of conjugate gradients from its `residual`."""
    kind = pieces[0].query.dtype
    added, direction, old = torch.zeros_like(residual), torch.zeros_like(residual), None
    for _ in range(STEPS):
        step = by_pool @ residual @ by_fixed
        size = (residual * step).sum((-2, -1))
        turn = torch.zeros_like(size) if old is None else size / old.clamp(min=TINY)
        direction, old = step + turn[:, None, None] * direction, size
        left, right = (fixed, direction) if of_right else (direction, fixed)
        _, image = half_gradient(pieces, left.to(kind), right.to(kind), of_right)
        curvature = (direction * image.to(direction)).sum((-2, -1))
        length = torch.where(curvature > 0, size / curvature.clamp(min=TINY), 0)[:, None, None]
        added, residual = added + length * direction, residual - length * image.to(residual)
    return added
