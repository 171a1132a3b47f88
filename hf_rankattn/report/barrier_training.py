"""Figures of rank and accuracy in training, and of quality after cutting the rank of a checkpoint."""

from typing import TYPE_CHECKING

import pandas as pd

from .barrier import beside, level, style, width_axis
from .plots import new_figure


if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = {"original": (0, None, "original"), "qk_norm": (6, "white", "qk_norm")}
MEASURES = {
    "accuracy": "accuracy, held out",
    "argmax_coverage": "argmax coverage / n",
    "effective_rank": "effective rank / n",
}


def learning_figure(table: pd.DataFrame) -> "Figure":
    """A row of panels for each dataset: accuracy, and two measures of map rank, against width, trained and fresh."""
    datasets = list(dict.fromkeys(table.data))
    figure, axes = new_figure(len(datasets), 3, 14.0, 3.1 * len(datasets) + 1.0)
    for line, data in zip(axes, datasets, strict=True):
        rows = table[table.data == data]
        end, fresh = rows[rows.what == "end"], rows[(rows.what == "trace") & (rows.step == 0)]
        n = int(rows.tokens.iloc[0])
        for axis, (measure, name) in zip(line, MEASURES.items(), strict=True):
            scale = 1 if measure == "accuracy" else n
            for form, (place, face, label) in FORMS.items():
                groups = end[end.form == form].groupby("qk_rank")[measure].agg(["mean", "min", "max"]) / scale
                look = style(place)
                axis.plot(groups.index, groups["mean"], **look, markerfacecolor=face, label=f"{label}, trained")
                axis.fill_between(groups.index, groups["min"], groups["max"], color=look["color"], alpha=0.15, linewidth=0)
                if measure != "accuracy":
                    before = fresh[fresh.form == form].groupby("qk_rank")[measure].mean() / n
                    axis.plot(
                        before.index, before, ":", color=look["color"], linewidth=0.9, marker=".", label=f"{label}, fresh"
                    )
            if measure != "accuracy":
                level(axis, 0.632, "0.63 n: free hard choice", 0.99)
            width_axis(axis, rows.qk_rank, "qk_rank")
            axis.set_ylim(0, 1.05 if measure == "accuracy" else 0.75)
            axis.set_ylabel(name)
            axis.set_title(data, fontsize=10)
        beside(line[-1])
    first = table.iloc[0]
    seeds = table.seed.nunique()
    figure.suptitle("Does accuracy stop growing where map rank does?", fontsize=12)
    figure.supxlabel(
        f"one layer, one head; lines: mean of {seeds} seed(s), bands: least to largest; token retrieval: rank BERT of width "
        f"{int(first.hidden)}, {int(first.steps)} steps",
        fontsize=8, color="0.3",
    )  # fmt: skip
    return figure


def trace_figure(table: pd.DataFrame) -> "Figure":
    """Effective rank, argmax coverage and sharpness along training, a line for each width."""
    datasets = list(dict.fromkeys(table.data))
    chosen = [datasets[len(datasets) // 2 - 1 if len(datasets) > 2 else 0], datasets[-1]]
    rows = table[table.what == "trace"]
    measures = (("effective_rank", "effective rank / n"), ("argmax_coverage", "argmax coverage / n"), ("logit_std", "deviation of the logits"))  # fmt: skip
    lines = [(data, form) for data in dict.fromkeys(chosen) for form in FORMS]
    figure, axes = new_figure(len(lines), 3, 13.5, 2.7 * len(lines) + 0.8)
    for line, (data, form) in zip(axes, lines, strict=True):
        part = rows[(rows.data == data) & (rows.form == form)]
        n = int(part.tokens.iloc[0])
        for axis, (measure, name) in zip(line, measures, strict=True):
            for place, (rank, curve) in enumerate(part.groupby("qk_rank")):
                values = curve.groupby("step")[measure].mean() / (1 if measure == "logit_std" else n)
                axis.plot(values.index, values, **style(place), label=f"qk_rank {rank}")
            if measure == "logit_std":
                axis.set_yscale("log")
            else:
                axis.set_ylim(0, 0.75)
                level(axis, 0.632, "0.63 n", 0.01)
            axis.set_xlabel("training steps")
            axis.set_ylabel(name)
            axis.set_title(f"{data}, {FORMS[form][2]}", fontsize=9)
            axis.grid(True, color="0.92")
        beside(line[-1])
    figure.suptitle("What training does to attention maps", fontsize=12)
    return figure
