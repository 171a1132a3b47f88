"""How fast residuals fall from layer to layer: the exponent, the regime, and the floor of the precision."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch


Kind = Literal["doubly_exponential", "geometric", "unclear", "none"]
SLOWEST = 0.8  # a mean factor above this is drift, not collapse
# With s_l = -log e_l, s_{l+1} = a s_l + b: a = 1 is a constant factor per layer, and a > 1 is doubly exponential. A fit of a
# few noisy layers needs a margin above 1.
FASTER = 1.35
SINGLE = 1e-8  # no residual of float32 states stays below this unless it is zero


class CollapseRate(NamedTuple):
    """How residuals fall from layer to layer, as [`collapse_rate`] found it."""

    exponent: float
    kind: Kind
    factor: float
    used: int
    at_least: bool
    floor: float


def precision_floor(dtype: torch.dtype) -> float:
    """About the relative residual that rounding leaves of equal tokens; in half precision it can be lower."""
    eps = torch.finfo(dtype).eps
    return eps / 4 if dtype in (torch.float16, torch.bfloat16) else 2 * eps


def collapse_rate(values: torch.Tensor | Sequence[float], floor: float | None = None) -> CollapseRate:
    """Fit how fast residuals fall, and name the regime.

    Args:
        values (`torch.Tensor` of shape `(layers + 1,)`): Relative residuals from the embeddings to the last layer.
        floor (`float`, *optional*):
            The precision floor, by default that of the dtype of a tensor. For a list it is that of float64, or of float32
            if no value except zero is below 1e-8, because float32 states give no such values; see [`precision_floor`].

    The first value within ten times the floor and all later values are ignored. With `s_l = -log e_l`, a line is fitted to
    `s_{l+1}` against `s_l`. Its slope is the exponent: 3 for the collapse of attention without skips, 1 for a constant factor
    per layer.

    Returns:
        [`CollapseRate`]: `exponent`, the slope (NaN without collapse); `kind`, which is `"unclear"` if there is collapse but
        fewer than three values to fit; `factor`, the mean factor of a layer on the residual; `used`, the number of values;
        `at_least`, whether the floor came so early that the exponent is only a lower bound; and the `floor`.

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
    numbers = series.double().tolist()
    if floor is None:
        single = not isinstance(values, torch.Tensor) and all(value == 0 or value > SINGLE for value in numbers)
        floor = precision_floor(torch.float32 if single else series.dtype)
    used = next((layer for layer, value in enumerate(numbers) if value <= 10 * floor), len(numbers))
    depths = [-math.log(value) for value in numbers[:used]]
    at_least = used < 3 and used < len(numbers)
    if at_least:
        depths.append(-math.log(10 * floor))
    steps = len(depths) - 1
    factor = math.exp((depths[0] - depths[-1]) / steps) if steps > 0 else math.nan
    if steps < 1 or factor > SLOWEST:
        return CollapseRate(math.nan, "none", factor, used, at_least, floor)
    if steps < 2:
        return CollapseRate(math.nan, "unclear", factor, used, at_least, floor)
    exponent = statistics.linear_regression(depths[:-1], depths[1:]).slope
    kind: Kind = "doubly_exponential" if exponent > FASTER else "geometric"
    return CollapseRate(exponent, kind, factor, used, at_least, floor)
