"""The operator norms of the rank-collapse theory, and the precision in which they are computed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch `torch.autocast` off on every device: it would round products to half precision."""
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device_type in {"cpu"} if accelerator is None else {"cpu", accelerator.type}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def working(x: torch.Tensor) -> torch.Tensor:
    """`x` in the precision of all measurements: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def drop_rows(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`x` (..., n, d) with the rows that `mask` (..., n) marks as padding set to zero.

    A zero row adds nothing to a column sum, a singular value or a norm, so it counts as absent.
    """
    if mask is None:
        return x
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"`mask` must be {tuple(x.shape[:-1])}, one entry per row, got {tuple(mask.shape)}.")
    real = mask.bool()
    if not bool(real.any(-1).all()):
        raise ValueError("`mask` marks every row of an example as padding: there is nothing to measure in it.")
    return x.masked_fill(~real[..., None], 0)


def one_norm(x: torch.Tensor) -> torch.Tensor:
    """Largest absolute column sum of (..., n, d) matrices, (...)."""
    return working(x).abs().sum(-2).amax(-1)


def inf_norm(x: torch.Tensor) -> torch.Tensor:
    """Largest absolute row sum of (..., n, d) matrices, (...)."""
    return working(x).abs().sum(-1).amax(-1)


def composite_norm(x: torch.Tensor) -> torch.Tensor:
    """`sqrt(||x||_1 ||x||_inf)` of (..., n, d) matrices, (...).

    Positive and homogeneous, but not a norm: the triangle inequality fails.

    >>> composite_norm(torch.tensor([[-2.0, -1.0, 0.0], [1.0, 2.0, 3.0]]))
    tensor(4.2426)
    """
    return norm_of_sizes(working(x).abs())


def norm_of_sizes(sizes: torch.Tensor) -> torch.Tensor:
    """[`composite_norm`] from absolute values."""
    # roots first: the product of two norms overflows before the norms do
    return sizes.sum(-2).amax(-1).sqrt() * sizes.sum(-1).amax(-1).sqrt()
