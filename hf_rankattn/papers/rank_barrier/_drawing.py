"""Parts that the figures of this paper share.

Markers are measured, thin lines without markers are laws, dashed grey lines are published or exact values.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pandas as pd


if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK = ("#08306b", "#2171b5", "#4a90c4", "#6baed6", "#238b45", "#b9770e", "#922b21", "#6c3483", "#000000")
MARKERS = "osD^vP*Xh"
LINES = ("-", "--", "-.", ":")
FACES = {"gaussian": None, "unit": "white"}  # markers of heads with keys of unit length (QK-norm) are hollow
KEY_NAMES = {"gaussian": "Gaussian keys", "unit": "QK-norm"}
GREY: dict[str, Any] = {"color": "0.35", "linewidth": 0.9}
DASHED: dict[str, Any] = GREY | {"linestyle": (0, (5, 3))}
WIDTH = "query-key width of a head"
LAW: dict[str, Any] = {"color": "0.4", "linewidth": 0.9}


def style(place: int) -> dict[str, Any]:
    look = {"color": DARK[place % 9], "marker": MARKERS[place % 9], "linestyle": LINES[place % 4]}
    return look | {"markersize": 4.5, "linewidth": 1.3}


def level(axis: "Axes", height: float, text: str, place: float = 0.01) -> None:
    """A dashed horizontal line with its name; `place` is 0 at the left and 1 at the right end."""
    axis.axhline(height, **DASHED, zorder=1)
    side: dict[str, Any] = {"va": "bottom", "ha": "left" if place < 0.5 else "right"}
    axis.annotate(text, (place, height), xycoords=("axes fraction", "data"), fontsize=7, color="0.25", **side)


def finish(
    axis: "Axes",
    title: str,
    widths: Iterable[float] | None = None,
    xlabel: str = WIDTH,
    size: int = 10,
    **properties: Any,
) -> None:
    """Title, label and grid, the properties of `Axes.set`, and with `widths` a logarithmic x axis with a tick for each."""
    axis.set(xlabel=xlabel, **properties)
    axis.set_title(title, fontsize=size)
    axis.grid(True, color="0.92")
    if widths is not None:
        shown = sorted({int(width) for width in widths})
        if len(shown) > 10:
            shown = [width for width in shown if width & (width - 1) == 0]
        axis.set_xscale("log", base=2)
        axis.set_xticks(shown, [str(width) for width in shown])
        axis.tick_params(axis="x", which="minor", bottom=False)


def beside(axis: "Axes") -> None:
    """The legend to the right of a panel whose curves leave no corner free."""
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def draw_sizes(axis: "Axes", rows: pd.DataFrame, column: str, sizes: Iterable[int], **look: Any) -> None:
    """A column against the width of heads, with one style for each n; hollow markers are keys of unit length."""
    for place, n in enumerate(sizes):
        for keys, face in FACES.items():
            points = rows[(rows.n == n) & (rows["keys"] == keys)].groupby("width")[column].mean()
            label = f"n = {int(n)}" if keys == "gaussian" else None
            axis.plot(points.index, points, **style(place) | look, markerfacecolor=face, label=label)


def draw_deviations(axis: "Axes", rows: pd.DataFrame, x: str, column: str, places: Iterable[int]) -> None:
    """A column against x, a line for each deviation of the logits and kind of keys."""
    for place, ((sharpness, keys), part) in zip(places, rows.groupby(["sharpness", "keys"]), strict=False):
        points = part.groupby(x)[column].mean()
        label = f"deviation {sharpness:g}, {KEY_NAMES[keys]}"
        axis.plot(points.index, points, **style(place), markerfacecolor=FACES[keys], label=label)
