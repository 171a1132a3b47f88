"""The ranks that a limit is asked for, and those that one budget gives to layers and key heads."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal


# one width, one for each layer with attention, or for each of its key heads; "auto" spreads `mean_rank`
Request = int | Sequence[int | Sequence[int]] | Literal["auto"] | None
# the mean of the widths that "auto" spreads, or two: that of queries and keys, and that of values
Budget = float | Sequence[float] | None


def check_width(name: str, width: object) -> None:
    if isinstance(width, bool) or not isinstance(width, Integral) or width < 1:
        raise ValueError(
            f"`{name}` must be an integer of at least 1, a list with one for each layer with attention (or a list for each of its key "
            f"heads), or 'auto', got {width!r}."
        )


def check_request(name: str, request: Request, layers: int) -> None:
    """Raise a `ValueError` for what is not a width, a list of the right length or "auto"."""
    if request is None or (isinstance(request, str) and request == "auto"):
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
    entry = request if isinstance(request, Integral) else request[layer]  # type: ignore[index]
    widths = [int(width) for width in entry] if isinstance(entry, Sequence) else [int(entry)] * groups  # type: ignore[call-overload]
    if len(widths) != groups:
        raise ValueError(f"`{name}` has {len(widths)} widths for layer {layer}, which has {groups} key heads.")
    if max(widths) > whole:
        raise ValueError(
            f"`{name}` is {max(widths)} in layer {layer}, whose heads have the width {whole}: a limit must be at most that."
        )
    return widths


def budgets_of(
    qk_rank: Request, v_head_dim: Request, mean_rank: Budget
) -> tuple[float | None, float | None, float | None]:
    """The mean width of queries and keys, that of values, and that of both together, where "auto" asks for one.

    >>> budgets_of("auto", 8, 4), budgets_of("auto", "auto", 4), budgets_of("auto", "auto", (4, 6))
    ((4, None, None), (None, None, 4), (4, 6, None))
    """
    auto = [isinstance(request, str) and request == "auto" for request in (qk_rank, v_head_dim)]
    if not any(auto):
        if mean_rank is not None:
            raise ValueError(
                f"`mean_rank` is spread where a width is 'auto', got qk_rank={qk_rank!r} and v_head_dim={v_head_dim!r}."
            )
        return None, None, None
    means: list[Any] = (
        list(mean_rank) if isinstance(mean_rank, Sequence) and all(auto) and len(mean_rank) == 2 else [mean_rank]
    )
    for mean in means:
        if isinstance(mean, bool) or not isinstance(mean, int | float) or not 1 <= mean < math.inf:
            raise ValueError(
                "'auto' spreads `mean_rank`, the mean width of all key heads, over them: give a number of at least 1 (two where both "
                f"widths are 'auto' and each has a budget of its own), got {mean_rank!r}."
            )
    if len(means) == 2:
        return means[0], means[1], None
    return (
        (None, None, means[0]) if all(auto) else (means[0] if auto[0] else None, means[0] if auto[1] else None, None)
    )
