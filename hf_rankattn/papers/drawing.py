"""What the figures of all experiments share: one style, levels, bands, and axes with chosen ticks."""

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes


# the settings of matplotlib for all figures, so that no figure repeats them
FIGURE_STYLE: dict[Any, Any] = {
    **{"axes.grid": True, "grid.color": "0.92", "axes.titlesize": 10, "axes.labelsize": 9, "lines.markersize": 5},
    **{"legend.fontsize": 7.5, "figure.titlesize": 12, "figure.labelsize": 8},
}
BLUE, RED = "#1b4f72", "#922b21"
GREY: dict[str, Any] = {"color": "0.35", "linewidth": 0.9}
DASHED: dict[str, Any] = GREY | {"linestyle": (0, (5, 3))}
Style = tuple[str, str, str]  # marker, line and colour


def level(axis: Axes, height: float, text: str, place: float = 0.01) -> None:
    """A dashed horizontal line with its name; `place` is 0 at the left and 1 at the right end."""
    axis.axhline(height, **DASHED, zorder=1)
    side: Any = "left" if place < 0.5 else "right"
    where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "bottom", "ha": side}
    axis.annotate(text, (place, height), fontsize=7, color="0.25", **where)


def band(axis: Axes, groups: Any, style: Style, label: str, **look: Any) -> None:
    """The mean of grouped values as a line, their least to largest as a band."""
    marker, line, colour = style
    found = groups.agg(["mean", "min", "max"]).dropna()
    axis.fill_between(found.index, found["min"], found["max"], color=colour, alpha=0.15, linewidth=0)
    axis.plot(found.index, found["mean"], line, marker=marker, color=colour, label=label, **look)


def log_ticks(axis: Axes, places: Iterable[float], names: Iterable[str] | None = None, base: int = 2) -> None:
    """A logarithmic x axis with a labelled tick at each place; without names, of whole numbers, and not more than ten."""
    shown: list[Any] = sorted(set(places))
    if names is None:
        shown = sorted({int(place) for place in shown})
        if len(shown) > 10:
            shown = [place for place in shown if place & (place - 1) == 0]
    axis.set_xscale("log", base=base)
    axis.set_xticks(shown, list(names or map(str, shown)))
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def plural(count: int, noun: str) -> str:
    """`plural(2, "layer")` is "2 layers"."""
    return f"{count} {noun}{'s' if count > 1 else ''}"
