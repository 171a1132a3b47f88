"""Figures of the experiments on the rank of attention maps: tables to curves, with laws and published values drawn in.

Markers are measured, thin lines without markers are laws, dashed grey levels are what was published or is known exactly.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...report.plots import new_figure, published_table


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK = ("#08306b", "#2171b5", "#4a90c4", "#6baed6", "#238b45", "#b9770e", "#922b21", "#6c3483", "#000000")
MARKERS = "osD^vP*Xh"
LINES = ("-", "--", "-.", ":")


def style(place: int) -> dict:
    return {
        "color": DARK[place % len(DARK)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[place % len(LINES)],
        "markersize": 4.5,
        "linewidth": 1.3,
    }


def level(axis: "Axes", height: float, text: str, place: float = 0.01, above: bool = True) -> None:
    axis.axhline(height, color="0.35", linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
    axis.annotate(
        text, (place, height), xycoords=("axes fraction", "data"), fontsize=7, color="0.25",
        va="bottom" if above else "top", ha="left" if place < 0.5 else "right",
    )  # fmt: skip


def width_axis(axis: "Axes", widths, label: str = "query-key width of a head") -> None:
    widths = sorted({int(width) for width in widths})
    if len(widths) > 10:
        widths = [width for width in widths if width & (width - 1) == 0]
    axis.set_xscale("log", base=2)
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.set_xlabel(label)
    axis.grid(True, color="0.92")


def beside(axis: "Axes", **options) -> None:
    """The legend to the right of a panel: over curves that fill it, there is no free corner."""
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, **options)


def ceiling_figure(table: pd.DataFrame) -> "Figure":
    """Hard maps by n and by mask, the published set-up, and softmax by sharpness."""
    figure, axes = new_figure(2, 2, 16.0, 9.0)
    draw_hard(axes[0, 0], table[(table.kind == "hard") & (table["mask"] == "none")])
    draw_masks(axes[0, 1], table[(table.kind == "hard")])
    draw_paper(axes[1, 0], table[table.kind == "paper"])
    draw_sharpness(axes[1, 1], table[table.kind == "sharpness"])
    figure.suptitle("Rank of random attention maps: a ceiling of hard choice", fontsize=12)
    figure.supxlabel(
        "Soft maps and their singular values are float64; a singular value counts above tolerance times the largest. "
        "float32 and float64 tolerance: n times the rounding of that type, the default of torch and numpy.",
        fontsize=8, color="0.3",
    )  # fmt: skip
    return figure


def draw_hard(axis: "Axes", rows: pd.DataFrame) -> None:
    sizes = sorted(rows.n.unique())
    shown = sizes if len(sizes) < 5 else sizes[::2]
    for place, n in enumerate(shown):
        for keys, face in (("gaussian", None), ("unit", "white")):
            points = rows[(rows.n == n) & (rows["keys"] == keys)].groupby("width")[["coverage", "law"]].mean()
            look = style(place) | {"linestyle": "none"}
            label = f"n = {n}" if keys == "gaussian" else None
            axis.plot(points.index, points.coverage, **look, markerfacecolor=face, label=label)
            if keys == "gaussian":
                axis.plot(points.index, points.law, color=look["color"], linewidth=0.8)
    unit = rows[(rows["keys"] == "unit") & (rows.n == sizes[-1])].groupby("width").law.mean()
    axis.plot(unit.index, unit, color="0.3", linewidth=0.8, linestyle=":")
    axis.plot([], [], "o", color="0.3", markerfacecolor="white", label="hollow: unit keys (QK-norm)")
    axis.plot([], [], color="0.3", linewidth=0.8, label="lines: mean-field law")
    level(axis, 1 - 1 / math.e, "published ceiling 0.63 n = 1 - 1/e", 0.01)
    width_axis(axis, rows[rows["keys"] == "gaussian"]["width"])
    axis.set_ylim(0, 0.75)
    axis.set_ylabel("columns chosen / n = rank / n")
    axis.set_title("Hard attention, no mask", fontsize=10)
    beside(axis)


def draw_masks(axis: "Axes", rows: pd.DataFrame) -> None:
    n = rows[rows["mask"] == "causal"].n.max()
    rows = rows[rows.n == n]
    for place, ((mask, window), part) in enumerate(rows.groupby(["mask", "window"])):
        name = {"none": "no mask", "causal": "causal"}.get(mask, f"last {int(window)} tokens")
        look = style((0, 5, 6, 7)[place % 4])
        for keys, face in (("gaussian", None), ("unit", "white")):
            points = part[part["keys"] == keys].groupby("width").coverage.mean()
            label = name if keys == "gaussian" else None
            axis.plot(points.index, points, **look | {"linewidth": 0.8}, markerfacecolor=face, label=label)
        axis.axhline(
            part.ceiling.iloc[0], color=look["color"], linewidth=0.8, linestyle=(0, (5, 3)),
            label=f"{name}: ceiling {part.ceiling.iloc[0]:.3f}",
        )  # fmt: skip
    width_axis(axis, rows[rows["keys"] == "gaussian"]["width"])
    axis.set_ylim(0, 0.75)
    axis.set_ylabel("columns chosen / n = rank / n")
    axis.set_title(f"Hard attention with masks, n = {int(n)} (dashed: exact ceilings; hollow: unit keys)", fontsize=10)
    beside(axis)


def draw_paper(axis: "Axes", rows: pd.DataFrame) -> None:
    n = int(rows.n.iloc[0])
    means = rows.groupby(["inputs", "temperature", "width"]).mean(numeric_only=True)
    curves = (
        ("gaussian", 1.0, "rank_float32", "X ~ N(0,1): softmax, float32 tolerance", 0),
        ("gaussian", 1.0, "rank_0.01", "X ~ N(0,1): softmax, tolerance 0.01", 1),
        ("gaussian", 1.0, "argmax_coverage", "X ~ N(0,1): hardmax", 2),
        ("orthonormal", 1.0, "rank_float32", "orthonormal X: softmax, float32 tolerance", 5),
        ("orthonormal", 1.0, "rank_0.01", "orthonormal X: softmax, tolerance 0.01", 4),
        ("orthonormal", 0.01, "rank_float32", "orthonormal X, temperature / 100", 6),
        ("orthonormal", 1.0, "argmax_coverage", "orthonormal X: hardmax", 7),
    )
    for inputs, temperature, column, label, place in curves:
        values = means.loc[inputs, temperature][column] / n
        axis.plot(values.index, values, **style(place), label=label)
    logits = means.loc["gaussian", 1.0].logit_rank / n
    axis.plot(logits.index, logits, color="0.55", linewidth=1, label="scores without softmax")
    level(axis, 0.63, "published: 0.63 n", 0.01)
    width_axis(axis, means.index.get_level_values("width"))
    axis.set_ylim(0, 1.05)
    axis.set_ylabel("numerical rank / n")
    axis.set_title(
        f"n = {n}, model width {int(rows.model_width.iloc[0])}, W ~ N(0,1), logits / sqrt(width)", fontsize=10
    )
    beside(axis)


def draw_sharpness(axis: "Axes", rows: pd.DataFrame) -> None:
    n = int(rows.n.max())
    free = rows[(rows.n == n) & (rows["mask"] == "none")].groupby("sharpness").mean(numeric_only=True)
    for place, column in enumerate(name for name in free.columns if name.startswith("rank_")):
        label = f"rank, {column.removeprefix('rank_')} tolerance"
        axis.plot(free.index, free[column] / n, **style(place), label=label)
    axis.plot(free.index, free.effective_rank / n, **style(6), label="effective rank")
    causal = rows[(rows.n == n) & (rows["mask"] == "causal")].groupby("sharpness").mean(numeric_only=True)
    axis.plot(causal.index, causal.effective_rank / n, **style(7), label="effective rank, causal")
    freezing = math.sqrt(2 * math.log(n))
    axis.axvline(freezing, color="0.35", linewidth=0.9, linestyle=":")
    axis.annotate(
        "freezing,\nsqrt(2 ln n)",
        (freezing, 0.02),
        fontsize=7,
        color="0.25",
        xytext=(3, 0),
        textcoords="offset points",
    )
    axis.axhline(1 - 1 / math.e, color="0.35", linewidth=0.9, linestyle=(0, (5, 3)), label="0.63 n: hard (published)")
    axis.axhline(0.5, color="0.35", linewidth=0.9, linestyle=(0, (1, 1)), label="0.50 n: hard, causal")
    axis.set_xscale("log")
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("standard deviation of the logits (1 is the usual initialisation at its most)")
    axis.set_ylabel("rank / n")
    axis.set_title(f"Softmax of independent logits, n = {n}", fontsize=10)
    axis.grid(True, color="0.92")
    beside(axis)


def soft_figure(table: pd.DataFrame) -> "Figure":
    """Soft maps of random heads: three measures against width, by n; then the two laws of very soft maps."""
    rows = table[(table.kind == "width") & (table["mask"] == "none")]
    values = sorted(rows.sharpness.unique())
    figure, axes = new_figure(2, 3, 14.5, 8.5)
    sizes = sorted(rows.n.unique())
    for axis, (column, name) in zip(
        axes.flat,
        (
            ("rank_float32", "rank, float32 tolerance"),
            ("rank_0.01", "rank, tolerance 0.01"),
            ("effective_rank", "effective rank"),
        ),
        strict=False,
    ):
        for place, n in enumerate(sizes):
            for keys, face in (("gaussian", None), ("unit", "white")):
                points = rows[(rows.n == n) & (rows["keys"] == keys) & (rows.sharpness == values[0])]
                points = points.groupby("width")[column].mean() / n
                label = f"n = {int(n)}" if keys == "gaussian" else None
                axis.plot(points.index, points, **style(place), markerfacecolor=face, label=label)
        axis.plot([], [], "o", color="0.3", markerfacecolor="white", label="hollow: QK-norm")
        level(axis, 0.63, "0.63 n", 0.01)
        width_axis(axis, rows["width"])
        axis.set_ylim(0, 1.05)
        axis.set_ylabel(f"{name} / n")
        axis.set_title(f"softmax, logits of deviation {values[0]:g}", fontsize=10)
    axes[0, 2].legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, 0.93))
    draw_causal(axes[1, 0], table[(table.kind == "width") & (table["mask"] == "causal")])
    draw_degrees(axes[1, 1], table[table.kind == "soft"])
    draw_stable(axes[1, 2], table[(table.kind == "sharpness") & (table["mask"] == "none")])
    figure.suptitle("Soft maps: rank is a matter of tolerance", fontsize=12)
    return figure


def draw_causal(axis: "Axes", rows: pd.DataFrame) -> None:
    from ...report.plots import content_free_share

    n = int(rows.n.max())
    for place, (sharpness, keys) in enumerate(rows.groupby(["sharpness", "keys"]).groups):
        points = rows[(rows.n == n) & (rows.sharpness == sharpness) & (rows["keys"] == keys)]
        points = points.groupby("width").effective_rank.mean() / n
        name = "QK-norm" if keys == "unit" else "Gaussian keys"
        face = "white" if keys == "unit" else None
        axis.plot(points.index, points, **style(place), markerfacecolor=face, label=f"deviation {sharpness:g}, {name}")
    free = content_free_share("effective_rank", n, True)
    level(axis, free, f"causal and content-free, 1/i: {free:.3f}", 0.99)
    width_axis(axis, rows["width"])
    axis.set_ylim(0, 0.75)
    axis.set_ylabel("effective rank / n")
    axis.set_title(f"causal softmax, n = {n}", fontsize=10)
    axis.legend(fontsize=7, loc="upper left")


def draw_degrees(axis: "Axes", rows: pd.DataFrame) -> None:
    n = int(rows.n.iloc[0])
    points = rows.groupby("width").mean(numeric_only=True)
    widths = [int(width) for width in points.index]
    axis.plot(widths, points.rank_float64, **style(0), label="float64 tolerance")
    axis.plot(widths, points.rank_float32, **style(1), label="float32 tolerance")
    for degree, line in ((7, "-"), (2, ":")):
        law = [math.comb(width + degree, degree) for width in widths]
        axis.plot(widths, law, line, color="0.4", linewidth=0.9, label=f"C(width + {degree}, {degree})")
    axis.axhline(n, color="0.35", linewidth=0.9, linestyle=(0, (5, 3)))
    axis.annotate(f"n = {n}", (widths[0], n), fontsize=7, va="bottom")
    axis.set_yscale("log")
    axis.set_xticks(widths)
    axis.set_xlabel("query-key width of a head")
    axis.set_ylabel("numerical rank")
    axis.set_title(f"very soft: deviation {rows.sharpness.iloc[0]:g}, a polynomial's rank", fontsize=10)
    axis.grid(True, color="0.92")
    axis.legend(fontsize=7, loc="lower right")


def draw_stable(axis: "Axes", rows: pd.DataFrame) -> None:
    n = int(rows.n.max())
    points = rows[rows.n == n].groupby("sharpness").mean(numeric_only=True)
    axis.plot(points.index, points.stable_rank, **style(0), label="stable rank")
    fine = np.geomspace(points.index.min(), math.sqrt(math.log(n)), 100)
    axis.plot(fine, np.exp(fine**2), color="0.4", linewidth=0.9, label="e^(s^2), for s^2 < ln n")
    axis.plot(points.index, points.second_singular, **style(6), label="second singular value")
    axis.plot(fine, 2 * np.sqrt(np.expm1(fine**2) / n), ":", color="0.4", label="2 sqrt((e^(s^2) - 1)/n)")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(points.second_singular.min() / 2, n)
    axis.set_xlabel("standard deviation s of the logits")
    axis.set_ylabel("stable rank; singular value")
    axis.set_title(f"softmax of independent logits, n = {n}", fontsize=10)
    axis.grid(True, color="0.92")
    axis.legend(fontsize=7, loc="lower right")


def saturation_figure(table: pd.DataFrame) -> "Figure":
    """Widths against n with both laws; the same divided by them; and the curves they are read from."""
    widths = table[(table.what == "width") & table["width"].notna()]
    hard = widths[(widths.kind == "hard")]
    soft = widths[widths.kind == "soft"]
    figure, axes = new_figure(2, 2, 12.5, 9.0)
    draw_widths(axes[0, 0], hard)
    draw_ratios(axes[0, 1], hard[hard["keys"] == "gaussian"])
    draw_curves(axes[1, 0], table[(table.what == "curve") & (table.kind == "hard")])
    draw_soft_widths(axes[1, 1], soft)
    figure.suptitle("From which head width on does more width add no rank?", fontsize=12)
    return figure


def size_axis(axis: "Axes", sizes) -> None:
    sizes = sorted({int(n) for n in sizes})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.set_xlabel("tokens n")
    axis.grid(True, color="0.92")


def draw_widths(axis: "Axes", hard: pd.DataFrame) -> None:
    earlier = published_table("saturation").set_index("n")
    for place, (reached, column) in enumerate(((0.5, "d50"), (0.75, "d75"), (0.9, "d90"))):
        rows = hard[(hard.reached == reached) & (hard["keys"] == "gaussian")].groupby("n").mean(numeric_only=True)
        look = style((0, 5, 6)[place])
        axis.plot(
            rows.index,
            rows["width"],
            **look | {"linestyle": "none"},
            label=f"{reached:.0%} of the ceiling, Gaussian keys",
        )
        axis.plot(
            earlier.index, earlier[column], look["marker"], color=look["color"], markerfacecolor="none", markersize=9,
            linestyle="none",
        )  # fmt: skip
        if len(rows):
            square, log = rows["width"].iloc[-1] / rows.half_m4.iloc[-1], rows["width"].iloc[-1] / rows.log_n.iloc[-1]
            axis.plot(rows.index, square * rows.half_m4, "-", color=look["color"], linewidth=0.9)
            axis.plot(rows.index, log * rows.log_n, ":", color=look["color"], linewidth=0.9)
    unit = hard[(hard.reached == 0.9) & (hard["keys"] == "unit")].groupby("n")["width"].mean()
    axis.plot(
        unit.index, unit, **style(8) | {"linestyle": "--"}, markerfacecolor="white", label="90 %, unit keys (QK-norm)"
    )
    axis.plot([], [], "o", color="0.3", markerfacecolor="none", markersize=9, label="hollow: earlier simulation")
    axis.plot([], [], "-", color="0.3", linewidth=0.9, label="m^4/2 ~ 2 (ln n)^2, through the last point")
    axis.plot([], [], ":", color="0.3", linewidth=0.9, label="ln n (published), through the last point")
    size_axis(axis, hard.n)
    axis.set_yscale("log")
    axis.set_ylabel("query-key width of a head")
    axis.set_ylim(bottom=1.5, top=900)
    axis.set_title("Hard attention", fontsize=10)
    axis.legend(fontsize=7, loc="upper left", ncols=2)


def draw_ratios(axis: "Axes", hard: pd.DataFrame) -> None:
    for place, reached in enumerate((0.5, 0.75, 0.9)):
        rows = hard[hard.reached == reached].groupby("n").mean(numeric_only=True)
        if not len(rows):
            continue
        for law, line, face in (("half_m4", "-", None), ("log_n", ":", "white")):
            ratio = rows["width"] / rows[law]
            look = style((0, 5, 6)[place]) | {"linestyle": line}
            axis.plot(
                ratio.index, ratio / ratio.iloc[-1], **look, markerfacecolor=face,
                label=f"{reached:.0%}: width / {'(m^4/2)' if law == 'half_m4' else 'ln n'}",
            )  # fmt: skip
    size_axis(axis, hard.n)
    axis.axhline(1, color="0.35", linewidth=0.9, linestyle=(0, (5, 3)))
    axis.set_ylim(0, 1.5)
    axis.set_ylabel("width over the law, relative to the largest n")
    axis.set_title("Which law is flat?", fontsize=10)
    axis.legend(fontsize=7, loc="lower right", ncols=2)


def draw_curves(axis: "Axes", rows: pd.DataFrame) -> None:
    sizes = sorted(rows.n.unique())
    for place, n in enumerate(sizes if len(sizes) < 5 else sizes[1::2]):
        for keys, face in (("gaussian", None), ("unit", "white")):
            points = rows[(rows.n == n) & (rows["keys"] == keys)].groupby("width")[["value", "ceiling"]].mean()
            label = f"n = {int(n)}" if keys == "gaussian" else None
            axis.plot(points.index, points.value / points.ceiling, **style(place), markerfacecolor=face, label=label)
    for height in (0.5, 0.75, 0.9):
        level(axis, height, f"{height:.0%}", 0.99)
    width_axis(axis, rows["width"])
    axis.set_ylim(0, 1.08)
    axis.set_ylabel("columns chosen / ceiling n(1 - (1 - 1/n)^n)")
    axis.set_title("Hard attention (hollow: unit keys)", fontsize=10)
    axis.legend(fontsize=7, loc="lower right", bbox_to_anchor=(0.95, 0.0))


def draw_soft_widths(axis: "Axes", soft: pd.DataFrame) -> None:
    if not len(soft):
        axis.set_axis_off()
        return
    for place, ((sharpness, keys), rows) in enumerate(soft[soft.reached == 0.75].groupby(["sharpness", "keys"])):
        points = rows.groupby("n").mean(numeric_only=True)
        name = "QK-norm" if keys == "unit" else "Gaussian keys"
        face = "white" if keys == "unit" else None
        look = style((0, 1, 6, 7)[place])
        axis.plot(
            points.index, points["width"], **look, markerfacecolor=face, label=f"deviation {sharpness:g}, {name}"
        )
        if keys == "unit":
            axis.plot(
                points.index,
                points["width"].iloc[0] / points.log_n.iloc[0] * points.log_n,
                ":",
                color="0.4",
                linewidth=0.9,
            )
    axis.plot([], [], ":", color="0.4", linewidth=0.9, label="ln n, through the first point")
    size_axis(axis, soft.n)
    axis.set_yscale("log")
    axis.set_ylabel("width for 75 % of the effective rank of free logits")
    axis.set_title("Softmax, effective rank", fontsize=10)
    axis.legend(fontsize=7, loc="upper left")
