"""Figures of the rank of attention maps in models: latent attention, fresh weights of every family, training, conversion."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .barrier import beside, level, style, width_axis
from .plots import new_figure, published_table


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
        level(axis, 0.632, "0.63 n")
        level(axis, 0.5, "0.50 n: causal")
        width_axis(axis, part[swept], name)
        others = ", ".join(f"{SWEPT[key]} {int(part[key].iloc[0])}" for key in SWEPT if key != swept)
        axis.set_title(f"{others}, qk_rope_head_dim {int(part.rope.iloc[0])}, n {n}", fontsize=9)
        axis.set_ylim(0, 1.05)
        axis.set_ylabel("rank / n, mean head")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("Latent attention of DeepSeek-V3, random weights (s: standard deviation of the logits)", fontsize=12)
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
