"""Parts that the figures of this paper share.

Markers are measured, thin lines without markers are laws, dashed grey lines are published or exact values.
"""

from collections.abc import Iterable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from ..drawing import log_ticks


DARK = ("#08306b", "#2171b5", "#4a90c4", "#6baed6", "#238b45", "#b9770e", "#922b21", "#6c3483", "#000000")
MARKERS = "osD^vP*Xh"
LINES = ("-", "--", "-.", ":")
FACES = {"gaussian": None, "unit": "white"}  # markers of heads with keys of unit length (QK-norm) are hollow
KEY_NAMES = {"gaussian": "Gaussian keys", "unit": "QK-norm"}
WIDTH = "query-key width of a head"
LAW: dict[str, Any] = {"color": "0.4", "linewidth": 0.9}


def style(place: int, **look: Any) -> dict[str, Any]:
    """The look of a curve: its colour, marker and line by its place, replaced by what is given."""
    curve = {"color": DARK[place % 9], "marker": MARKERS[place % 9], "linestyle": LINES[place % 4]}
    return curve | {"markersize": 4.5, "linewidth": 1.3} | look


def finish(
    axis: Axes, title: str, widths: Iterable[float] | None = None, xlabel: str = WIDTH, **properties: Any
) -> None:
    """Title, label, the properties of `Axes.set`, and with `widths` a logarithmic x axis with a tick for each."""
    axis.set(xlabel=xlabel, title=title, **properties)
    if widths is not None:
        log_ticks(axis, widths)


def beside(axis: Axes) -> None:
    """The legend to the right of a panel whose curves leave no corner free."""
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def draw_sizes(axis: Axes, rows: pd.DataFrame, column: str, sizes: Iterable[int], **look: Any) -> None:
    """A column against the width of heads, with one style for each n; hollow markers are keys of unit length."""
    for place, n in enumerate(sizes):
        for keys, face in FACES.items():
            points = rows[(rows.n == n) & (rows["keys"] == keys)].groupby("width")[column].mean()
            label = f"n = {int(n)}" if keys == "gaussian" else None
            axis.plot(points.index, points, **style(place) | look, markerfacecolor=face, label=label)


def draw_deviations(axis: Axes, rows: pd.DataFrame, x: str, column: str, places: Iterable[int]) -> None:
    """A column against x, a line for each deviation of the logits and kind of keys."""
    for place, ((sharpness, keys), part) in zip(places, rows.groupby(["sharpness", "keys"]), strict=False):
        points = part.groupby(x)[column].mean()
        label = f"deviation {sharpness:g}, {KEY_NAMES[keys]}"
        axis.plot(points.index, points, **style(place), markerfacecolor=FACES[keys], label=label)
