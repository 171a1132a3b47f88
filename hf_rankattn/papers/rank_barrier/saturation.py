"""The width from which more width adds no rank, against the number of tokens: ln n, or (ln n)^2."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...report.plots import new_figure, published_table
from ...theory import distinct_columns, expected_maximum
from ..drawing import DASHED, level
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, unpublished
from . import published
from ._drawing import LAW, WIDTH, draw_deviations, draw_sizes, finish, style
from ._random_maps import KEYS, generator, hard_columns, random_heads


SHOWS = "head width at which the rank of random maps reaches 50, 75, 90 % of its ceiling, against n, with both laws"

# share of the ceiling -> its column in published/saturation.csv
REACHED = {0.5: "d50", 0.75: "d75", 0.9: "d90"}
GAUSSIAN = [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256]
UNIT = [2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64]
SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"hard": [64, 512], "columns": 6144, "soft": [], "draws": 1}
    | {"gaussian": [3, 4, 5, 6, 9, 12, 15, 32, 64, 128], "unit": [2, 3, 4, 8]},
    "laptop": {"hard": SIZES[:8], "columns": 32768, "soft": SIZES[1:5], "draws": 3}
    | {"gaussian": GAUSSIAN, "unit": UNIT},
    "paper": {"hard": SIZES, "columns": 262144, "soft": SIZES[1:7], "draws": 8}
    | {"gaussian": [*GAUSSIAN, 320, 384, 512, 768, 1024], "unit": UNIT},
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, draws = SETTINGS[scale], list(range(seeds or 1))
    found = []
    for axis in grid(n=setting["hard"], keys=["gaussian", "unit"], seed=draws):
        many = max(2, setting["columns"] // axis["n"])
        parameters = {"kind": "hard", **axis, "sharpness": None, "widths": setting[axis["keys"]], "draws": many}
        found.append(Cell(parameters, cost=many * axis["n"] ** 2))
    for axis in grid(n=setting["soft"], keys=["gaussian", "unit"], sharpness=[1.0, 3.0], seed=draws):
        parameters = {"kind": "soft", **axis, "widths": setting[axis["keys"]], "draws": setting["draws"]}
        found.append(Cell(parameters, cost=setting["draws"] * axis["n"] ** 3))
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """A row for each width with the rank over n, then one for each share of the ceiling with the width it takes."""
    *values, ceiling = (hard_shares if parameters["kind"] == "hard" else soft_shares)(parameters)
    points = zip(parameters["widths"], values, strict=True)
    curve = [{"what": "curve", "width": width, "value": value, "ceiling": ceiling} for width, value in points]
    ends = {reached: crossing(parameters["widths"], values, reached * ceiling) for reached in REACHED}
    return curve + [
        {"what": "width", "reached": reached, "width": width, "ceiling": ceiling} for reached, width in ends.items()
    ]


def hard_shares(parameters: Mapping[str, Any]) -> list[float]:
    """Columns hit, over n, for each width; and the ceiling that is known."""
    n, keys, draws, found = parameters["n"], parameters["keys"], parameters["draws"], []
    for width in parameters["widths"]:
        rng = generator(parameters["seed"], n, width, KEYS.index(keys), 7)
        found.append(sum(hard_columns(n, width, keys, rng) for _ in range(draws)) / draws / n)
    return [*found, distinct_columns(n) / n]


def soft_shares(parameters: Mapping[str, Any]) -> list[float]:
    """Effective rank over n of softmax maps for each width; and that of independent logits, the ceiling."""
    n, keys = parameters["n"], parameters["keys"]
    found = []
    for width in (*parameters["widths"], None):
        rng, total = generator(parameters["seed"], n, width or 0, keys == "unit", 8), 0.0
        for _ in range(parameters["draws"]):
            if width is None:
                logits = torch.randn(n, n, generator=rng)
            else:
                query, key = random_heads(n, width, keys, rng)
                logits = query @ key.T
            singular = torch.linalg.svdvals(torch.softmax(parameters["sharpness"] * logits, -1))
            total += torch.special.entr(singular / singular.sum()).sum().exp().item()
        found.append(total / parameters["draws"] / n)
    return found


def crossing(widths: Sequence[int], values: Sequence[float], goal: float) -> float | None:
    """The width at which a curve first reaches a goal, interpolated in the logarithm of widths; None if it does not.

    >>> crossing([2, 4, 8], [0.1, 0.3, 0.5], 0.4) == 4 * 2**0.5
    True
    """
    place = next((place for place, value in enumerate(values) if value >= goal), None)
    if not place:
        return None if place is None else float(widths[0])
    low, high = values[place - 1], values[place]
    return float(widths[place - 1] * (widths[place] / widths[place - 1]) ** ((goal - low) / (high - low)))


def complete(table: pd.DataFrame) -> pd.DataFrame:
    """Both laws beside the widths that were found: ln n, and m^4/2 of the largest of n normal numbers."""
    n = table["n"].map(int)
    half = {size: expected_maximum(size) ** 4 / 2 for size in n.unique()}
    return table.assign(log_n=n.map(math.log), half_m4=n.map(half))


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """Widths against n with both laws; the same divided by them; and the curves they are read from."""
    widths = table[(table.what == "width") & table["width"].notna()]
    hard, soft = widths[widths.kind == "hard"], widths[widths.kind == "soft"]
    figure, axes = new_figure(2, 2, 12.5, 9.0)
    draw_widths(axes[0, 0], hard)
    draw_ratios(axes[0, 1], hard[hard["keys"] == "gaussian"])
    draw_curves(axes[1, 0], table[(table.what == "curve") & (table.kind == "hard")])
    if len(soft):
        draw_soft_widths(axes[1, 1], soft[soft.reached == 0.75])
    else:
        axes[1, 1].set_axis_off()
    for axis, place in zip(axes.flat, ("upper left", "lower right", "lower right", "upper left"), strict=True):
        if axis.lines:
            axis.legend(loc=place, ncols=2 if axis in axes[0] else 1)
    figure.suptitle("From which head width on does more width add no rank?")
    return {"saturation": figure}


def draw_widths(axis: Axes, hard: pd.DataFrame) -> None:
    earlier = published_table("saturation").set_index("n")
    for place, (reached, column) in zip((0, 5, 6), REACHED.items(), strict=True):
        rows = hard[(hard.reached == reached) & (hard["keys"] == "gaussian")].groupby("n").mean(numeric_only=True)
        look = style(place, linestyle="none")
        axis.plot(rows.index, rows["width"], **look, label=f"{reached:.0%} of the ceiling, Gaussian keys")
        axis.plot(earlier.index, earlier[column], **look | {"markersize": 9}, markerfacecolor="none")
        for law, line in (("half_m4", "-"), ("log_n", ":")) if len(rows) else ():
            factor = rows["width"].iloc[-1] / rows[law].iloc[-1]
            axis.plot(rows.index, factor * rows[law], line, color=look["color"], linewidth=0.9)
    unit = hard[(hard.reached == 0.9) & (hard["keys"] == "unit")].groupby("n")["width"].mean()
    axis.plot(unit.index, unit, **style(8, linestyle="--", markerfacecolor="white"), label="90 %, unit keys (QK-norm)")
    axis.plot([], [], "o", color="0.3", markerfacecolor="none", markersize=9, label="hollow: earlier simulation")
    axis.plot([], [], "-", color="0.3", linewidth=0.9, label="m^4/2 ~ 2 (ln n)^2, through the last point")
    axis.plot([], [], ":", color="0.3", linewidth=0.9, label="ln n (published), through the last point")
    finish(axis, "Hard attention", hard.n, "tokens n", ylabel=WIDTH, yscale="log", ylim=(1.5, 900))


def draw_ratios(axis: Axes, hard: pd.DataFrame) -> None:
    for place, reached in zip((0, 5, 6), REACHED, strict=True):
        rows = hard[hard.reached == reached].groupby("n").mean(numeric_only=True)
        for law, name, line, face in (("half_m4", "(m^4/2)", "-", None), ("log_n", "ln n", ":", "white")):
            ratio = rows["width"] / rows[law]
            look = style(place, linestyle=line, markerfacecolor=face)
            if len(ratio):
                axis.plot(ratio.index, ratio / ratio.iloc[-1], **look, label=f"{reached:.0%}: width / {name}")
    axis.axhline(1, **DASHED)
    ylabel = "width over the law, relative to the largest n"
    finish(axis, "Which law is flat?", hard.n, "tokens n", ylim=(0, 1.5), ylabel=ylabel)


def draw_curves(axis: Axes, rows: pd.DataFrame) -> None:
    sizes = sorted(rows.n.unique())
    shown = sizes if len(sizes) < 5 else sizes[1::2]
    draw_sizes(axis, rows.assign(share=rows.value / rows.ceiling), "share", shown)
    for height in REACHED:
        level(axis, height, f"{height:.0%}", 0.99)
    ylabel = "columns chosen / ceiling n(1 - (1 - 1/n)^n)"
    finish(axis, "Hard attention (hollow: unit keys)", rows["width"], ylim=(0, 1.08), ylabel=ylabel)


def draw_soft_widths(axis: Axes, soft: pd.DataFrame) -> None:
    draw_deviations(axis, soft, "n", "width", (0, 1, 6, 7))
    for _, rows in soft[soft["keys"] == "unit"].groupby("sharpness"):
        points = rows.groupby("n")[["width", "log_n"]].mean()
        axis.plot(points.index, points["width"].iloc[0] / points.log_n.iloc[0] * points.log_n, ":", **LAW)
    axis.plot([], [], ":", **LAW, label="ln n, through the first point")
    ylabel = "width for 75 % of the effective rank of free logits"
    finish(axis, "Softmax, effective rank", soft.n, "tokens n", yscale="log", ylabel=ylabel)


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    widths = table[(table.what == "width") & table["width"].notna()]
    hard = widths[(widths.kind == "hard") & (widths["keys"] == "gaussian")]
    halves = hard[hard.reached == 0.5].groupby("n").mean(numeric_only=True)
    small, large = (64, 512) if {64, 512} <= set(halves.index) else (halves.index[0], halves.index[-1])
    ratio, expected = halves["width"][large] / halves["width"][small], math.log(large) / math.log(small)
    square = halves.half_m4[large] / halves.half_m4[small]
    yield published(
        "Rank saturates from a width that grows at least like ln n (Gaussian keys, hard maps)",
        "model reduction",
        "Omega(log n)",
        "half of the ceiling at " + ", ".join(f"n {n}: {width:.1f}" for n, width in halves["width"].items()),
        ratio >= expected * 0.95,
        f"Required: a growth of at least {0.95 * expected:.2f} from n = {small} to {large}, 95 % of that of ln n.",
    )
    yield published(
        f"The width that saturates is a constant times ln n: from n = {small} to {large} it grows by ln {large} / "
        f"ln {small} = {expected:.2f}",
        "model reduction (read as a rule by us; no factor is published)",
        "",
        f"{ratio:.2f}; (ln n)^2 as m_n^4/2: {square:.2f}",
        abs(ratio - expected) < 0.25,
        "Required: within 0.25. It grows like (ln n)^2: a lower bound is not contradicted, a rule of thumb is.",
    )
    for reached, name in REACHED.items():
        rows = hard[hard.reached == reached].groupby("n").mean(numeric_only=True)
        rows = rows[rows.index >= 64]
        square, log = rows["width"] / rows.half_m4, rows["width"] / rows.log_n
        earlier = published_table("saturation").set_index("n")[name]
        error = (rows["width"] / earlier.reindex(rows.index) - 1).abs().max()
        yield unpublished(
            f"The width of {reached:.0%} of the ceiling is a constant times m_n^4/2, not times ln n (n from 64)",
            f"over m^4/2 {square.min():.2f} to {square.max():.2f}; over ln n {log.min():.1f} to {log.max():.1f}",
            square.max() / square.min() < 1.25 < log.max() / log.min(),
            "Required: the largest is less than 1.25 times the smallest, and more with ln n.",
        )
        yield unpublished(
            f"Simulated widths of {reached:.0%} of the ceiling are those of an earlier simulation",
            ", ".join(f"{n}: {width:.3g} ({earlier.get(n, math.nan):g})" for n, width in rows["width"].items()),
            error < 0.12,
            "Required: within 12 %. In brackets the earlier simulation.",
        )
    unit = widths[(widths.kind == "hard") & (widths["keys"] == "unit") & (widths.reached == 0.9)]
    unit = unit.groupby("n")["width"].mean()
    yield unpublished(
        "With keys of unit length (QK-norm) the width of 90 % of the ceiling does not depend on n",
        ", ".join(f"n {n}: {width:.1f}" for n, width in unit.items()),
        unit.max() < 4 and unit.max() - unit.min() < 1,
        "Required: widths that differ by less than 1.",
    )
    soft = widths[(widths.kind == "soft") & (widths.reached == 0.75) & (widths.sharpness == 3)]
    if len(soft):
        by = soft.groupby(["keys", "n"])["width"].mean()
        per_log = {keys: by[keys] / [math.log(n) for n in by[keys].index] for keys in ("gaussian", "unit")}
        normed, plain = per_log["unit"], per_log["gaussian"]
        yield unpublished(
            "Soft maps (deviation 3, effective rank): with QK-norm the ln n law holds, with Gaussian keys it does not",
            "; ".join(f"{keys}: {own.iloc[0]:.2f} to {own.iloc[-1]:.2f} ln n" for keys, own in per_log.items()),
            normed.max() / normed.min() < 1.25 and plain.iloc[-1] / plain.iloc[0] > 1.25,
            "Required: the multiple of ln n stays within a factor 1.25 with QK-norm, and not without. Width for 75 % of the "
            "effective rank of independent logits; at deviation 1 the law holds with neither.",
        )
