"""Figures of the experiments on the benefits of rank: tables of runs to curves, with the published values drawn in.

Filled markers and solid or broken lines are ours; hollow markers on thin lines are read off the published figures, which are
of d = 64 and 1e5 or 2e5 steps. Ranks are drawn as a share of the dimension, so that both share one axis.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ...report.plots import new_figure, published_table


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = (
    ("o", "-", "#1b4f72"),
    ("s", "--", "#b9770e"),
    ("^", "-.", "#922b21"),
    ("D", ":", "#117a65"),
    ("v", "-", "#6c3483"),
    ("P", "--", "#424949"),
    ("X", "-.", "#a04000"),
)
# read off the published plot of u
EXPANSION_PEAKS = {4: 1.35e8, 6: 6.47e12, 8: 6.03e16}
FORM_TITLES = {"original": "original form", "qk_norm": "qk_norm: unit queries and keys, learned temperature"}


def draw_runs(axis: "Axes", rows: pd.DataFrame, x: str, style: tuple[str, str, str], label: str) -> None:
    """Mean over seeds as a line, least to largest as a band, and each diverged setting as a cross at the top."""
    marker, line, colour = style
    groups = rows.groupby(x).held_out_error.agg(["mean", "min", "max"]).reset_index()
    known = groups.dropna()
    axis.fill_between(known[x], known["min"], known["max"], color=colour, alpha=0.15, linewidth=0)
    axis.plot(known[x], known["mean"], line, marker=marker, color=colour, label=label, markersize=5)
    lost = groups[groups["mean"].isna()]
    if len(lost):
        axis.plot(lost[x], np.full(len(lost), 2.0), "x", color=colour, label=f"{label}: diverged")


def draw_published(axis: "Axes", x, values, style: tuple[str, str, str]) -> None:
    marker, line, colour = style
    axis.plot(
        x, values, line, marker=marker, color=colour, markerfacecolor="white", linewidth=0.7, markersize=6, alpha=0.8
    )


def draw_baselines(axis: "Axes", rows: pd.DataFrame) -> None:
    for column, name in (("baseline_zero", "zero"), ("baseline_own_token_and_mean_pool", "own token + mean")):
        if column in rows and rows[column].notna().any():
            height = rows[column].mean()
            axis.axhline(height, color="0.6", linewidth=0.8, linestyle=(0, (1, 2)))
            place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            axis.annotate(name, (0.99, height), fontsize=7, color="0.4", **place)


def rank_axis(axis: "Axes", shares) -> None:
    shares = sorted(set(shares))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(shares, [f"1/{round(1 / share)}" if share < 1 else str(round(share)) for share in shares])
    axis.tick_params(axis="x", which="minor", bottom=False)
    axis.set_xlabel("rank of a head / dimension")
    axis.grid(True, which="major", color="0.92")


def finish(figure: "Figure", axes: np.ndarray, title: str, note: str) -> "Figure":
    for row in axes:
        row[0].set_ylabel("squared error per point, held out")
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(note, fontsize=8, color="0.3")
    return figure


def setting_of(table: pd.DataFrame) -> str:
    first = table.iloc[0]
    steps = sorted({int(count) for count in table.steps.dropna()})
    many = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
    return f"d {int(first['dim'])}, batches of {int(first.batch_size)}, {many} steps, {table.seed.nunique()} seed(s) of weights and data"


NOTE = "lines: mean over seeds; bands: least to largest; hollow: published, best seed's train error, d 64, 1e5 or 2e5 steps"


def rank_separation_figure(table: pd.DataFrame) -> "Figure":
    """A row of panels for each form, a panel for each depth, a line for each budget."""
    forms, depths = list(dict.fromkeys(table.form)), sorted(table.layers.unique())
    budgets = list(dict.fromkeys(table.budget))
    published = published_table("rank_separation")
    figure, axes = new_figure(len(forms), len(depths), 4.2 * len(depths) + 1, 3.6 * len(forms) + 1, sharey=True)
    for row, form in zip(axes, forms, strict=True):
        for axis, layers in zip(row, depths, strict=True):
            rows = table[(table.form == form) & (table.layers == layers)]
            shares: list[float] = []
            for budget, style in zip(budgets, STYLES, strict=False):
                ours = rows[rows.budget == budget].assign(share=lambda part: part["rank"] / part["dim"])
                draw_runs(axis, ours, "share", style, f"{budget} parameters a projection")
                shares += list(ours.share)
                theirs = published[(published.layers == layers) & (published.budget == budget)]
                draw_published(axis, theirs["rank"] / 64, theirs.value, style)
                shares += list(theirs["rank"] / 64)
            draw_baselines(axis, rows)
            rank_axis(axis, shares)
            axis.set_title(f"{layers} layer{'s' if layers > 1 else ''}: {FORM_TITLES[form]}", fontsize=9)
    axes[0, 0].legend(fontsize=8, loc="lower left")
    points = int(table.num_points.iloc[0])
    title = f"Farthest of {points} points, heads of several ranks at one budget\n({setting_of(table)})"
    return finish(figure, axes, title, NOTE + ("; the same published values in all rows" if len(forms) > 1 else ""))


def context_length_figure(table: pd.DataFrame) -> "Figure":
    """A panel for each form, a line for each number of points."""
    forms, counts = list(dict.fromkeys(table.form)), sorted(table.num_points.unique())
    published = published_table("context_length")
    figure, axes = new_figure(1, len(forms), 5.5 * len(forms) + 1, 4.8, sharey=True)
    every = sorted({*counts, *published.num_points.unique()})
    styles = dict(zip(every, STYLES, strict=False))
    for axis, form in zip(axes[0], forms, strict=True):
        shares: list[float] = []
        for count in every:
            ours = table[(table.form == form) & (table.num_points == count)]
            ours = ours.assign(share=lambda part: part["rank"] / part["dim"])
            if len(ours):
                draw_runs(axis, ours, "share", styles[count], f"N = {count}")
            theirs = published[published.num_points == count]
            if len(theirs):
                draw_published(axis, theirs["rank"] / 64, theirs.value, styles[count])
                axis.annotate(
                    f"N {count}", (1 / 64, theirs.value.iloc[0]), fontsize=7, color=styles[count][2], ha="right",
                    xytext=(-6, 0), textcoords="offset points", va="center",
                )  # fmt: skip
            shares += [*ours.share, *(theirs["rank"] / 64)]
        rank_axis(axis, shares)
        axis.set_title(FORM_TITLES[form], fontsize=9)
        axis.margins(x=0.14)  # room for the labels of the published curves
    axes[0, 0].legend(fontsize=8, loc="lower left")
    return finish(figure, axes, f"Farthest of N points, two layers\n({setting_of(table)})", NOTE)


def positions_figure(table: pd.DataFrame) -> "Figure":
    """A panel for each depth and form, a line for each kind of positions."""
    forms, depths = list(dict.fromkeys(table.form)), sorted(table.layers.unique())
    published = published_table("positions")
    figure, axes = new_figure(len(forms), len(depths), 4.8 * len(depths) + 1, 3.8 * len(forms) + 1, sharey=True)
    for row, form in zip(axes, forms, strict=True):
        for axis, layers in zip(row, depths, strict=True):
            shares: list[float] = []
            for position, style in zip(("none", "additive", "concatenated"), STYLES, strict=False):
                ours = table[(table.form == form) & (table.layers == layers) & (table.position == position)]
                ours = ours.assign(share=lambda part: part["rank"] / part["dim"])
                draw_runs(axis, ours, "share", style, f"positions: {position}")
                theirs = published[(published.layers == layers) & (published.position == position)]
                draw_published(axis, theirs["rank"] / 64, theirs.value, style)
                shares += [*ours.share, *(theirs["rank"] / 64)]
            rank_axis(axis, shares)
            axis.set_title(f"{layers} layer{'s' if layers > 1 else ''}: {FORM_TITLES[form]}", fontsize=9)
    axes[0, 0].legend(fontsize=8, loc="lower left")
    budget = "published budgets" if table.as_published.any() else "one parameter budget for all three"
    return finish(figure, axes, f"Positions, {budget}\n({setting_of(table)})", NOTE + "; published: unequal budgets")


def learned_forms_figure(table: pd.DataFrame) -> "Figure":
    """Angle and scale of the bilinear forms by number of heads; a mark for each head."""
    published = published_table("learned_forms")
    figure, axes = new_figure(1, 2, 10.0, 4.4)
    finished = table[table.status == "finished"]
    forms = list(dict.fromkeys(finished.form))
    counts = sorted(finished.heads.unique())
    for i, (form, style) in enumerate(zip(forms, STYLES, strict=False)):
        rows = finished[finished.form == form]
        rng = np.random.default_rng(0)
        place = np.array([counts.index(count) for count in rows.heads]) + (i - (len(forms) - 1) / 2) * 0.25
        place = place + rng.uniform(-0.06, 0.06, len(rows))
        for axis, column in zip(axes[0], ("angle", "beta"), strict=True):
            axis.plot(place, rows[column], style[0], color=style[2], alpha=0.6, markersize=4, label=FORM_TITLES[form])
    left, right = axes[0]
    for i, row in enumerate(published.itertuples()):
        if i < len(counts):
            middle = i + 0.4
            left.plot([middle], [row.angle_median], "k_", markersize=14)
            left.vlines(middle, row.angle_low, row.angle_high, color="k")
            right.plot([middle], [row.scale_median / 8], "k_", markersize=14)
            right.vlines(middle, row.scale_low / 8, row.scale_high / 8, color="k")
    left.plot([], [], "k_", markersize=14, label="published for 1, 8 and 64 heads (d 64): median, quartiles")
    left.set_ylabel("angle of W_Q^T W_K to the identity (degrees)")
    right.set_ylabel("beta: factor of -x.y in the logits")
    right.set_yscale("log")
    for axis in axes[0]:
        axis.set_xticks(range(len(counts)), [f"{count} head{'s' if count > 1 else ''}" for count in counts])
        axis.grid(True, axis="y", color="0.92")
    left.legend(fontsize=7, loc="lower left")
    figure.suptitle(f"What full-rank heads learn\n({setting_of(table)})", fontsize=12)
    return figure


def training_speed_figure(table: pd.DataFrame, published: dict[str, float]) -> "Figure":
    figure, axes = new_figure(1, 1, 7.5, 5.0)
    axis: Axes = axes[0, 0]
    dim = int(table["dim"].iloc[0])
    for (form, rank), style in zip(table.groupby(["form", "rank"], sort=False).groups, STYLES, strict=False):
        rows = table[(table.form == form) & (table["rank"] == rank)]
        heads = int(rows.heads.iloc[0])
        draw_runs(axis, rows, "steps", style, f"{form}: {heads} head{'s' if heads > 1 else ''} of rank {rank}")
    for name, value in published.items():
        axis.axhline(value, color="0.5", linewidth=0.8, linestyle=(0, (4, 3)))
        axis.annotate(
            f"published, d 64: {name}, {value}", (0.99, value), xycoords=("axes fraction", "data"), fontsize=7, ha="right", va="bottom",
            color="0.3",
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    steps = sorted({int(count) for count in table.steps})
    axis.set_xticks(steps, [str(count) for count in steps])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.set_xlabel("training steps (each point is a run with its own schedule)")
    axis.set_ylabel("squared error per point, held out")
    axis.grid(True, color="0.92")
    axis.legend(fontsize=8, loc="lower left")
    figure.suptitle(f"One layer on the farthest of {int(table.num_points.iloc[0])} points, d {dim}", fontsize=12)
    return figure


def expansion_figure(table: pd.DataFrame) -> "Figure":
    """A panel for each dimension: the size of u by angle, right and as published, and the published peak."""
    curves = table[table.what == "curve"]
    dims = sorted(curves["dim"].unique())
    figure, axes = new_figure(1, len(dims), 3.8 * len(dims) + 1, 4.2, sharey=True)
    for axis, d in zip(axes[0], dims, strict=True):
        rows = curves[curves["dim"] == d]
        angle = np.degrees(np.arccos(rows.cosine.clip(-1, 1)))
        for column, name, line, colour in (
            ("published_formula", "published formula", "--", "#922b21"),
            ("weight", "corrected", "-", "#1b4f72"),
        ):
            size = rows[column].abs()
            axis.plot(angle, size, line, color=colour, linewidth=0.9, label=f"{name}: peak {size.max():.2g}")
        if d in EXPANSION_PEAKS:
            axis.plot(
                [0],
                [EXPANSION_PEAKS[d]],
                "s",
                color="#922b21",
                markerfacecolor="white",
                label="peak of the published figure",
            )
        axis.set_yscale("log")
        axis.set_xlabel("angle between query and key (degrees)")
        axis.set_title(f"d = {d}", fontsize=10)
        axis.grid(True, color="0.92")
        axis.legend(fontsize=7, loc="lower center")
    axes[0, 0].set_ylim(1, 1e18)
    axes[0, 0].set_ylabel("|u(q.k)|, degrees below 50; its sign alternates")
    figure.suptitle("Weights by which random rank-one heads add up to the nearest of two points", fontsize=12)
    return figure


def random_features_figure(table: pd.DataFrame) -> "Figure":
    dims = sorted(table["dim"].unique())
    published = published_table("random_features")
    columns = min(2, len(dims))
    figure, axes = new_figure(
        -(-len(dims) // columns), columns, 5.2 * columns + 0.5, 3.8 * -(-len(dims) // columns) + 0.6, sharey=True
    )
    for axis, d in zip(axes.flat, dims, strict=False):
        rows = table[table["dim"] == d].groupby("heads").mean(numeric_only=True)
        axis.plot(rows.index, rows.predicted, "-", color="#1b4f72", label="predicted, 1 - b.C^-1 b")
        axis.plot(rows.index, rows.measured, "o", color="#1b4f72", markersize=4, label="measured on the task")
        axis.plot(
            rows.index, rows.published_formula, "--", color="#922b21", label="predicted with the published fault"
        )
        axis.plot(
            rows.index,
            rows.published_weights_measured,
            "x",
            color="#922b21",
            markersize=5,
            label="those weights, measured",
        )
        theirs = published[published.d == d]
        axis.plot(
            theirs.heads, theirs.value, "s", color="#922b21", markerfacecolor="white", markersize=5, label="published"
        )
        axis.plot(rows.index, rows.lower_bound, ":", color="0.4", label="lower bound LB(d, 1, H)")
        axis.axhline(rows.degree_1_floor.iloc[0], color="0.6", linewidth=0.8)
        axis.annotate("degree-1 floor", (1, rows.degree_1_floor.iloc[0]), fontsize=7, color="0.4", va="bottom")
        axis.set_xscale("log", base=2)
        axis.set_title(f"d = {d}", fontsize=10)
        axis.set_xlabel("heads")
        axis.grid(True, color="0.92")
    for row in axes:
        row[0].set_ylabel("squared error")
    axes[0, 0].legend(fontsize=7)
    figure.suptitle("Random rank-one heads with optimal weights, nearest of two orthonormal points", fontsize=12)
    return figure


def replay_figure(table: pd.DataFrame) -> "Figure":
    """Train and held-out error of runs on fresh rows and on rows that come again, a group of marks for each rank."""
    figure, axes = new_figure(1, 1, 7.0, 4.4)
    axis: Axes = axes[0, 0]
    names = []
    for place, ((rank, again), rows) in enumerate(table.groupby(["rank", table.replay.notna()], sort=False)):
        for shift, column, (marker, _, colour), label in (
            (-0.1, "train_error", STYLES[0], "error on train rows, the published estimator"),
            (0.1, "held_out_error", STYLES[1], "error on rows never seen"),
        ):
            axis.plot(
                np.full(len(rows), place + shift),
                rows[column],
                marker,
                color=colour,
                label=label if not place else None,
            )
        batches = f"{int(rows.replay.iloc[0])} batches replayed" if again else "fresh rows"
        names.append(f"rank {int(rank)}\n{batches}")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("squared error per point")
    axis.grid(True, axis="y", color="0.92")
    axis.legend(fontsize=8)
    figure.suptitle(f"What replaying batches does to the reported error\n({setting_of(table)})", fontsize=11)
    return figure


def full_rank_head_figure(table: pd.DataFrame) -> "Figure":
    """Error of one head against its inverse temperature, and what heads of each rank see of both targets."""
    figure, axes = new_figure(1, 2, 11.0, 4.6)
    left, right = axes[0]
    near, far = table[table.kind == "nearest"], table[table.kind == "farthest"]
    for (d, rows), (marker, _, colour) in zip(near.groupby("dim"), STYLES, strict=False):
        mean = rows.groupby("beta").mean(numeric_only=True)
        left.plot(mean.index, mean.formula, "-", color=colour)
        left.plot(mean.index, mean.error, marker, color=colour, label=f"nearest of 2, d {d} (line: formula)")
    for (count, rows), (marker, line, colour) in zip(far.groupby("num_points"), STYLES[::-1], strict=False):
        mean = rows.groupby("beta").error.mean()
        left.plot(
            mean.index, mean, line, marker=marker, color=colour, markerfacecolor="white", linewidth=0.8, markersize=5,
            label=f"farthest of {int(count)}, d {int(rows['dim'].iloc[0])}",
        )  # fmt: skip
    left.plot([300], [0.0153], "k*", markersize=10, label="published: trained head, beta 300, N 16")
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("beta, the factor on x.y in the logits")
    left.set_ylabel("squared error")
    left.set_title("one head of full rank", fontsize=10)
    seen = table[table.kind == "visible"]
    for (d, rows), (marker, _, colour) in zip(seen.groupby("dim"), STYLES, strict=False):
        for target, line, face in (("nearest", "-", colour), ("biased", "--", "white")):
            mean = rows[rows.target == target].groupby("rank").share.mean()
            right.plot(
                mean.index / d, mean, line, marker=marker, color=colour, markerfacecolor=face, markersize=5,
                label=f"d {d}: {target} neighbour",
            )  # fmt: skip
    right.set_yscale("log")
    right.set_xlabel("rank of the head / dimension")
    right.set_ylabel("share of the target that one head sees")
    right.set_title("heads of lower rank", fontsize=10)
    for axis in (left, right):
        axis.grid(True, color="0.94")
        axis.legend(fontsize=7)
    figure.suptitle("What a full-rank head does exactly, and what is left to heads of lower rank", fontsize=12)
    return figure


def depth_figure(table: pd.DataFrame) -> "Figure":
    votes, twins = table[table.kind == "constructed"], table[table.kind == "trained"]
    figure, axes = new_figure(1, 2, 11.0, 4.6)
    left, right = axes[0]
    for (d, rows), (marker, line, colour) in zip(votes.groupby("dim"), STYLES, strict=False):
        mean = rows.groupby("heads").mean(numeric_only=True)
        left.plot(rows.heads, rows.majority, marker, color=colour, markersize=5, label=f"d {d}: two layers that vote")
        left.plot(mean.index, mean.majority_formula, line, color=colour, label=f"d {d}: formula")
        left.plot(
            rows.heads,
            rows.average,
            marker,
            color=colour,
            markerfacecolor="white",
            markersize=5,
            label=f"d {d}: one layer, average",
        )
        left.plot(mean.index, mean.average_formula, line, color=colour, linewidth=0.7)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("rank-one heads")
    left.set_ylabel("squared error, nearest of two points")
    left.set_title("constructed", fontsize=10)
    left.legend(fontsize=7)
    left.grid(True, which="both", color="0.94")
    draw_twins(right, twins)
    figure.suptitle("Depth in place of rank", fontsize=12)
    return figure


def draw_twins(axis: "Axes", twins: pd.DataFrame) -> None:
    names: list[Any] = []
    for place, (layers, rows) in enumerate(twins.groupby("layers")):
        axis.plot(np.full(len(rows), place), rows.held_out_error, "o", color="#1b4f72")
        axis.hlines(rows.held_out_error.mean(), place - 0.2, place + 0.2, color="#1b4f72")
        names.append(f"{int(layers)} layer{'s' if layers > 1 else ''} of {int(rows.heads.iloc[0])} heads")
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_ylim(0, 1.15 * twins.held_out_error.max())
    axis.set_ylabel("squared error, held out")
    axis.set_title(f"trained, rank one, d {int(twins['dim'].iloc[0])}, {int(twins.steps.iloc[0])} steps", fontsize=10)
    axis.grid(True, axis="y", color="0.94")
