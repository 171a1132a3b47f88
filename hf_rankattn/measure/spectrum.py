"""How much rank an attention map has: metrics from one singular-value call, and a cheap set that needs none."""

import torch

from .norms import drop_rows, full_precision, working
from .threads import one_thread


PIECE = 2**19


def for_heads(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask (batch, n) or (..., n) as booleans with an entry for every row of `x` (..., n, m)."""
    while mask.ndim < x.ndim - 1:
        mask = mask.unsqueeze(-2)  # (batch, n) -> (batch, 1, n) for heads
    try:
        return mask.bool().to(x.device).expand(x.shape[:-1])
    except RuntimeError as error:
        raise ValueError(f"`mask` {tuple(mask.shape)} does not fit maps {tuple(x.shape)}.") from error


def drop_padding(maps: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps (..., n, m) with padded rows and columns set to zero, and which rows are real (..., n).

    Zero rows and columns add only zero singular values, so the metrics ignore the padding.
    """
    maps = working(maps)
    if mask is None:
        return maps, torch.ones(maps.shape[:-1], dtype=torch.bool, device=maps.device)
    if maps.shape[-1] != maps.shape[-2]:
        raise ValueError(f"`mask` needs square maps, got {tuple(maps.shape)}.")
    real = for_heads(mask, maps)
    if not bool(real.any(-1).all()):
        raise ValueError("`mask` marks every row of an example as padding: there is nothing to measure in it.")
    # masked_fill, not a product: rows of padding may hold NaN
    return maps.masked_fill(~(real[..., :, None] & real[..., None, :]), 0), real


def coverage_of(maps: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """How many columns are the largest entry of some row, (...): the rank that hardmax would have."""
    chosen = torch.zeros_like(maps[..., 0, :])
    chosen.scatter_reduce_(-1, maps.argmax(-1), real.to(maps.dtype), reduce="amax")
    return chosen.sum(-1)


def entropy_of(maps: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Mean entropy of the rows in nats, (...)."""
    # twice as fast as torch.special.entr: zero is replaced by the smallest float, and zero times its logarithm is zero
    logs = maps.clamp(min=torch.finfo(maps.dtype).tiny).log_()
    return -logs.mul_(maps).sum((-2, -1)) / real.sum(-1)


SINK = 0.3  # the mean weight from which a column counts as an attention sink (arXiv 2410.10781)


def sink_of(maps: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mean weight that real rows put on the first real token, and whether it is above 0.3, (...)."""
    first = real.to(torch.uint8).argmax(-1, keepdim=True)  # padding can be on the left
    column = maps.gather(-1, first[..., None, :].expand(*maps.shape[:-1], 1))[..., 0]
    mass = column.sum(-1) / real.sum(-1)
    return {"sink_mass": mass, "sink_rate": (mass > SINK).to(mass.dtype)}


def spectral_metrics(
    maps: torch.Tensor, mask: torch.Tensor | None = None, rtol: float = 1e-2, energy: float = 0.9
) -> dict[str, torch.Tensor]:
    """All rank metrics of (..., n, n) maps from one singular-value call; each value is (...).

    Args:
        maps (`torch.Tensor` of shape `(..., n, n)`): Attention maps; half precision is computed in float32.
        mask (`torch.Tensor` of shape `(..., n)` or `(batch, n)`, *optional*): 1 for tokens, 0 for padding.
        rtol (`float`, *optional*, defaults to 0.01):
            Singular values below `rtol` times the largest do not count in `numerical_rank`. Below 1e-3 the rounding of
            half-precision maps counts as rank.
        energy (`float`, *optional*, defaults to 0.9): The share of squared singular values that `energy_rank` keeps.

    Returns `numerical_rank`, `effective_rank` (exponential of the entropy of the singular values, not of their squares),
    `stable_rank`, `participation_ratio` (of the squared singular values), `energy_rank`, `argmax_coverage`, `row_entropy`,
    `spectral_gap` (the second singular value over the first: 0 if all rows are equal), `sink_mass` (the mean weight on the
    first real token) and `sink_rate` (1 if that is above 0.3, else 0; the mean over heads is the published sink rate).

    >>> {name: round(value.item(), 4) for name, value in spectral_metrics(torch.eye(4)).items()}["effective_rank"]
    4.0
    """
    maps, real = drop_padding(maps, mask)
    with one_thread(maps):
        singular = torch.linalg.svdvals(maps)
    metrics = spectrum_metrics(singular, rtol, energy)
    metrics |= {"argmax_coverage": coverage_of(maps, real), "row_entropy": entropy_of(maps, real)}
    second = singular[..., 1] if singular.shape[-1] > 1 else torch.zeros_like(singular[..., 0])
    return {**metrics, "spectral_gap": second / singular[..., 0], **sink_of(maps, real)}


def spectrum_metrics(singular: torch.Tensor, rtol: float = 1e-2, energy: float = 0.9) -> dict[str, torch.Tensor]:
    """The rank metrics that follow from singular values (..., k) in descending order; each value is (...).

    All of them are 0 for a matrix of zeros.
    """
    if not 0 <= rtol < 1 or not 0 < energy <= 1:
        raise ValueError(f"`rtol` must be in [0, 1) and `energy` in (0, 1], got {rtol} and {energy}.")
    squares = singular.square()
    total = squares.sum(-1)
    share = singular / singular.sum(-1, keepdim=True)
    reached = squares.cumsum(-1) >= energy * total[..., None] * (1 - 4 * torch.finfo(singular.dtype).eps)
    metrics = {
        "numerical_rank": (singular > rtol * singular[..., :1]).sum(-1).to(singular.dtype),
        "effective_rank": torch.special.entr(share).sum(-1).exp(),
        "stable_rank": total / squares[..., 0],
        "participation_ratio": total.square() / squares.square().sum(-1),
        "energy_rank": (singular.shape[-1] - reached.sum(-1) + 1).to(singular.dtype),
    }
    return {name: value.masked_fill(total == 0, 0) for name, value in metrics.items()}


@full_precision()
def cheap_metrics(maps: torch.Tensor, mask: torch.Tensor | None = None, steps: int = 16) -> dict[str, torch.Tensor]:
    """Rank metrics of non-negative (..., n, n) maps that need no decomposition; each value is (...).

    The participation ratio is exact, from the Gram matrix. The largest singular value is found by `steps` steps of power
    iteration from a positive vector; as the Gram matrix is non-negative, the largest and smallest ratio of a step bound
    its largest eigenvalue (Collatz and Wielandt), so `stable_rank` comes with `stable_rank_error`, a certified bound of
    its relative error.
    """
    maps, real = drop_padding(maps, mask)
    shape, size = maps.shape[:-2], maps.shape[-2] * maps.shape[-1]
    # in pieces, so that intermediate tensors stay small compared with the maps
    count = max(1, PIECE // size)
    pieces = maps.reshape(-1, *maps.shape[-2:]).split(count), real.reshape(-1, real.shape[-1]).split(count)
    parts = [cheap_piece(piece, rows, steps) for piece, rows in zip(*pieces, strict=True)]
    return {name: torch.cat([part[name] for part in parts]).view(shape) for name in parts[0]}


def cheap_piece(maps: torch.Tensor, real: torch.Tensor, steps: int) -> dict[str, torch.Tensor]:
    """[`cheap_metrics`] of (batch, n, n) maps whose padding is zero; `real` (batch, n) marks the other rows."""
    gram = maps @ maps.transpose(-1, -2)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    vector = real.to(maps.dtype)
    for _ in range(steps):
        image = (vector[:, None, :] @ gram)[:, 0]  # the Gram matrix is symmetric, and rows are several times faster
        # entries must stay positive for the bound; those that underflow do not matter for the largest eigenvalue
        vector = (image / image.amax(-1, keepdim=True)).clamp(min=1e-18) * real
    image = (vector[:, None, :] @ gram)[:, 0]
    rayleigh = (vector * image).sum(-1) / vector.square().sum(-1)
    ratios = torch.where(real, image / vector, -torch.inf)
    rounding = 2 * maps.shape[-1] ** 0.5 * torch.finfo(maps.dtype).eps
    return {
        "stable_rank": trace / rayleigh,
        "stable_rank_error": (ratios.amax(-1) / rayleigh - 1).clamp(min=0) + rounding,
        "participation_ratio": trace.square() / torch.linalg.vector_norm(gram, dim=(-2, -1)).square(),
        "argmax_coverage": coverage_of(maps, real),
        "row_entropy": entropy_of(maps, real),
        **sink_of(maps, real),
    }


@full_precision()
def states_effective_rank(states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Effective rank of token states (..., n, d): the exponential of the entropy of their singular values, (...).

    The singular values are roots of the eigenvalues of the smaller Gram matrix, in float64, which is many times faster.
    """
    states = drop_rows(working(states), mask).double()
    gram = states @ states.mT if states.shape[-2] <= states.shape[-1] else states.mT @ states
    with one_thread(gram):
        singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    # eigenvalues are exact to rounding relative to the largest, and rounding is no rank
    floor = singular[..., -1:] * gram.shape[-1] ** 0.5 * torch.finfo(gram.dtype).eps ** 0.5
    singular = torch.where(singular > floor, singular, 0)
    return torch.special.entr(singular / singular.sum(-1, keepdim=True)).sum(-1).exp()


@full_precision()
def factor_spectrum(
    query: torch.Tensor, key: torch.Tensor, center_rows: bool = False, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Singular values, descending, of `query @ key^T` from its factors (..., n, r) and (..., m, r), as (..., r).

    Neither the n x m logits nor the d x d form of a head is computed: two QR decompositions give an r x r matrix with the
    same singular values. With `center_rows`, the mean of each row of logits, which softmax ignores, is subtracted first, by
    centring the keys. Tokens that a `mask` (batch, n) of self-attention marks with 0 are ignored.
    """
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"queries and keys must have one width, got {tuple(query.shape)} and {tuple(key.shape)}.")
    query, key = working(query), working(key)
    if mask is not None:
        mask = for_heads(mask, query)
        query, key = drop_rows(query, mask), drop_rows(key, mask)
    if center_rows:
        count = key.shape[-2] if mask is None else mask.sum(-1)[..., None, None]
        key = drop_rows(key - key.sum(-2, keepdim=True) / count, mask)
    with one_thread(query):
        left, right = (torch.linalg.qr(factor, mode="r").R for factor in (query, key))
        singular = torch.linalg.svdvals(left @ right.transpose(-1, -2))
    missing = query.shape[-1] - singular.shape[-1]  # with fewer rows than r, the others are zero
    return torch.nn.functional.pad(singular, (0, missing))
