"""Figures of the demonstration, from its rows. Filled markers are ours, hollow ones and grey levels were published.

Colours have contrast on white and on black, and lines differ by dash and marker as well. [`INK`] becomes the colour of the
text around a figure, on a page that follows the reader's choice of light and dark.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...report.html import INK
from ...report.plots import new_figure, published_residuals, published_table
from ..drawing import log_ticks


MUTED = "#7d858e"
HOLLOW: dict[str, Any] = {"color": MUTED, "markerfacecolor": "none"}
NAMES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
FAMILIES = {"bert": ("o", "#2f7fc1"), "albert": ("s", "#c77b1a"), "xlnet": ("^", "#2a9281")}
VARIANTS = {
    "transformer": ("whole model", "-", "o", "#2f7fc1"),
    "san+skip": ("attention + skips", "--", "s", "#2a9281"),
    "san+mlp": ("attention + MLPs", "-.", "^", "#c77b1a"),
    "san": ("attention alone", ":", "D", "#cf4a5c"),
}
MAPS = {
    "softmax": ("softmax as published, n 100", "-", "o", "#2f7fc1"),
    "hard": ("hard choice, n 256", "--", "s", "#c77b1a"),
    "qk_norm": ("hard choice with QK-norm", "-.", "^", "#2a9281"),
    "causal": ("hard choice, causal mask", ":", "D", "#cf4a5c"),
}
CUTS = {
    ("limit", "calibrated"): ("queries and keys limited", "-o", "#2a9281"),
    ("cut", "calibrated"): ("queries and keys cut", "--s", "#2f7fc1"),
    ("values", "calibrated"): ("values cut", "-.^", "#c77b1a"),
    ("cut", "weights only"): ("queries and keys cut, without texts", ":D", "#cf4a5c"),
}
FLOOR = 2e-15


@contextmanager
def page_colours() -> Iterator[None]:
    """Text and axes in [`INK`], on a transparent background."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
    options: dict[Any, Any] = dict.fromkeys(inked, INK)
    options |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none")
    options |= {"legend.frameon": False, "legend.fontsize": 8.5, "legend.labelspacing": 0.3, "lines.markersize": 5}
    options |= {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(options):
        yield


def draw_separation(axis: Axes, rows: pd.DataFrame) -> None:
    """Error against rank at one budget of parameters; ranks as a share of the dimension, so that both sizes share an axis."""
    theirs = published_table("rank_separation")
    theirs = theirs[(theirs.layers == 1) & (theirs.budget == "d^2")]
    label = "published (d 64, 1e5 steps)"
    axis.plot(theirs["rank"] / 64, theirs.value, "-o", **HOLLOW, linewidth=0.9, markersize=6, label=label)
    normed, dim = rows.qk_norm.astype(bool), int(rows.dim.iloc[0])
    plain, normed = rows[~normed].sort_values("rank"), rows[normed]
    label = f"here (d {dim}, {int(rows.steps.iloc[0])} steps)"
    axis.plot(plain["rank"] / dim, plain.error, "--s", color="#2f7fc1", markersize=6, label=label)
    axis.plot(normed["rank"] / dim, normed.error, "*", color="#cf4a5c", markersize=11, label="here, with qk_norm")
    log_ticks(axis, [1 / 64, 1 / 16, 1 / 4, 1 / 2, 1], ["1/64", "1/16", "1/4", "1/2", "1"])
    axis.axhline(1.0, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    axis.annotate("predicting nothing", (1 / 64, 1.06), fontsize=8, color=INK)
    axis.set(yscale="log", ylim=(0.004, 1.6), title="Rank is needed")
    axis.set(xlabel="rank of a head / dimension", ylabel="error, farthest neighbour")
    axis.legend(loc="lower left")


def draw_residuals(axis: Axes, rows: pd.DataFrame, family: str, variant: str, line: str, **look: Any) -> None:
    """The residual of one variant by layer, ours as a line and published as hollow markers."""
    ours = rows[(rows.model == family) & (rows.variant == variant)].sort_values("layer")
    axis.plot(ours.layer, ours.residual, line, **look, markersize=4.5)
    theirs = published_residuals(family, random_init=True)
    theirs = theirs[theirs.variant == variant]
    axis.plot(theirs.layer, theirs.value, linestyle="none", marker=look["marker"], **HOLLOW, markersize=7)


def draw_family(axis: Axes, rows: pd.DataFrame, family: str) -> None:
    """Relative residual by layer in four variants, with the published curves of the family."""
    for variant, (label, line, marker, colour) in VARIANTS.items():
        draw_residuals(axis, rows, family, variant, line, marker=marker, color=colour, label=label)
    finish_residuals(axis, f"{NAMES[family]}, fresh weights")
    axis.legend(loc="upper right", bbox_to_anchor=(1.02, 0.94))


def draw_collapse(axis: Axes, rows: pd.DataFrame) -> None:
    """Attention alone against the whole model, all three families."""
    for family, (marker, colour) in FAMILIES.items():
        for variant, line, label in (("transformer", "-", None), ("san", ":", NAMES[family])):
            draw_residuals(axis, rows, family, variant, line, marker=marker, color=colour, label=label)
    finish_residuals(axis, "Depth loses rank, unless skips keep it")
    axis.annotate("whole model", (0.98, 0.9), xycoords="axes fraction", fontsize=9, color=INK, ha="right", va="top")
    axis.annotate("attention alone", (3.3, 1e-13), fontsize=9, color=INK)
    axis.legend(loc="center right", bbox_to_anchor=(1.0, 0.6))


def finish_residuals(axis: Axes, title: str) -> None:
    axis.set(xlabel="layer (0: embeddings)", ylabel="residual (0: all tokens equal)", title=title)
    axis.set(yscale="log", ylim=(1e-18, 3.0))
    axis.axhspan(1e-18, FLOOR, color=MUTED, alpha=0.25, linewidth=0)
    axis.annotate("float64 rounding", (0.98, 0.012), xycoords="axes fraction", fontsize=8, color=INK, ha="right")
    axis.plot([], [], "o", **HOLLOW, markersize=7, label="published")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_ceiling(axis: Axes, rows: pd.DataFrame) -> None:
    """Rank of random maps against the width of their head, with the ceilings of free and of causal choice."""
    for maps, (label, line, marker, colour) in MAPS.items():
        points = rows[rows.maps == maps].sort_values("width")
        axis.plot(points.width, points.share, line + marker, color=colour, label=label)
    widths = sorted(rows.width.astype(int).unique())
    for height, text in ((1 - 1 / math.e, "published: 0.63 n"), (0.5, "causal: 0.50 n")):
        axis.axhline(height, color=MUTED, linewidth=1.0, linestyle=(0, (5, 3)))
        axis.annotate(text, (widths[0], height + 0.008), fontsize=8.5, color=INK)
    log_ticks(axis, [width for width, wider in pairwise(widths) if wider >= 2 * width] + widths[-1:])
    axis.set(ylim=(0, 0.72), xlabel="query-key width of a head", ylabel="rank of an attention map / n")
    axis.set_title("Width does not buy full rank")
    axis.legend(loc="lower right")


def draw_conversion(axis: Axes, rows: pd.DataFrame) -> None:
    """Quality against width: queries and keys cut by the weights alone, cut on texts, or limited, and values cut on texts."""
    width = int(rows.width.iloc[0])
    for (what, way), (label, look, colour) in CUTS.items():
        points = rows[(rows.what == what) & (rows.way == way)].sort_values("rank")
        axis.plot([*points["rank"], width], [*points.embedding_cosine, 1.0], look, color=colour, label=label)
    axis.plot([width], [1.0], "o", **HOLLOW, markersize=8, label="uncut")
    found = rows[rows.embedding_cosine.notna()]
    axis.set_xticks([*sorted(found["rank"].unique()), width])
    axis.set_ylim(min(0.5, float(found.embedding_cosine.min()) - 0.05), 1.03)
    axis.set(xlabel="width of a head, of queries and keys or of values", ylabel="cosine to the original")
    axis.set_title(f"Less rank for {rows.model.iloc[0]}")
    axis.legend(loc="lower right")


def part(table: pd.DataFrame, name: str) -> pd.DataFrame:
    return table[table.part == name].dropna(axis=1, how="all")


def demo_figures(table: pd.DataFrame) -> dict[str, Figure]:
    """One small figure for each part that was run, of a size that can be read on a phone."""
    panels: dict[str, tuple[Callable[..., None], str]] = {"separation": (draw_separation, "separation")}
    panels["collapse"] = draw_collapse, "collapse"
    panels |= {family: (partial(draw_family, family=family), "collapse") for family in NAMES}
    panels["ceiling"] = draw_ceiling, "ceiling"
    if (table.part == "conversion").any():
        panels["conversion"] = draw_conversion, "conversion"
    found = {}
    with page_colours():
        for name, (draw, rows) in panels.items():
            found[name], axes = new_figure(1, 1, 4.2, 3.6)
            draw(axes[0, 0], part(table, rows))
    return found


def overview_figure(table: pd.DataFrame) -> Figure:
    """Need, loss and ceiling side by side, on white: the picture for a README."""
    with page_colours():
        figure, axes = new_figure(1, 3, 12.6, 3.8)
        figure.set_facecolor("white")
        draw_separation(axes[0, 0], part(table, "separation"))
        draw_collapse(axes[0, 1], part(table, "collapse"))
        draw_ceiling(axes[0, 2], part(table, "ceiling"))
    return figure
