"""How fast residuals fall from layer to layer: the exponent, the regime, and where precision ends the question."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch


Kind = Literal["doubly_exponential", "geometric", "none"]
SLOWEST = 0.8  # a mean factor above this is drift, not collapse
BETWEEN = 1.8  # steps that grow by more than this are nearer to 3 than to 1, on a logarithmic scale


class CollapseRate(NamedTuple):
    """How residuals fall from layer to layer, as [`collapse_rate`] found it."""

    exponent: float
    kind: Kind
    factor: float
    used: int
    at_least: bool
    floor: float


def precision_floor(dtype: torch.dtype) -> float:
    """Where the relative residual of exactly equal tokens ends up by rounding."""
    return 2 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def collapse_rate(values: torch.Tensor | Sequence[float], floor: float | None = None) -> CollapseRate:
    """Fit how fast residuals fall, and say which regime it is.

    Args:
        values (`torch.Tensor` of shape `(layers + 1,)`): Relative residuals from the embeddings to the last layer.
        floor (`float`, *optional*): The precision floor; by default that of the dtype (float64 for a list).

    Everything from the first value within ten times the floor on is left out. With `s_l = -log e_l`, the growth of the
    steps `s_{l+1} - s_l` tells the regime: steps that grow threefold are the doubly exponential collapse of attention
    without skips, constant steps are geometric collapse.

    Returns:
        [`CollapseRate`]: `exponent`, the median growth of a step (3 for pure attention, 1 for geometric collapse, NaN
        without collapse); `kind`; `factor`, by which a layer multiplies the residual in the mean; how many values were
        `used`; `at_least`, whether the floor came so early that the last step, and with it the exponent, is known from
        below only; and the `floor`.

    >>> collapse_rate([0.5 ** (3**k) for k in range(4)]).kind
    'doubly_exponential'
    >>> collapse_rate([0.9, 0.3, 0.1, 0.03]).kind
    'geometric'
    >>> collapse_rate([0.60, 0.58, 0.57, 0.57]).kind
    'none'
    """
    series = values if isinstance(values, torch.Tensor) else torch.tensor(list(values), dtype=torch.float64)
    if series.ndim != 1 or len(series) < 2:
        raise ValueError(f"`values` must be one series of at least two layers, got shape {tuple(series.shape)}.")
    if not bool((torch.isfinite(series) & (series >= 0)).all()):
        raise ValueError("`values` must be finite and not negative: a residual that is NaN or Inf has no rate.")
    floor = precision_floor(series.dtype) if floor is None else floor
    numbers = series.double().tolist()
    used = next((layer for layer, value in enumerate(numbers) if value <= 10 * floor), len(numbers))
    depths = [-math.log(value) for value in numbers[:used]]
    at_least = used < 3 and used < len(numbers)
    if at_least:
        depths.append(-math.log(10 * floor))
    steps = [after - before for before, after in zip(depths, depths[1:], strict=False)]
    factor = math.exp((depths[0] - depths[-1]) / len(steps)) if steps else math.nan
    if not steps or factor > SLOWEST:
        return CollapseRate(math.nan, "none", factor, used, at_least, floor)
    # with enough layers the first is left out: it starts from embeddings, not from the output of a layer like itself
    settled = steps[1:] if len(steps) > 2 else steps
    growth = [after / before for before, after in zip(settled, settled[1:], strict=False) if before > 0]
    exponent = statistics.median(growth) if growth else math.nan
    doubly = exponent > (1.0 if at_least else BETWEEN)
    return CollapseRate(exponent, "doubly_exponential" if doubly else "geometric", factor, used, at_least, floor)
