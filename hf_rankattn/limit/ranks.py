"""The ranks that a limit is asked for, and those that one budget gives to layers and key heads."""

from collections.abc import Sequence
from numbers import Integral
from typing import Literal

import numpy as np


# one width, one for each layer with attention, or for each of its key heads; "auto" spreads `mean_rank`
Request = int | Sequence[int | Sequence[int]] | Literal["auto"] | None


def check_width(name: str, width: object) -> None:
    if isinstance(width, bool) or not isinstance(width, Integral) or width < 1:
        raise ValueError(
            f"`{name}` must be an integer of at least 1, a list with one for each layer with attention (or a list for each of its key "
            f"heads), or 'auto', got {width!r}."
        )


def check_request(name: str, request: Request, layers: int) -> None:
    """Raise a `ValueError` for what is not a width, a list of the right length or "auto"."""
    if request is None or request == "auto":
        return
    if not isinstance(request, Sequence) or isinstance(request, str):
        check_width(name, request)
        return
    if len(request) != layers:
        raise ValueError(
            f"`{name}` must have one entry for each of the {layers} layers with attention, got {len(request)}."
        )
    for entry in request:
        for width in entry if isinstance(entry, Sequence) else [entry]:
            check_width(name, width)


def widths_of_heads(name: str, request: Request, layer: int, groups: int, whole: int) -> list[int]:
    """The width of each key head of the layer of this number among those with attention.

    >>> widths_of_heads("qk_rank", [4, [2, 3]], layer=1, groups=2, whole=8), widths_of_heads("qk_rank", None, 0, 2, whole=8)
    ([2, 3], [8, 8])
    """
    if request is None:
        return [whole] * groups
    entry = request if isinstance(request, int) else request[layer]
    widths = [int(width) for width in entry] if isinstance(entry, Sequence) else [int(entry)] * groups  # type: ignore[call-overload]
    if len(widths) != groups:
        raise ValueError(f"`{name}` has {len(widths)} widths for layer {layer}, which has {groups} key heads.")
    if max(widths) > whole:
        raise ValueError(
            f"`{name}` is {max(widths)} in layer {layer}, whose heads have the width {whole}: a limit must be at most that."
        )
    return widths


def spread(errors: Sequence[np.ndarray], budget: int) -> list[int]:
    """The widths with the smallest sum of errors and a sum of at most `budget`; each is at least 1.

    `errors[part][width]` is the error of a part at a width from 0 on. It falls ever more slowly, so taking the largest gains first is
    optimal.

    >>> spread([np.array([9.0, 1.0, 0.5, 0.0]), np.array([9.0, 3.0, 1.0, 0.0])], budget=4)
    [1, 3]
    """
    widths = [1] * len(errors)
    gains = [
        (-float(gain), part, width)
        for part, curve in enumerate(errors)
        for width, gain in enumerate(curve[1:-1] - curve[2:], start=2)
    ]
    for _, part, width in sorted(gains)[: max(budget - len(errors), 0)]:
        widths[part] = max(widths[part], width)
    return widths
