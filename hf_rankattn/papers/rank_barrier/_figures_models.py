"""Figures of the rank of attention maps in models: latent attention, fresh weights of every family, training, conversion."""

from typing import TYPE_CHECKING

import pandas as pd

from ...report.plots import new_figure, published_table
from ._figures import style, width_axis


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SWEPT = {"kv": "kv_lora_rank", "q": "q_lora_rank", "nope": "qk_nope_head_dim"}


def mla_figure(table: pd.DataFrame) -> "Figure":
    """Logit rank against the rule, and map rank against each of the three widths."""
    figure, axes = new_figure(2, 2, 12.5, 9.0)
    draw_rule(axes[0, 0], table)
    rows = table[table.kind == "sweep"]
    n = int(rows.n.iloc[0])
    curves = (
        ("argmax_coverage_none_1", "hard, no mask", 0),
        ("argmax_coverage_causal_1", "hard, causal", 5),
        ("effective_rank_none_3", "softmax s = 3, effective rank, no mask", 1),
        ("effective_rank_causal_3", "softmax s = 3, effective rank, causal", 6),
        ("effective_rank_none_1", "softmax s = 1, effective rank, no mask", 4),
        ("rank_0.01_none_1", "softmax s = 1, rank at tolerance 0.01, no mask", 7),
    )
    for axis, (swept, name) in zip(axes.flat[1:], SWEPT.items(), strict=True):
        part = rows[rows.swept == swept]
        for column, label, place in curves:
            values = part.groupby(swept)[column].mean() / n
            axis.plot(values.index, values, **style(place), label=label)
        axis.axhline(0.632, color="0.35", linewidth=0.9, linestyle=(0, (5, 3)), label="0.63 n: free hard choice")
        axis.axhline(0.5, color="0.35", linewidth=0.9, linestyle=(0, (1, 1)), label="0.50 n: causal hard choice")
        width_axis(axis, part[swept], name)
        others = ", ".join(f"{SWEPT[key]} {int(part[key].iloc[0])}" for key in SWEPT if key != swept)
        axis.set_title(f"{others}, qk_rope_head_dim {int(part.rope.iloc[0])}, n {n}", fontsize=9)
        axis.set_ylim(0, 1.05)
        axis.set_ylabel("rank / n, mean head")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(
        "Latent attention of DeepSeek-V3, random weights (s: standard deviation of the logits)", fontsize=12
    )
    return figure


def draw_rule(axis: "Axes", table: pd.DataFrame) -> None:
    top = max(table.form_rule.max(), table.head_rule.max(), table.keys_rule.max()) * 1.3
    axis.plot([1, top], [1, top], color="0.5", linewidth=0.9, label="rule = measured")
    for place, (rule, column, name) in enumerate(
        (
            ("form_rule", "form_rank", "form of a head (one distance)"),
            ("head_rule", "logit_rank", "logits of a head (with rotary positions)"),
            ("keys_rule", "key_rank", "keys of all heads"),
        )
    ):
        axis.plot(
            table[rule], table[column], "os^"[place], color=style((0, 5, 6)[place])["color"], markersize=11 - 3 * place,
            markerfacecolor="none" if place < 2 else None, label=name,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("rank by the rule")
    axis.set_ylabel("rank measured (float64, tolerance 1e-9)")
    axis.set_title(f"{len(table)} random models", fontsize=10)
    axis.grid(True, color="0.92")
    axis.legend(fontsize=7, loc="upper left")


def families_figure(table: pd.DataFrame) -> "Figure":
    """A line for each model, first and last layer, three measures as shares of n, with what a content-free map has."""
    names = list(dict.fromkeys(table["name"]))
    panels = (
        ("effective_rank", "effective rank / n"),
        ("numerical_rank", "rank at tolerance 0.01 / n"),
        ("argmax_coverage", "argmax coverage / n"),
    )
    figure, axes = new_figure(1, 4, 15.0, 0.3 * len(names) + 2.2, sharey=True)
    places = {name: len(names) - place for place, name in enumerate(names)}
    earlier = published_table("random_init_maps").set_index("model")
    for axis, (column, label) in zip(axes[0], (*panels, ("stable_rank", "stable rank")), strict=True):
        for layer, marker, face in (("first", "o", "#1b4f72"), ("last", "s", "white")):
            rows = table.groupby("name", sort=False).apply(
                lambda part, layer=layer: part[part.layer == (0 if layer == "first" else part.layer.max())].mean(
                    numeric_only=True
                ),
                include_groups=False,
            )
            share = rows[column] / (1 if column == "stable_rank" else rows.tokens)
            axis.plot(
                share, [places[name] for name in rows.index], marker, color="#1b4f72", markerfacecolor=face, markersize=6,
                label=f"{layer} layer",
            )  # fmt: skip
            if layer == "first":
                free = rows[f"free_{column}"] / (1 if column == "stable_rank" else rows.tokens)
                axis.plot(
                    free, [places[name] for name in rows.index], "|", color="0.4", markersize=12, markeredgewidth=1.5,
                    label="content-free map",
                )  # fmt: skip
        known = [name for name in names if name in earlier.index]
        if known and table.tokens.max() > 100:
            values = earlier.loc[known, column] / (1 if column == "stable_rank" else earlier.loc[known, "n"])
            axis.plot(
                values, [places[name] for name in known], "x", color="#922b21", markersize=7,
                label="earlier measurement, first layer",
            )  # fmt: skip
        if column == "stable_rank":
            axis.set_xscale("log")
            axis.set_xticks([1, 2, 5, 10], ["1", "2", "5", "10"])
            axis.tick_params(axis="x", which="minor", labelbottom=False)
        else:
            axis.set_xlim(-0.02, 1.02)
            axis.axvline(0.632, color="0.35", linewidth=0.9, linestyle=(0, (5, 3)), label="0.63 n: free hard choice")
            axis.axvline(0.5, color="0.35", linewidth=0.9, linestyle=":", label="0.50 n: causal hard choice")
        axis.set_xlabel(label)
        axis.grid(True, color="0.92")
    axes[0, 0].set_yticks(list(places.values()), list(places), fontsize=8)
    axes[0, 0].set_ylim(0.3, len(names) + 0.7)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    first = table[table.family != "given"].iloc[0]
    figure.suptitle(
        f"Attention maps of fresh models: width {int(first.hidden)}, {int(first.heads)} heads, {int(first.layers)} layer(s), "
        f"{int(first.n)} random tokens (float32 maps)",
        fontsize=12,
    )
    return figure
