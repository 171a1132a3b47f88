"""Rank of attention maps of random heads against their width: where the ceiling of 0.63 n shows, and where it does not."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...report.plots import content_free_share, new_figure
from ...theory import causal_columns, coverage, distinct_columns, windowed_columns
from ..drawing import DASHED, GREY, level
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, unpublished
from ..sweep.tolerances import CEILING, POLYNOMIAL_RANK
from . import published
from ._drawing import FACES, LAW, beside, draw_deviations, draw_sizes, finish, style
from ._random_maps import KEYS, TOLERANCES, run_hard, run_paper, run_sharpness, run_spectrum, run_width


SHOWS = (
    "rank of random attention maps against head width: hard and soft, free, causal, windowed, with and without QK-norm"
)

WIDTHS = [1, 2, 4, 8, 16, 32, 64, 128, 192]
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
SHARPNESS = [0.1, 0.3, 0.5, 1, 3, 10, 30, 100, 300, 1000, 3000]
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "hard": {"n": [64, 128], "widths": [2, 8, 32, 128], "columns": 5120},
        "masked": {"n": 256, "windows": [32], "widths": [8], "columns": 5120},
        "spectrum": {"n": 512, "draws": 2},
        "paper": {"widths": [1, 8, 64], "draws": 1},
        "sharpness": {"n": [128, 256], "values": [0.5, 1, 3000], "draws": 1},
        "width": {"n": [64], "values": [1.0], "widths": [2, 8], "draws": 1},
        "soft": {"n": 128, "draws": 1},
    },
    "laptop": {
        "hard": {"n": SIZES[:7], "widths": [*WIDTHS[1:], 384], "columns": 20480},
        "masked": {"n": 512, "windows": [32, 128], "widths": WIDTHS[1:8], "columns": 20480},
        "spectrum": {"n": 512, "draws": 10},
        "paper": {"widths": WIDTHS, "draws": 10},
        "sharpness": {"n": [256], "values": SHARPNESS, "draws": 5},
        "width": {"n": SIZES[:4], "values": [1.0, 3.0], "widths": WIDTHS[:8], "draws": 2},
        "soft": {"n": 512, "draws": 2},
    },
    "paper": {
        "hard": {"n": SIZES, "widths": [*WIDTHS[1:], 384], "columns": 65536},
        "masked": {"n": 4096, "windows": [32, 128, 1024], "widths": WIDTHS[1:], "columns": 65536},
        "spectrum": {"n": 2048, "draws": 10},
        "paper": {"widths": [*range(1, 17), *range(24, 193, 8)], "draws": 50},
        "sharpness": {"n": [256, 1024], "values": SHARPNESS, "draws": 10},
        "width": {"n": SIZES[:6], "values": [1.0, 3.0], "widths": WIDTHS, "draws": 5},
        "soft": {"n": 1024, "draws": 5},
    },
}
# With these sizes the published picture is found again. The published text names only n and the largest width.
PAPER_N, PAPER_MODEL = 100, 512
COLUMNS = "columns chosen / n = rank / n"
SOFT = 0.05  # standard deviation of the logits in the soft regime
RUNS = {"hard": run_hard, "spectrum": run_spectrum, "paper": run_paper, "sharpness": run_sharpness}
CEILINGS = {"none": distinct_columns, "causal": causal_columns}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    hard, masked, sharpness, width = (setting[name] for name in ("hard", "masked", "sharpness", "width"))
    masks = [("causal", 0), *(("window", window) for window in masked["windows"])]
    maps = [(n, "none", 0, hard) for n in hard["n"]] + [(masked["n"], *mask, masked) for mask in masks]
    found: list[dict[str, Any]] = []
    for n, mask, window, sizes in maps:
        for keys in KEYS:
            widths, draws = [1] if keys == "free" else sizes["widths"], max(2, min(50, sizes["columns"] // n))
            about = {"kind": "hard", "n": n, "keys": keys, "mask": mask, "window": window}
            found.append({**about, "widths": widths, "draws": draws})
    found.append({"kind": "spectrum", **setting["spectrum"]})
    found += [
        {"kind": "paper", "n": PAPER_N, "model_width": PAPER_MODEL, **axis, **setting["paper"]}
        for axis in grid(inputs=["gaussian", "orthonormal"], temperature=[1.0, 0.01])
    ]
    for axis in grid(n=sharpness["n"], mask=["none", "causal"]):
        found.append({"kind": "sharpness", **axis, "values": sharpness["values"], "draws": sharpness["draws"]})
    for axis in grid(n=width["n"], keys=["gaussian", "unit"], sharpness=width["values"], mask=["none", "causal"]):
        found.append({"kind": "width", **axis, "widths": width["widths"], "draws": width["draws"]})
    found.append({"kind": "soft", **setting["soft"], "sharpness": SOFT, "widths": [1, 2, 3, 4]})
    return [
        Cell({**parameters, "seed": seed}, cost=parameters["n"] ** (2 if parameters["kind"] == "hard" else 3))
        for parameters in found
        for seed in range(seeds or 1)
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    return RUNS.get(parameters["kind"], run_width)(parameters)


def complete(table: pd.DataFrame) -> pd.DataFrame:
    """The laws beside what was simulated."""

    def ceiling(row):
        n, mask = int(row["n"]), row["mask"]
        columns = windowed_columns(n, int(row["window"])) if mask == "window" else CEILINGS[mask](n)
        return columns / n

    def law(row):
        if row["mask"] != "none" or row["keys"] == "free" or row["width"] < 2:
            return math.nan
        return coverage(int(row["n"]), int(row["width"]), row["keys"])

    hard = table[table.kind == "hard"]
    return table.assign(ceiling=hard.apply(ceiling, axis=1), law=hard.apply(law, axis=1))


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    return {"rank-ceiling": ceiling_figure(table), "rank-ceiling-soft": soft_figure(table)}


def ceiling_figure(table: pd.DataFrame) -> Figure:
    """Hard maps by n and by mask, the published set-up, and softmax by sharpness."""
    figure, axes = new_figure(2, 2, 16.0, 9.0)
    hard = table[table.kind == "hard"]
    draw_hard(axes[0, 0], hard[hard["mask"] == "none"])
    draw_masks(axes[0, 1], hard)
    draw_paper(axes[1, 0], table[table.kind == "paper"])
    draw_sharpness(axes[1, 1], table[table.kind == "sharpness"])
    for axis in axes.flat:
        beside(axis)
    figure.suptitle("Rank of random attention maps: a ceiling of hard choice")
    note = (
        "Soft maps and their singular values are float64; a singular value counts above tolerance times the largest. "
        "float32 and float64 tolerance: n times the rounding of that type, the default of torch and numpy."
    )
    figure.supxlabel(note)
    return figure


def draw_hard(axis: Axes, rows: pd.DataFrame) -> None:
    sizes = sorted(rows.n.unique())
    shown = sizes if len(sizes) < 5 else sizes[::2]
    draw_sizes(axis, rows, "coverage", shown, linestyle="none")
    laws = rows.groupby(["keys", "n", "width"]).law.mean()
    for place, n in enumerate(shown):
        axis.plot(laws["gaussian", n].index, laws["gaussian", n], color=style(place)["color"], linewidth=0.8)
    axis.plot(laws["unit", sizes[-1]].index, laws["unit", sizes[-1]], color="0.3", linewidth=0.8, linestyle=":")
    axis.plot([], [], "o", color="0.3", markerfacecolor="white", label="hollow: unit keys (QK-norm)")
    axis.plot([], [], color="0.3", linewidth=0.8, label="lines: mean-field law")
    level(axis, 1 - 1 / math.e, "published ceiling 0.63 n = 1 - 1/e")
    widths = rows[rows["keys"] == "gaussian"]["width"]
    finish(axis, "Hard attention, no mask", widths, ylim=(0, 0.75), ylabel=COLUMNS)


def draw_masks(axis: Axes, rows: pd.DataFrame) -> None:
    n = rows[rows["mask"] == "causal"].n.max()
    rows = rows[rows.n == n]
    for place, ((mask, window), part) in enumerate(rows.groupby(["mask", "window"])):
        name = {"none": "no mask", "causal": "causal"}.get(mask, f"last {int(window)} tokens")
        look = style((0, 5, 6, 7)[place % 4], linewidth=0.8)
        for keys, face in FACES.items():
            points = part[part["keys"] == keys].groupby("width").coverage.mean()
            axis.plot(points.index, points, **look, markerfacecolor=face, label=name if keys == "gaussian" else None)
        ceiling = part.ceiling.iloc[0]
        axis.axhline(ceiling, **DASHED | {"color": look["color"]}, label=f"{name}: ceiling {ceiling:.3f}")
    title = f"Hard attention with masks, n = {int(n)} (dashed: exact ceilings; hollow: unit keys)"
    finish(axis, title, rows[rows["keys"] == "gaussian"]["width"], ylim=(0, 0.75), ylabel=COLUMNS)


def draw_paper(axis: Axes, rows: pd.DataFrame) -> None:
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
    level(axis, 0.63, "published: 0.63 n")
    title = f"n = {n}, model width {int(rows.model_width.iloc[0])}, W ~ N(0,1), logits / sqrt(width)"
    finish(axis, title, rows["width"], ylim=(0, 1.05), ylabel="numerical rank / n")


def draw_sharpness(axis: Axes, rows: pd.DataFrame) -> None:
    n = int(rows.n.max())
    means = rows[rows.n == n].groupby(["mask", "sharpness"]).mean(numeric_only=True)
    free, causal = means.loc["none"], means.loc["causal"]
    for place, name in enumerate(TOLERANCES):
        axis.plot(free.index, free[f"rank_{name}"] / n, **style(place), label=f"rank, {name} tolerance")
    axis.plot(free.index, free.effective_rank / n, **style(6), label="effective rank")
    axis.plot(causal.index, causal.effective_rank / n, **style(7), label="effective rank, causal")
    axis.axvline(math.sqrt(2 * math.log(n)), **GREY, linestyle=":", label="freezing, sqrt(2 ln n)")
    level(axis, 1 - 1 / math.e, "0.63 n: hard (published)")
    level(axis, 0.5, "0.50 n: hard, causal")
    xlabel = "standard deviation of the logits (1 is the usual initialisation at its most)"
    title = f"Softmax of independent logits, n = {n}"
    finish(axis, title, xscale="log", ylim=(0, 1.05), xlabel=xlabel, ylabel="rank / n")


def soft_figure(table: pd.DataFrame) -> Figure:
    """Soft maps of random heads: three measures against width, by n; then the two laws of very soft maps."""
    figure, axes = new_figure(2, 3, 14.5, 8.5)
    free, causal = table[table["mask"] == "none"], table[table["mask"] == "causal"]
    rows = free[free.kind == "width"]
    rows = rows[rows.sharpness == rows.sharpness.min()]
    title = f"softmax, logits of deviation {rows.sharpness.min():g}"
    names = {"rank_float32": "rank, float32 tolerance", "rank_0.01": "rank, tolerance 0.01"}
    names["effective_rank"] = "effective rank"
    for axis, (column, name) in zip(axes[0], names.items(), strict=True):
        draw_sizes(axis, rows.assign(share=rows[column] / rows.n), "share", sorted(rows.n.unique()))
        axis.plot([], [], "o", color="0.3", markerfacecolor="white", label="hollow: QK-norm")
        level(axis, 0.63, "0.63 n")
        finish(axis, title, rows["width"], ylim=(0, 1.05), ylabel=f"{name} / n")
    draw_causal(axes[1, 0], causal[causal.kind == "width"])
    draw_degrees(axes[1, 1], table[table.kind == "soft"])
    draw_stable(axes[1, 2], free[free.kind == "sharpness"])
    for axis in (axes[0, 2], *axes[1]):
        axis.legend()
    figure.suptitle("Soft maps: rank is a matter of tolerance")
    return figure


def draw_causal(axis: Axes, rows: pd.DataFrame) -> None:
    n = int(rows.n.max())
    rows = rows[rows.n == n]
    draw_deviations(axis, rows.assign(share=rows.effective_rank / n), "width", "share", range(9))
    free = content_free_share("effective_rank", n, True)
    level(axis, free, f"causal and content-free, 1/i: {free:.3f}", 0.99)
    finish(axis, f"causal softmax, n = {n}", rows["width"], ylim=(0, 0.75), ylabel="effective rank / n")


def draw_degrees(axis: Axes, rows: pd.DataFrame) -> None:
    n, points = int(rows.n.iloc[0]), rows.groupby("width").mean(numeric_only=True)
    widths = [int(width) for width in points.index]
    axis.plot(widths, points.rank_float64, **style(0), label="float64 tolerance")
    axis.plot(widths, points.rank_float32, **style(1), label="float32 tolerance")
    for degree, line in ((7, "-"), (2, ":")):
        law = [math.comb(width + degree, degree) for width in widths]
        axis.plot(widths, law, line, **LAW, label=f"C(width + {degree}, {degree})")
    level(axis, n, f"n = {n}")
    title = f"very soft: deviation {rows.sharpness.iloc[0]:g}, a polynomial's rank"
    finish(axis, title, yscale="log", xticks=widths, ylabel="numerical rank")


def draw_stable(axis: Axes, rows: pd.DataFrame) -> None:
    n = int(rows.n.max())
    points = rows[rows.n == n].groupby("sharpness").mean(numeric_only=True)
    axis.plot(points.index, points.stable_rank, **style(0), label="stable rank")
    fine = np.geomspace(points.index.min(), math.sqrt(math.log(n)), 100)
    axis.plot(fine, np.exp(fine**2), **LAW, label="e^(s^2), for s^2 < ln n")
    axis.plot(points.index, points.second_singular, **style(6), label="second singular value")
    axis.plot(fine, 2 * np.sqrt(np.expm1(fine**2) / n), ":", color="0.4", label="2 sqrt((e^(s^2) - 1)/n)")
    labels: dict[str, Any] = {"xlabel": "standard deviation s of the logits", "ylabel": "stable rank; singular value"}
    ylim = (points.second_singular.min() / 2, n)
    finish(axis, f"softmax of independent logits, n = {n}", xscale="log", yscale="log", ylim=ylim, **labels)


def claims(table: pd.DataFrame, scale: str) -> Sequence[Claim]:
    parts = (ceiling_claims, masked_claims, width_claims, paper_claims, soft_claims)
    return [claim for part in parts for claim in part(table)]


def ceiling_claims(table: pd.DataFrame) -> Iterator[Claim]:
    hard = table[(table.kind == "hard") & (table["mask"] == "none")]
    free = hard[hard["keys"] == "free"].groupby("n").coverage.mean()
    spectrum = table[table.kind == "spectrum"]
    n = int(spectrum.n.iloc[0])
    shares = spectrum[["effective_rank", "effective_rank_of_squares", "participation_ratio"]].mean() / n
    yield published(
        "Hard attention of independent scores has a rank of 0.63 n, for every n",
        "Theorem 1 (occupancy)",
        "0.63 n",
        ", ".join(f"n {n}: {value:.3f}" for n, value in free.items()),
        ((free - 0.632).abs() < 0.015).all(),
        "Required: within 0.015 of 0.632. n(1 - (1 - 1/n)^n) is 0.635 n at 64 and tends to 1 - 1/e.",
    )
    yield unpublished(
        "The rank of a hard map is the number of its columns that are chosen, its singular values the roots of how often",
        f"n {n}: {int(spectrum.unequal.sum())} maps unequal, singular values off by {spectrum.error.max():.0e} at most",
        spectrum.unequal.sum() == 0 and spectrum.error.max() < 1e-9,
        "Required: equal, and within 1e-9.",
    )
    yield unpublished(
        "Other measures of the same maps have other ceilings: effective rank 0.615, of squares 0.564, participation "
        "ratio 0.500 of n",
        ", ".join(f"{value:.3f}" for value in shares) + f" (n {n})",
        (shares - [0.6153, 0.5636, 0.5]).abs().max() < 0.015,
        "Required: within 0.015.",
    )


def masked_claims(table: pd.DataFrame) -> Iterator[Claim]:
    masked = table[(table.kind == "hard") & (table["mask"] != "none") & (table["keys"] == "free")]
    for (mask, window, n), rows in masked.groupby(["mask", "window", "n"]):
        value, law, causal = rows.coverage.mean(), rows.ceiling.iloc[0], mask == "causal"
        what = "Causal hard attention" if causal else f"Hard attention to the last {int(window)} tokens"
        yield Claim(
            f"{what} has a rank of {law:.3f} n",
            "ours; the barrier as published knows no mask",
            "0.63 n",
            f"n {n}: {value:.3f}",
            abs(value - law) < 0.01,
            "Required: within 0.01." + " The published number does not carry over to decoders." * causal,
        )


def width_claims(table: pd.DataFrame) -> Iterator[Claim]:
    hard = table[(table.kind == "hard") & (table["mask"] == "none") & (table["keys"] != "free")]
    share = hard.assign(share=hard.coverage / hard.ceiling).groupby(["keys", "n", "width"]).share.mean()
    small, widest, sizes = 8, int(hard["width"].max()), sorted(hard.n.unique())
    seen = share["gaussian"].unstack()
    grows = (seen.diff(axis=1).iloc[:, 1:] > -0.02).all().all()
    wide = hard[hard["width"] >= 8]
    error = (wide.coverage - wide.law).abs().max()
    yield published(
        "The rank of hard maps grows with the width of a head up to its ceiling and not beyond (Gaussian keys)",
        "Section 2.1 (rank against head dimension)",
        "rises to 0.63 n",
        f"share of the ceiling at width {small} and {widest}: "
        + ", ".join(f"n {n}: {seen.loc[n, small]:.2f}, {seen.loc[n, widest]:.2f}" for n in (sizes[0], sizes[-1])),
        grows and seen.max().max() < 1.03,
        "Required: no step down by more than 0.02, and at most 1.03 of the ceiling.",
    )
    yield unpublished(
        f"With keys of unit length (QK-norm) width {small} is enough for 96 % of the ceiling, whatever n",
        ", ".join(f"n {n}: {share['unit', n, small]:.2f}" for n in sizes),
        all(share["unit", n, small] > 0.96 for n in sizes),
        "Required: more than 0.96 for every n. What keeps narrow heads low is the spread of the lengths of their keys.",
    )
    yield unpublished(
        "Mean-field coverage predicts the simulated rank, widths from 8",
        f"at most {error:.3f} n off",
        error < 0.02,
        "Required: at most 0.02 n.",
    )


def paper_claims(table: pd.DataFrame) -> Iterator[Claim]:
    rows = table[table.kind == "paper"].groupby(["inputs", "temperature", "width"]).mean(numeric_only=True)
    n, widths = PAPER_N, sorted(table[table.kind == "paper"]["width"].dropna().unique())
    first, last = widths[0], widths[-1]
    loud, quiet, cold = (rows.loc[which] for which in (("gaussian", 1.0), ("orthonormal", 1.0), ("orthonormal", 0.01)))
    curve = ", ".join(f"{int(width)}: {loud.rank_float32[width] / n:.2f}" for width in widths)
    yield published(
        "Softmax maps of random weights have a rank that rises with head width and stops near 0.63 n (n = 100, widths "
        "up to 192)",
        "Section 2.1",
        "0.63 n",
        f"{curve} (float32 tolerance, logits of deviation {loud.sharpness[last]:.0f})",
        abs(loud.rank_float32[last] / n - 0.63) < CEILING and loud.rank_float32[first] / n < 0.2,
        f"Required: within {CEILING}. X and W of variance 1, unscaled, model width 512: the logits are so large that softmax "
        "is nearly hard. The published text does not give dtype, tolerance, temperature or scale of weights.",
    )
    yield published(
        "The barrier holds for almost orthonormal tokens, the assumption of the theorem, at temperature sqrt(width)",
        "Theorem 1 (proved for temperature to zero)",
        "0.63 n",
        f"width {int(last)}: {quiet.rank_float32[last] / n:.2f} n (float32 tolerance), {quiet['rank_0.01'][last] / n:.2f} n "
        f"(0.01); with a hundredth of the temperature {cold.rank_float32[last] / n:.2f} n; hard "
        f"{quiet.argmax_coverage[last] / n:.2f} n",
        abs(quiet.rank_float32[last] / n - 0.63) < CEILING,
        f"Required: within {CEILING} of 0.63 n at float32 tolerance. With orthonormal tokens the logits have deviation 1, and "
        "softmax maps have full rank: the theorem is about hard maps, and Lemma 1 needs a temperature far below the usual one.",
    )
    yield published(
        "Without softmax the rank of the scores is the width of the head, up to n",
        "a reviewer's remark",
        "min(n, width)",
        ", ".join(f"{int(width)}: {loud.logit_rank[width]:.0f}" for width in widths),
        all(abs(loud.logit_rank[width] - min(n, width)) < 0.5 for width in widths),
        "Required: equal.",
    )
    yield published(
        "At width 1 softmax lifts rank 1 to n, then comes a dip, then growth to 0.63 n",
        "a reviewer's remark",
        "n, dip, 0.63 n",
        f"width 1: {loud.rank_float64[first] / n:.2f} n at float64 tolerance, {loud.rank_float32[first] / n:.2f} n at "
        "float32, and growth from there",
        loud.rank_float64[first] > 0.9 * n,
        "Required: above 0.9 n at width 1. True in exact arithmetic only: exp(qk) is totally positive, but its singular "
        "values fall below any tolerance.",
    )


def soft_claims(table: pd.DataFrame) -> Iterator[Claim]:
    rows = table[(table.kind == "sharpness") & (table["mask"] == "none")]
    rows = rows.groupby(["n", "sharpness"]).mean(numeric_only=True)
    sizes = sorted({n for n, _ in rows.index})
    one = {n: rows.loc[(n, 1.0)] for n in sizes}
    sharpest = {n: rows.loc[n].index.max() for n in sizes}
    named = {f"rank_{name}": name for name in TOLERANCES}
    sharp = {n: rows.loc[(n, sharpest[n])][list(named)].rename(named) / n for n in sizes}
    stable, known = rows.loc[(sizes[-1], 0.5)], math.exp(0.25)
    edge = 2 * math.sqrt((known - 1) / sizes[-1])
    soft = table[table.kind == "soft"].groupby("width").rank_float64.mean()
    powers = {width: math.comb(int(width) + 7, 7) for width in soft.index}
    yield Claim(
        "At the usual sharpness (logits of deviation 1) softmax maps have full rank at float32 tolerance",
        "ours; against the barrier as published",
        "0.63 n",
        ", ".join(
            f"n {n}: {row.rank_float32 / n:.3f}, at tolerance 0.1 {row['rank_0.1'] / n:.2f}" for n, row in one.items()
        ),
        all(row.rank_float32 >= 0.99 * n for n, row in one.items()),
        "Required: at least 0.99 n. A rank of soft maps is a statement about a tolerance.",
    )
    yield published(
        "Sharper logits bring every tolerance to 0.63 n",
        "Lemma 1 (softmax near hardmax)",
        "0.63 n",
        "; ".join(
            f"n {n}, deviation {sharpest[n]:g}: " + ", ".join(f"{name} {share:.3f}" for name, share in own.items())
            for n, own in sharp.items()
        ),
        all((own - 0.63).abs().max() < CEILING for own in sharp.values()),
        f"Required: within {CEILING}, at the tolerances of both dtypes, 0.001, 0.01 and 0.1.",
    )
    yield unpublished(
        "Soft maps (deviation s of the logits, s^2 < ln n) have stable rank e^(s^2) and second singular value "
        "2 sqrt((e^(s^2) - 1)/n)",
        f"{stable.stable_rank:.3f} ({known:.3f}), {stable.second_singular:.4f} ({edge:.4f}) at s 0.5, n {sizes[-1]}",
        abs(stable.stable_rank / known - 1) < 0.02 and abs(stable.second_singular / edge - 1) < 0.07,
        "Required: within 2 % and 7 %. In brackets the law.",
    )
    yield unpublished(
        f"Very soft maps (deviation {SOFT}) have the rank of a polynomial: C(width + 7, 7) at float64 tolerance",
        ", ".join(f"{int(width)}: {rank:.0f} of {powers[width]}" for width, rank in soft.items()),
        all(abs(soft[width] - count) <= max(1, POLYNOMIAL_RANK * count) for width, count in powers.items()),
        f"Required: within {POLYNOMIAL_RANK:.0%} or 1 at every width. It says why the rank of soft maps grows fast with "
        "width, but from width 3 on part of the monomials of the highest degrees are below the tolerance.",
    )
