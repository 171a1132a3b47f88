"""What the figures of several experiments on the benefits of rank share.

Filled markers are ours. Hollow markers on thin lines were read from the published figures, which have d = 64 and 1e5 or 2e5
steps. The x-axis is the rank as a share of the dimension, so that runs of different dimensions share one axis.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = tuple[str, str, str]
BLUE, RED = "#1b4f72", "#922b21"
FORM_TITLES = {"original": "original form", "qk_norm": "qk_norm: unit queries and keys, learned temperature"}
NOTE = "lines: mean over seeds; bands: least to largest; hollow: published, best seed's train error, d 64, 1e5 or 2e5 steps"
ERROR_LABEL = "squared error per point, held out"


def plural(count: int, noun: str) -> str:
    """`plural(2, "layer")` is "2 layers"."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


def draw_runs(axis: "Axes", rows: pd.DataFrame, x: str, style: Style, label: str) -> None:
    """Mean over seeds as a line, least to largest as a band, and each diverged setting as a cross at the top."""
    marker, line, colour = style
    groups = rows.groupby(x).held_out_error.agg(["mean", "min", "max"]).reset_index()
    known = groups.dropna()
    axis.fill_between(known[x], known["min"], known["max"], color=colour, alpha=0.15, linewidth=0)
    axis.plot(known[x], known["mean"], line, marker=marker, color=colour, label=label, markersize=5)
    lost = groups[groups["mean"].isna()]
    if len(lost):
        axis.plot(lost[x], np.full(len(lost), 2.0), "x", color=colour, label=f"{label}: diverged")


def draw_by_rank(axis: "Axes", ours: pd.DataFrame, theirs: pd.DataFrame, style: Style, label: str) -> list[float]:
    """Our runs and the published curve against rank / dimension; returns the places on the x-axis."""
    shares, published = ours["rank"] / ours["dim"], theirs["rank"] / 64
    marker, line, colour = style
    if len(ours):
        draw_runs(axis, ours.assign(share=shares), "share", style, label)
    if len(theirs):
        hollow: dict[str, Any] = {"marker": marker, "markerfacecolor": "white", "markersize": 6}
        axis.plot(published, theirs.value, line, color=colour, linewidth=0.7, alpha=0.8, **hollow)
    return [*shares, *published]


def rank_axis(axis: "Axes", shares: list[float]) -> None:
    places = sorted(set(shares))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(places, [f"1/{round(1 / share)}" if share < 1 else str(round(share)) for share in places])
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.set_xlabel("rank of a head / dimension")
    axis.grid(True, which="major", color="0.92")


def finish(figure: "Figure", axes: np.ndarray, title: str, note: str) -> "Figure":
    for row in axes:
        row[0].set_ylabel(ERROR_LABEL)
    axes[0, 0].legend(fontsize=8, loc="lower left")
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(note, fontsize=8, color="0.3")
    return figure


def setting_of(table: pd.DataFrame) -> str:
    first = table.iloc[0]
    steps = sorted({int(count) for count in table.steps.dropna()})
    many = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
    size = f"d {int(first['dim'])}, batches of {int(first.batch_size)}, {many} steps"
    return f"{size}, {table.seed.nunique()} seed(s) of weights and data"
