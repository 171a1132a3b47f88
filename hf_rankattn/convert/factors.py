"""Closed forms: the rank-r factors of a bilinear form that lose least, given the moments of both of its sides."""

from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize

from ..measure.threads import one_thread


# relative weight of isotropic inputs: too small to move an optimum by 1e-6, enough to rank directions that no
# calibration token has
PRIOR = 1e-10


class Factors(NamedTuple):
    """`query` (heads, x, r) and `key` (heads, y, r), whose product replaces the form; its spectrum and the energy lost."""

    query: torch.Tensor
    key: torch.Tensor
    singular: torch.Tensor
    lost: torch.Tensor


def root_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """`L` (..., w, w) with `L L^T = rows^T rows`, from rows (..., n, w), without squaring their condition."""
    with one_thread(rows):
        return torch.linalg.qr(rows, mode="r").R.transpose(-1, -2)


def root_of_moment(moment: torch.Tensor) -> torch.Tensor:
    """`L` (..., w, w) with `L L^T = moment`, which may be singular."""
    with one_thread(moment):
        values, vectors = torch.linalg.eigh(moment)
    return vectors * values.clamp(min=0).sqrt()[..., None, :]


def with_prior(moment: torch.Tensor, prior_root: torch.Tensor) -> torch.Tensor:
    """The moment (heads, w, w) plus a small multiple of the moment of isotropic inputs."""
    prior = prior_root @ prior_root.transpose(-1, -2)
    traces = [matrix.diagonal(dim1=-2, dim2=-1).sum(-1) for matrix in (moment, prior)]
    size = traces[0] / traces[1].clamp(min=torch.finfo(moment.dtype).tiny)
    return moment + PRIOR * size[..., None, None] * prior


def best_factors(query_root: torch.Tensor, key_root: torch.Tensor, form: torch.Tensor, rank: int) -> Factors:
    """The rank-`rank` product `P R^T` nearest to `form` (heads, x, y) in the norm of its inputs.

    With `query_root` (heads, x, x) and `key_root` (heads, y, y), roots of the second moments of queries and keys, it
    minimises `||query_root^T (form - P R^T) key_root||_F^2`: the squared error of all logits between those queries and
    keys. By Eckart and Young the minimum is the tail of the squared singular values of `query_root^T form key_root`. The
    factors need no inverse of a root (the square-root method of balanced truncation), so moments can be singular; singular
    values that are zero to rounding become zero columns.

    >>> root = torch.eye(2, dtype=torch.float64)[None]
    >>> best = best_factors(root, root, torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))[None], rank=1)
    >>> (best.query @ best.key.mT).round().abs(), best.lost
    (tensor([[[3., 0.],
             [0., 0.]]], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    seen = query_root.transpose(-1, -2) @ form @ key_root
    with one_thread(seen):
        left, singular, right = torch.linalg.svd(seen, full_matrices=False)
    kept = min(rank, singular.shape[-1])
    largest = singular[..., :1].clamp(min=torch.finfo(singular.dtype).tiny)
    floor = largest * torch.finfo(singular.dtype).eps * singular.shape[-1]
    alive = singular[..., :kept] > floor
    shrink = torch.where(alive, singular[..., :kept], 1).rsqrt() * alive
    query = form @ key_root @ right.transpose(-1, -2)[..., :kept] * shrink[..., None, :]
    key = form.transpose(-1, -2) @ query_root @ left[..., :kept] * shrink[..., None, :]
    if kept < rank:
        query, key = (torch.nn.functional.pad(factor, (0, rank - kept)) for factor in (query, key))
    return Factors(query, key, singular, singular[..., kept:].square().sum(-1))


def shared_factors(
    roots: torch.Tensor, outputs: torch.Tensor, rank: int, rounds: int = 500
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors of the values that several heads share: `P` (v, rank), one `R_h` (d, rank) for each head, and the error (heads,).

    Takes roots (heads, v, v) of the moments of the mixed values and the rows (heads, d, v) that write them. It minimises
    `sum_h ||roots_h^T (W_h^T - P R_h^T)||^2`, that is the squared error of what all heads of the group write. For a
    given `P` each `R_h` is a least-squares solution; heads mix the shared values in different ways, so `P` has no closed
    form. It starts from the closed form for the pooled moment and is refined with the gradient (L-BFGS), which can end in a
    local minimum.

    >>> roots, outputs = torch.eye(3).double().expand(2, -1, -1), torch.diag(torch.tensor([3.0, 2.0, 1.0])).double()
    >>> value, output, lost = shared_factors(roots, outputs.expand(2, -1, -1), rank=2)
    >>> value.shape, output.shape, lost.round().tolist()
    (torch.Size([3, 2]), torch.Size([2, 3, 2]), [1.0, 1.0])
    """
    heads, _, width = outputs.shape
    seen = roots.mT @ outputs.mT  # the values that are written, (heads, v, d)
    pooled, rows = roots.transpose(0, 1).flatten(1), outputs.flatten(0, 1)
    roots_of_group = root_of_rows(pooled.mT)[None], root_of_rows(rows)[None]
    start = best_factors(*roots_of_group, torch.eye(width).to(rows)[None], rank).query[0]
    start = torch.linalg.qr(start).Q

    def solve(value: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(roots.mT @ value, seen, driver="gelsd").solution.mT

    def error(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value = torch.from_numpy(flat).view(width, rank)
        output = solve(value)
        change = seen - roots.mT @ value @ output.mT
        # at the best outputs, the error changes with the values alone
        slope = -2 * (roots @ change @ output).sum(0)
        return float(change.square().sum()), slope.flatten().numpy()

    with one_thread(roots):
        options = {"maxiter": rounds, "ftol": 1e-15, "gtol": 1e-12}
        found = minimize(error, start.flatten().numpy(), jac=True, method="L-BFGS-B", options=options)
        value = torch.from_numpy(found.x).view(width, rank)
        if found.fun > error(start.flatten().numpy())[0]:
            value = start
        output = solve(value)
    return value, output, (seen - roots.mT @ value @ output.mT).square().sum((1, 2))
