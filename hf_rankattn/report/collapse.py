"""Figures of the experiments on rank collapse: tables to curves, with the published values drawn in.

Filled markers are ours; hollow grey markers on thin lines are read off the published figures.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .benefits import STYLES
from .plots import VARIANTS, new_figure, published_table


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 2.4e-7  # of relative residuals in float32
FAMILY_TITLES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
RESIDUAL = "relative residual\n(1: nothing shared, 0: all tokens equal)"
TRICK = ", identity trick"
WITHOUT_SKIPS, WITH_SKIPS = ("san", "san+mlp"), ("san+skip", "transformer")


def draw_curves(axis: "Axes", rows: pd.DataFrame, label: bool = True) -> None:
    """One line for each variant: mean over seeds, band over texts and seeds."""
    for variant, (name, line, marker, colour) in VARIANTS.items():
        for suffix, size in (("", 5), (TRICK, 7)):
            part = rows[rows.variant == variant + suffix]
            if not len(part):
                continue
            layers = part.groupby("layer")
            mean = layers.value.mean().clip(lower=FLOOR / 4)
            low, high = layers.low.min().clip(lower=FLOOR / 4), layers.high.max().clip(lower=FLOOR / 4)
            axis.fill_between(mean.index, low, high, color=colour, alpha=0.12, linewidth=0)
            marked = "+" if suffix else marker
            axis.plot(
                mean.index, mean, line, marker=marked, color=colour, markersize=size, linewidth=0.9 if suffix else 1.5,
                label=f"{name}{' (MLP by the identity trick)' if suffix else ''}" if label else None,
            )  # fmt: skip


def draw_published_curves(axis: "Axes", model: str, weights: str, variants: tuple[str, ...] = tuple(VARIANTS)) -> None:
    published = published_table("residuals")
    for variant in variants:
        _, line, marker, _ = VARIANTS[variant]
        curve = published[(published.model == model) & (published.weights == weights) & (published.variant == variant)]
        axis.plot(
            curve.layer, curve.value, line, marker=marker, color="0.4", markerfacecolor="white", linewidth=0.8,
            markersize=4,
        )  # fmt: skip


def layer_axis(axis: "Axes", log: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("layer (0: embeddings)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(True, color="0.92")
    if log:
        axis.set(yscale="log", ylim=(FLOOR / 4, 2.0))
        axis.axhspan(FLOOR / 4, 4 * FLOOR, color="0.93", zorder=0)


def variant_legend(figure: "Figure", axes: "list[Axes]", published: str | None, columns: int = 3) -> None:
    handles: list[Any] = []
    labels: list[str] = []
    for axis in axes:
        own = axis.get_legend_handles_labels()
        handles += own[0]
        labels += own[1]
    if published:
        from matplotlib.lines import Line2D

        handles.append(Line2D([], [], color="0.4", marker="o", markerfacecolor="white", linewidth=0.8, markersize=4))
        labels.append(published)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def initial_residuals_figure(table: pd.DataFrame, inputs: str) -> "Figure":
    """A column for each family: what is without skips above, on a logarithmic axis, what is with skips below."""
    rows = table[(table.kind == "init") & (table.inputs == inputs)]
    models = list(dict.fromkeys(rows.model))
    figure, axes = new_figure(2, len(models), 4.2 * len(models), 7.6, sharey="row")
    for (upper, lower), model in zip(axes.T, models, strict=True):
        own = rows[rows.model == model]
        skipless = own.variant.str.removesuffix(TRICK).isin(WITHOUT_SKIPS)
        for axis, part, names in ((upper, own[skipless], WITHOUT_SKIPS), (lower, own[~skipless], WITH_SKIPS)):
            draw_curves(axis, part)
            draw_published_curves(axis, model, "init", names)
        layer_axis(upper)
        layer_axis(lower, log=False)
        lower.set_ylim(0, 1.1)
        upper.set_title(f"{FAMILY_TITLES[model]}: attention skips removed", fontsize=10)
        lower.set_title(f"{FAMILY_TITLES[model]}: skips kept", fontsize=10)
    for line in axes:
        line[0].set_ylabel(RESIDUAL, fontsize=9)
    first = rows.iloc[0]
    how = "as published" if rows.as_published.any() else "all variants of a seed are one model"
    what = {"ids": "random ids", "text": "words of a text"}[inputs]
    figure.suptitle(
        f"Fresh weights, {what}: do tokens stay apart? ({first['shape']} shapes, {int(first.examples)} x "
        f"{int(first.length)} tokens, {rows.seed.nunique()} seed(s); {how})",
        fontsize=11,
    )
    note = "published, fresh weights, 12 layers (ALBERT: with the identity trick); same line styles"
    column = models.index("albert") if "albert" in models else 0
    variant_legend(figure, list(axes[:, column]), note)
    return figure


def pretrained_residuals_figure() -> "Figure":
    """The published curves of pretrained models, which need their weights to be computed again."""
    models = list(FAMILY_TITLES)
    figure, axes = new_figure(1, 3, 12.6, 4.6, sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        published = published_table("residuals")
        for variant, (name, line, marker, colour) in VARIANTS.items():
            curve = published[
                (published.model == model) & (published.weights == "pretrained") & (published.variant == variant)
            ]
            axis.plot(curve.layer, curve.value, line, marker=marker, color=colour, markerfacecolor="white", label=name)
        layer_axis(axis)
        axis.set_title(f"{FAMILY_TITLES[model]}, pretrained", fontsize=10)
    axes[0, 0].set_ylabel(RESIDUAL, fontsize=9)
    figure.suptitle(
        "Published values of pretrained models (mean of 32 texts; ALBERT with the identity trick)", fontsize=11
    )
    variant_legend(figure, [axes[0, 0]], None, 4)
    return figure


def checkpoint_residuals_figure(table: pd.DataFrame) -> "Figure":
    rows = table[table.kind == "checkpoint"]
    figure, axes = new_figure(1, 1, 8.4, 5.0)
    axis: Axes = axes[0, 0]
    draw_curves(axis, rows)
    family = str(rows.model_type.iloc[0]).removeprefix("rank_")
    if family in FAMILY_TITLES:
        draw_published_curves(axis, family, "pretrained")
    layer_axis(axis)
    axis.set_ylabel(RESIDUAL, fontsize=9)
    figure.suptitle(f"Do tokens stay apart? {rows.title.iloc[0]} on {rows.source.iloc[0]}", fontsize=11)
    known = family in FAMILY_TITLES
    variant_legend(figure, [axis], f"published: {FAMILY_TITLES[family]}-base, pretrained" if known else None)
    return figure


def family_residuals_figure(table: pd.DataFrame) -> "Figure":
    """A small panel for each family at random initialisation."""
    rows = table[table.kind == "family"]
    models = list(dict.fromkeys(rows.model))
    columns = 4
    lines = -(-len(models) // columns)
    figure, axes = new_figure(lines, columns, 12.6, 2.6 * lines + 1.2)
    for axis in axes.flat[len(models) :]:
        axis.set_visible(False)
    for axis, model in zip(axes.flat, models, strict=False):
        part = rows[rows.model == model]
        draw_curves(axis, part)
        fewer = "\n(skips cannot be removed; linear axis)" if part.variant.nunique() < 4 else ""
        layer_axis(axis, log=not fewer)
        if fewer:
            axis.set_ylim(0, 1.1)
        causal = ", causal" if part.causal.iloc[0] else ""
        axis.set_title(f"{part.title.iloc[0]}{causal}{fewer}", fontsize=9)
    for line in axes:
        line[0].set_ylabel("relative residual", fontsize=9)
    first = rows.iloc[0]
    figure.suptitle(
        f"Every family with fresh weights ({first['shape']} shape, {int(first.examples)} x {int(first.length)} random tokens, "
        f"{rows.seed.nunique()} seed(s))",
        fontsize=11,
    )
    variant_legend(figure, [axes[0, 0]], None, 4)
    return figure


def exponents_figure(table: pd.DataFrame) -> "Figure":
    """Left: attention alone under each mask, in float64. Right: the exponent of one layer of each family."""
    figure, axes = new_figure(1, 2, 13.0, 5.4, width_ratios=[1.1, 1.0])
    left, right = axes[0]
    rates = table[(table.kind == "rate") & (table.variant == "san")]
    for (model, rows), (marker, line, colour) in zip(rates.groupby("model", sort=False), STYLES, strict=False):
        mean = rows.groupby("layer").value.mean().clip(lower=1e-16)
        left.plot(mean.index, mean, line, marker=marker, color=colour, label=model, markersize=5)
    left.set(yscale="log", ylim=(5e-17, 2.0))
    left.axhspan(5e-17, 4.4e-15, color="0.93", zorder=0, label="within ten times the precision")
    layer_axis(left, log=False)
    left.set_ylabel(RESIDUAL, fontsize=9)
    left.set_title("Attention alone, fresh weights, float64", fontsize=10)
    left.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.8))
    exponents = table[table.kind == "exponent"]
    names = list(dict.fromkeys(exponents.model))[::-1]
    for place, name in enumerate(names):
        values = exponents[exponents.model == name].exponent
        cubic = values.mean() > 2
        right.plot(
            values, np.full(len(values), place), "o" if cubic else "s", color="#1b4f72" if cubic else "#b9770e",
            markersize=6,
        )  # fmt: skip
    right.set_yticks(range(len(names)), names, fontsize=8)
    for value in (1, 3):
        right.axvline(value, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    right.set(
        xlim=(0.5, 3.5), xticks=[1, 2, 3], xlabel="exponent of one layer of attention\n(1: constant factor, 3: cubic)"
    )
    right.grid(True, axis="y", color="0.94")
    right.set_title("Power of the residual that one layer returns", fontsize=10)
    figure.suptitle("Doubly exponential only where all tokens are seen and content alone decides", fontsize=12)
    return figure


def path_counts_figure(table: pd.DataFrame) -> "Figure":
    """Left: the distribution of path lengths; right: residual of the paths of small networks, by length."""
    figure, axes = new_figure(1, 2, 13.0, 5.2, width_ratios=[1.25, 1.0])
    left, right = axes[0]
    counts = table[table.kind == "counts"]
    shapes: dict[tuple[int, int], list[str]] = {}
    for (name, layers, heads), _ in counts.groupby(["architecture", "layers", "heads"], sort=False):
        shapes.setdefault((int(layers), int(heads)), []).append(str(name))
    markers = "os^Dv<>P*X"
    shades = [style[2] for style in STYLES]
    for place, ((_, _), names) in enumerate(shapes.items()):
        rows = counts[counts.architecture == names[0]]
        depth = rows.length.max()
        label = f"{', '.join(names)}: $10^{{{rows.log10_total.iloc[0]:.1f}}}$ paths"
        left.plot(
            rows.length / depth, rows.share, marker=markers[place % 10], color=shades[place % 5], markersize=4,
            linestyle=("-", "--")[place // 5 % 2], linewidth=1, label=label,
        )  # fmt: skip
    left.set(xlabel="length of path / layers", ylabel="share of all paths", xlim=(0.35, 1.02), ylim=(0, None))
    left.legend(fontsize=7, loc="upper left")
    left.grid(True, color="0.92")
    left.set_title("By number, nearly all paths are long", fontsize=10)
    terms = table[(table.kind == "terms") & table.skip.fillna(False).astype(bool)]
    for ((layers, heads), rows), (marker, line, colour) in zip(
        terms.groupby(["layers", "heads"]), STYLES, strict=False
    ):
        groups = rows.groupby("length").relative_residual
        mean = groups.mean()
        right.fill_between(mean.index, groups.min(), groups.max(), color=colour, alpha=0.15, linewidth=0)
        label = f"{int(layers)} layers of {int(heads)} heads: {int(rows.paths.iloc[0])} paths"
        right.plot(mean.index, mean, line, marker=marker, color=colour, label=label)
    right.set(yscale="log", xlabel="length of path", ylabel="relative residual of a path's term (mean)")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=8, loc="lower left")
    right.grid(True, color="0.92")
    right.set_title("The longer a path, the less rank it carries (attention with skips)", fontsize=10)
    return figure


def attention_products_figure(table: pd.DataFrame) -> "Figure":
    figure, axes = new_figure(1, 1, 8.4, 5.8)
    axis: Axes = axes[0, 0]
    titles = {
        ("theorem", "mean"): "theorem's order, mean row taken away",
        ("theorem", "rank1"): "theorem's order, best rank one taken away",
        ("reversed", "rank1"): "as published: reversed order, best rank one",
    }
    weights_names = {"init": "fresh", "checkpoint": "checkpoint"}
    styles = iter([*STYLES, ("P", "--", "0.2")])
    for weights in dict.fromkeys(table.weights):
        for (order, center), title in titles.items():
            rows = table[(table.weights == weights) & (table.order == order) & (table.center == center)]
            if not len(rows):
                continue
            marker, line, colour = next(styles)
            groups = rows.groupby("length_of_path").value
            median = groups.median()
            axis.plot(median.index, median, line, marker=marker, color=colour, markersize=5, label=f"{weights_names[weights]}: {title}")  # fmt: skip
            axis.fill_between(median.index, groups.quantile(0.25), groups.quantile(0.75), color=colour, alpha=0.15, linewidth=0)  # fmt: skip
    published = published_table("attention_products")
    for weights, marker in (("init", "o"), ("pretrained", "s")):
        rows = published[published.weights == weights]
        name = "fresh" if weights == "init" else "pretrained"
        axis.plot(
            rows.length, rows.value, ":", marker=marker, color="0.4", markerfacecolor="white", markersize=7, linewidth=0.8,
            label=f"published, {name} BERT-base (read by eye)",
        )  # fmt: skip
    layer_axis(axis)
    axis.set(
        xlabel="maps in the product (length of the path)",
        ylabel="relative residual of the product",
        ylim=(FLOOR / 4, 1.5),
    )
    variant_legend(figure, [axis], None, 2)
    samples = int(table.samples.iloc[0])
    figure.suptitle(
        f"Chained attention maps along {samples} random paths of each length (median, quartiles)", fontsize=11
    )
    return figure


def circle_figure(table: pd.DataFrame) -> "Figure":
    """Trajectories of both points, a row of panels for each variant, a panel for each width; the first seed."""
    variants, widths = list(dict.fromkeys(table.variant)), sorted(table.hidden.unique())
    figure, axes = new_figure(
        len(variants), len(widths), max(8.0, 3.1 * len(widths) + 1), 3.0 * len(variants) + 1, sharex=True, sharey=True
    )
    rows = table[table.seed == table.seed.min()]
    turn = np.linspace(0, 2 * np.pi, 200)
    for line, variant in zip(axes, variants, strict=True):
        for axis, width in zip(line, widths, strict=True):
            part = rows[(rows.variant == variant) & (rows.hidden == width)].sort_values("step")
            axis.plot(0.3 * np.cos(turn), 0.3 * np.sin(turn), color="0.75", linewidth=0.8)
            for name, marker, colour in (("0", "o", "#1b4f72"), ("1", "^", "#b9770e")):
                axis.plot(part[f"x{name}"], part[f"y{name}"], "-", color=colour, linewidth=0.7)
                axis.scatter(
                    part[f"x{name}"], part[f"y{name}"], s=9, marker=marker, color=colour, alpha=0.6, linewidth=0
                )
                axis.scatter(part[f"x{name}"].iloc[:1], part[f"y{name}"].iloc[:1], s=70, marker=marker, facecolor="none", edgecolor=colour)  # fmt: skip
            last = part.iloc[-1]
            axis.scatter([last.x0, last.x1], [last.y0, last.y1], s=60, marker="x", color="k", zorder=5)
            axis.set(xlim=(-0.56, 0.56), ylim=(-0.56, 0.56), aspect="equal")
            axis.set_title(f"{variant}, d {int(width)}", fontsize=9)
            axis.grid(True, color="0.94")
        line[0].set_ylabel("y")
    for axis in axes[-1]:
        axis.set_xlabel("x")
    how = " (as published: the skip inside of the layer is in all)" if table.as_published.any() else ""
    figure.suptitle(f"A recurrent layer on two points of a circle{how}", fontsize=11)
    note = (
        "large hollow: start; cross: after 300 steps; circles, triangles: the two points; grey: the circle to follow"
    )
    figure.supxlabel(note, fontsize=8, color="0.3")
    return figure


def circle_gap_figure(table: pd.DataFrame) -> "Figure":
    variants, widths = list(dict.fromkeys(table.variant)), sorted(table.hidden.unique())
    figure, axes = new_figure(1, len(widths), max(8.0, 3.9 * len(widths) + 1), 4.8, sharey=True)
    for axis, width in zip(axes[0], widths, strict=True):
        for variant, (_, line, colour) in zip(variants, STYLES, strict=False):
            rows = table[(table.variant == variant) & (table.hidden == width)]
            for place, (_, part) in enumerate(rows.groupby("seed")):
                part = part.sort_values("step")
                axis.plot(
                    part.step + 1, part.gap.clip(lower=1e-8), line, color=colour, linewidth=1.3,
                    label=variant if not place else None,
                )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="step + 1", ylim=(5e-9, max(2.0, 2 * float(table.gap.max()))))
        axis.axhspan(5e-9, 1e-7, color="0.93", zorder=0)
        axis.set_title(f"d {int(width)}", fontsize=10)
        axis.grid(True, color="0.92")
    axes[0, 0].set_ylabel("distance of the two points (0 drawn as 1e-8)")
    variant_legend(figure, [axes[0, 0]], None)
    figure.suptitle("Do the two points stay apart? A line for each seed; grey: equal within precision", fontsize=11)
    return figure


BASELINE_LINES: dict[str, tuple[str, str]] = {
    "sorting": ("baseline_position_only", "position only"),
    "convex_hull": ("baseline_majority", "majority"),
    "memorization": ("baseline_own_token", "token only"),
}


def path_effectiveness_figure(table: pd.DataFrame) -> "Figure":
    """A column for each task: isolated paths above, exact parts of the output below."""
    tasks = list(dict.fromkeys(table.task))
    published = published_table("path_effectiveness").set_index("task")
    figure, axes = new_figure(2, len(tasks), 4.3 * len(tasks) + 0.4, 8.2, sharey=True, sharex="col")
    for column, task in enumerate(tasks):
        rows = table[table.task == task]
        upper, lower = axes[0, column], axes[1, column]
        isolated = rows[rows.way == "isolated"]
        for (drawn, part), style in zip(isolated.groupby("drawn"), STYLES, strict=False):
            draw_lengths(upper, part, style, f"{int(drawn)} paths, each by itself")
        names = {"up_to": "all paths up to this length", "only": "paths of this length alone"}
        for (way, name), style in zip(names.items(), STYLES[2:4], strict=True):
            draw_lengths(lower, rows[rows.way == way], style, name)
        for axis in (upper, lower):
            reference_lines(axis, rows, published.loc[task], BASELINE_LINES[task])
            axis.grid(True, color="0.93")
            axis.set_ylim(0, 1.08)
        first = rows.iloc[0]
        mlp = ", MLPs" if first.use_mlp else ""
        upper.set_title(
            f"{task.replace('_', ' ')}\n{int(first.layers)} layers of {int(first.heads)} heads, d {int(first.hidden)}{mlp}, "
            f"lr {first.learning_rate:g}, {rows.seed.nunique()} seed(s)",
            fontsize=9,
        )
        lower.set_xlabel("length of paths (heads on the way)")
    axes[0, 0].set_ylabel("accuracy\nisolated paths, as published", fontsize=9)
    axes[1, 0].set_ylabel("accuracy\nexact parts of the output", fontsize=9)
    variant_legend(figure, [axes[0, 0], axes[1, 0]], None, 4)
    figure.suptitle(
        "What paths of each length are worth (mean; band: least to largest over seeds and draws)", fontsize=11
    )
    return figure


def draw_lengths(axis: "Axes", rows: pd.DataFrame, style: tuple[str, str, str], label: str) -> None:
    marker, line, colour = style
    groups = rows.groupby("length").accuracy
    mean: Any = groups.mean()
    axis.fill_between(mean.index, groups.min(), groups.max(), color=colour, alpha=0.15, linewidth=0)
    axis.plot(mean.index, mean, line, marker=marker, color=colour, label=label, markersize=5)


def reference_lines(axis: "Axes", rows: pd.DataFrame, published: pd.Series, baseline: tuple[str, str]) -> None:
    """Ours solid and published dashed, named to the right of all points, in the order of their heights."""
    column, seen = baseline
    longest = float(rows.length.max())
    lines = [
        (rows.whole.mean(), "whole model", "-"), (rows[column].mean(), seen, "-"),
        (published.whole, "published: whole", "--"), (published.reference, f"published: {published.reference_name}", "--"),
    ]  # fmt: skip
    height = -1.0
    for value, name, line in sorted(lines):
        axis.hlines(value, 0, longest, color="0.35", linewidth=0.9, linestyle=line, zorder=0)
        height = max(value, height + 0.045)  # names of near lines are moved apart
        axis.annotate(f"{name} {value:.2f}", (1.04 * longest, height), fontsize=7, va="center", color="0.25")
    axis.set_xlim(-0.05 * longest, 1.55 * longest)
    axis.set_xticks(range(int(longest) + 1))
