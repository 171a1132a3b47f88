"""Figures of the error against the rank of heads.

Filled markers are ours. Hollow markers on thin lines were read from the published figures, which have d = 64 and 1e5 or 2e5
steps. The x-axis is the rank as a share of the dimension, so that runs of different dimensions share one axis.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...report.plots import STYLES, new_figure
from ..drawing import Style, band, level, log_ticks, plural


FORM_TITLES = {"original": "original form", "qk_norm": "qk_norm: unit queries and keys, learned temperature"}
NOTE = "lines: mean over seeds; bands: least to largest; hollow: published, best seed's train error, d 64, 1e5 or 2e5 steps"
ERROR_LABEL = "squared error per point, held out"
HOLLOW: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.8, "markerfacecolor": "white", "markersize": 6}


def draw_runs(axis: Axes, rows: pd.DataFrame, x: str, style: Style, label: str) -> None:
    """Mean and range over seeds, and a cross at the top for each setting without a finished run."""
    errors = rows.groupby(x).held_out_error
    band(axis, errors, style, label)
    lost = errors.count()[lambda count: count == 0].index
    if len(lost):
        axis.plot(lost, np.full(len(lost), 2.0), "x", color=style[2], label=f"{label}: diverged")


def rank_figure(
    table: pd.DataFrame, published: pd.DataFrame, line: str, label: str, title: str, note: str = ""
) -> Figure:
    """Our runs and the published values: a panel for each form and depth, a line for each value of the column `line`."""
    forms, depths = list(dict.fromkeys(table.form)), sorted(table.layers.unique())
    shape = (len(forms), len(depths)) if len(depths) > 1 else (1, len(forms))
    figure, axes = new_figure(*shape, max(7.0, 4.6 * shape[1] + 1), 3.8 * shape[0] + 1, sharey=True)
    panels = [(form, layers) for form in forms for layers in depths]
    table, published = table.assign(share=table["rank"] / table["dim"]), published.assign(share=published["rank"] / 64)
    for axis, (form, layers) in zip(axes.flat, panels, strict=True):
        rows = table[(table.form == form) & (table.layers == layers)]
        read = published[published.layers == layers]
        for value, style in zip(dict.fromkeys([*table[line], *read[line]]), STYLES, strict=False):
            ours, theirs = rows[rows[line] == value], read[read[line] == value]
            if len(ours):
                draw_runs(axis, ours, "share", style, label.format(value))
            name = None if len(ours) else f"{label.format(value)}, published"
            axis.plot(theirs.share, theirs.value, style[1], marker=style[0], color=style[2], label=name, **HOLLOW)
        level(axis, rows.baseline_zero.mean(), "zero", 0.99)
        level(axis, rows.baseline_own_token_and_mean_pool.mean(), "own token + mean", 0.99)
        shares = sorted({*rows.share, *read.share})
        log_ticks(axis, shares, [f"1/{round(1 / share)}" if share < 1 else f"{share:.0f}" for share in shares])
        axis.set(yscale="log", xlabel="rank of a head / dimension")
        axis.set_title(f"{plural(layers, 'layer')}: {FORM_TITLES[form]}")
    for row in axes:
        row[0].set_ylabel(ERROR_LABEL)
    axes[0, 0].legend(loc="lower left")
    figure.suptitle(f"{title}\n({setting_of(table)})")
    figure.supxlabel(NOTE + ("; the same published values for all forms" if len(forms) > 1 else "") + note)
    return figure


def setting_of(table: pd.DataFrame) -> str:
    first, steps = table.iloc[0], sorted({int(count) for count in table.steps.dropna()})
    many = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
    size = f"d {int(first['dim'])}, batches of {int(first.batch_size)}, {many} steps"
    return f"{size}, {table.seed.nunique()} seed(s) of weights and data"
