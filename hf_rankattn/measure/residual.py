"""How different token states are from each other: the residual, in three forms, and the mean cosine."""

from typing import Literal

import torch

from .norms import composite_norm, drop_rows, full_precision, one_norm, working
from .threads import one_thread


Center = Literal["mean", "median", "rank1"]


def residual(x: torch.Tensor, mask: torch.Tensor | None = None, center: Center = "mean") -> torch.Tensor:
    """(..., n, d) states minus the row that they share; padded rows are zero.

    Args:
        x (`torch.Tensor` of shape `(..., n, d)`): States, one token a row.
        mask (`torch.Tensor` of shape `(..., n)`, *optional*): 1 for tokens, 0 for padding.
        center (`str`, *optional*, defaults to `"mean"`):
            `"mean"` subtracts the mean row, as all published figures do; `"median"` the median of each column, the row
            that gives the smallest 1-norm; `"rank1"` the best matrix of rank one, whose rows may differ in length.

    >>> residual(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """
    states = drop_rows(working(x), mask)
    if center == "rank1":
        with one_thread(states):
            left, singular, right = torch.linalg.svd(states, full_matrices=False)
        return states - singular[..., :1, None] * left[..., :, :1] * right[..., :1, :]
    if center == "mean":
        count = states.shape[-2] if mask is None else mask.bool().sum(-1)[..., None, None]
        shared = states.sum(-2, keepdim=True) / count
    elif center == "median":
        missing = states if mask is None else states.masked_fill(~mask.bool()[..., None], torch.nan)
        # torch takes the lower of two middle values; their midpoint also minimises, and does not depend on the sign
        lower, upper = missing.nanmedian(-2, keepdim=True).values, -(-missing).nanmedian(-2, keepdim=True).values
        shared = (lower + upper) / 2
    else:
        raise ValueError(f"`center` must be 'mean', 'median' or 'rank1', got {center!r}.")
    return drop_rows(states - shared, mask)


def relative_residual(x: torch.Tensor, mask: torch.Tensor | None = None, center: Center = "mean") -> torch.Tensor:
    """`||residual|| / ||x||` in the composite norm, (...): 0 when all tokens are equal, about 1 when they have nothing in common.

    The mean row is not the best row to subtract, so the value can be slightly above 1. In exact collapse it is the
    precision: about 2e-7 in float32, 4e-16 in float64.

    >>> relative_residual(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    tensor(0.)
    """
    return composite_norm(residual(x, mask, center)) / composite_norm(drop_rows(working(x), mask))


def residual_lower_bound(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """A certified lower bound, (...), of the composite norm of `x - 1 c^T` over all rows `c`.

    The median gives the smallest 1-norm exactly, and for any subtracted row the infinity norm is at least half the largest
    1-distance between two rows.
    """
    states = drop_rows(working(x), mask)
    distances = torch.cdist(states, states, p=1.0)
    if mask is not None:
        real = mask.bool()
        distances = distances.masked_fill(~(real[..., :, None] & real[..., None, :]), 0)
    half_spread = distances.amax((-2, -1)) / 2
    return (one_norm(residual(x, mask, "median")) * half_spread).sqrt()


@full_precision()
def token_cosine(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Mean cosine of all pairs of different tokens, (...): 1 in collapse. NaN for a single token, which has no pair.

    >>> token_cosine(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]))
    tensor(0.3333)
    """
    states = drop_rows(working(x), mask)
    lengths = torch.linalg.vector_norm(states, dim=-1)
    nonzero = lengths > 0
    inverse = torch.where(nonzero, lengths, 1).reciprocal().masked_fill(~nonzero, 0)
    # the sum of unit rows, without a copy of all rows
    total = (inverse.unsqueeze(-2) @ states).square().sum((-2, -1))
    count = torch.as_tensor(states.shape[-2] if mask is None else mask.bool().sum(-1), device=x.device)
    return ((total - nonzero.sum(-1)) / (count * (count - 1))).masked_fill(count < 2, torch.nan)
