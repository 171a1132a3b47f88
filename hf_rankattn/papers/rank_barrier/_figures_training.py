"""Figures of rank and accuracy in training, and of quality after cutting the rank of a checkpoint."""

from typing import TYPE_CHECKING

import pandas as pd

from ...report.plots import literal, new_figure
from ._figures import beside, level, style, width_axis


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
                axis.fill_between(
                    groups.index, groups["min"], groups["max"], color=look["color"], alpha=0.15, linewidth=0
                )
                if measure != "accuracy":
                    before = fresh[fresh.form == form].groupby("qk_rank")[measure].mean() / n
                    axis.plot(
                        before.index,
                        before,
                        ":",
                        color=look["color"],
                        linewidth=0.9,
                        marker=".",
                        label=f"{label}, fresh",
                    )
            if measure != "accuracy":
                level(axis, 0.632, "0.63 n: free hard choice", 0.99)
            width_axis(axis, rows.qk_rank, "qk_rank")
            axis.set_ylim(0, 1.05 if measure == "accuracy" else 0.75)
            axis.set_ylabel(name)
            axis.set_title(data, fontsize=10)
        beside(line[-1])
    seeds = table.seed.nunique()
    shapes = "; ".join(
        f"{'rank BERT' if task == 'token_retrieval' else 'rank encoder'} on {'token retrieval' if task == 'token_retrieval' else 'images'}: "
        f"{int(first.layers)} layer(s) of {int(first.heads)} head(s), width {int(first.hidden)}, {int(first.steps)} steps"
        for task, first in ((task, rows.iloc[0]) for task, rows in table.groupby("task", sort=False))
    )
    figure.suptitle("Does accuracy stop growing where map rank does?", fontsize=12)
    figure.supxlabel(
        f"lines: mean of {seeds} seed(s), bands: least to largest. {shapes}",
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


def convert_figure(table: pd.DataFrame) -> "Figure":
    """Quality against rank, a line a way; and how many directions weights and logits use, head by head."""
    curves, energy = table[table.what == "curve"], table[table.what == "energy"]
    width = int(table["width"].iloc[0])
    figure, axes = new_figure(1, 2 if len(energy) else 1, 12.0 if len(energy) else 6.5, 4.8)
    left = axes[0, 0]
    for place, (way, rows) in enumerate(curves.groupby("way", sort=False)):
        points = rows.groupby("rank").embedding_cosine.mean()
        left.plot(points.index, points, **style((6, 1, 8)[place]), label=way)
    left.axvline(width, color="0.35", linewidth=0.9, linestyle=(0, (5, 3)), label="rank of the original")
    left.set_xticks(sorted({int(rank) for rank in curves["rank"]}))
    left.set_xlabel("query-key rank of a head")
    left.set_ylabel("cosine to the original's mean-pooled embedding")
    left.grid(True, color="0.92")
    left.legend(fontsize=8, loc="lower right", bbox_to_anchor=(0.95, 0.0))
    if len(energy):
        right = axes[0, 1]
        for place, (of, rows) in enumerate(energy.groupby("of")):
            share = rows.energy_rank.sort_values().to_numpy()
            heads = [100 * (number + 1) / len(share) for number in range(len(share))]
            name = "row-centred logits on text" if of == "logits" else "weights W_Q W_K^T"
            right.plot(share, heads, **style((0, 6)[place]) | {"markersize": 3}, label=name)
        right.set_xlim(0, width)
        right.set_xlabel(f"directions for 90 % of the energy (of {width})")
        right.set_ylabel("heads that need no more (%)")
        right.grid(True, color="0.92")
        right.legend(fontsize=8, loc="upper left")
    source = str(table.checkpoint.iloc[0])
    name = "a small BERT of random weights, logits sharp" if source == "own" else source.rstrip("/").split("/")[-1]
    figure.suptitle(f"How far can the query-key rank be cut? {literal(name)}", fontsize=12)
    return figure
