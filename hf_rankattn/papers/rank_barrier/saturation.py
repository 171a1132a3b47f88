"""The width from which more width adds no rank, against the number of tokens: ln n, or (ln n)^2."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim


NAME = "saturation"
SHOWS = "head width at which the rank of random maps reaches 50, 75, 90 % of its ceiling, against n, with both laws"
REVISION = 1
SOURCE = "A Rank Perspective"

REACHED = (0.5, 0.75, 0.9)
GAUSSIAN = [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256]
UNIT = [2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64]
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "hard": [64, 512], "columns": 6144, "gaussian": [3, 4, 5, 6, 9, 12, 15, 32, 64, 128], "unit": [2, 3, 4, 8],
        "soft": [], "draws": 1,
    },
    "laptop": {
        "hard": [32, 64, 128, 256, 512, 1024, 2048, 4096], "columns": 32768, "gaussian": GAUSSIAN, "unit": UNIT,
        "soft": [64, 128, 256, 512], "draws": 3,
    },
    "paper": {
        "hard": [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384], "columns": 262144,
        "gaussian": [*GAUSSIAN, 320, 384, 512, 768, 1024], "unit": UNIT, "soft": [64, 128, 256, 512, 1024, 2048], "draws": 8,
    },
}  # fmt: skip


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, draws = SETTINGS[scale], list(range(seeds or 1))
    found = []
    for axis in grid(n=setting["hard"], keys=["gaussian", "unit"], seed=draws):
        many = max(2, setting["columns"] // axis["n"])
        found.append(
            Cell(
                {"kind": "hard", **axis, "sharpness": None, "widths": setting[axis["keys"]], "draws": many},
                cost=many * axis["n"] ** 2,
            )
        )
    for axis in grid(n=setting["soft"], keys=["gaussian", "unit"], sharpness=[1.0, 3.0], seed=draws):
        found.append(
            Cell(
                {"kind": "soft", **axis, "widths": setting[axis["keys"]], "draws": setting["draws"]},
                cost=setting["draws"] * axis["n"] ** 3,
            )
        )
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """A row for each width with the rank over n, then one for each share of the ceiling with the width it takes."""
    shares = (hard_shares if parameters["kind"] == "hard" else soft_shares)(parameters)
    *values, ceiling = shares
    rows: list[dict[str, Any]] = [
        {"what": "curve", "width": width, "value": value, "ceiling": ceiling}
        for width, value in zip(parameters["widths"], values, strict=True)
    ]
    for reached in REACHED:
        width = crossing(parameters["widths"], values, reached * ceiling)
        rows.append({"what": "width", "reached": reached, "width": width, "ceiling": ceiling})
    return rows


def hard_shares(parameters: Mapping[str, Any]) -> list[float]:
    """Columns hit, over n, for each width; and the ceiling that is known."""
    from ...theory import distinct_columns
    from ._random_maps import KEYS, generator, hard_columns

    n, keys = parameters["n"], parameters["keys"]
    found = []
    for width in parameters["widths"]:
        rng = generator(parameters["seed"], n, width, KEYS.index(keys), 7)
        draws = [hard_columns(n, width, keys, rng) for _ in range(parameters["draws"])]
        found.append(sum(draws) / len(draws) / n)
    return [*found, distinct_columns(n) / n]


def soft_shares(parameters: Mapping[str, Any]) -> list[float]:
    """Effective rank over n of softmax maps for each width; and that of independent logits, the ceiling."""
    import torch

    from ._random_maps import generator, random_heads

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
    if values[0] >= goal:
        return float(widths[0])
    for place in range(1, len(widths)):
        low, high = values[place - 1], values[place]
        if high >= goal:
            return float(widths[place - 1] * (widths[place] / widths[place - 1]) ** ((goal - low) / (high - low)))
    return None


def complete(table):
    """Both laws beside the widths that were found: ln n, and m^4/2 of the largest of n normal numbers."""
    from ...theory import expected_maximum

    n = table["n"].map(int)
    return table.assign(
        log_n=n.map(math.log), half_m4=n.map({size: expected_maximum(size) ** 4 / 2 for size in n.unique()})
    )


def figures(table, scale: str):
    from ._figures import saturation_figure

    return {"saturation": saturation_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    from ...report.plots import published_table

    widths = table[(table.what == "width") & table["width"].notna()]
    hard = widths[(widths.kind == "hard") & (widths["keys"] == "gaussian")]
    halves = hard[hard.reached == 0.5].groupby("n").mean(numeric_only=True)
    small, large = (64, 512) if {64, 512} <= set(halves.index) else (halves.index[0], halves.index[-1])
    ratio, expected = halves["width"][large] / halves["width"][small], math.log(large) / math.log(small)
    square = halves.half_m4[large] / halves.half_m4[small]
    found = [
        Claim(
            "Rank saturates from a width that grows at least like ln n (Gaussian keys, hard maps)",
            f"{SOURCE}, model reduction",
            "Omega(log n)",
            "half of the ceiling at " + ", ".join(f"n {n}: {width:.1f}" for n, width in halves["width"].items()),
            bool(ratio >= expected * 0.95),
            f"Required: a growth of at least {0.95 * expected:.2f} from n = {small} to {large}, 95 % of that of ln n.",
        ),
        Claim(
            f"The width that saturates is a constant times ln n: from n = {small} to {large} it grows by ln {large} / ln {small} = "
            f"{expected:.2f}",
            f"{SOURCE}, model reduction (read as a rule by us; no factor is published)",
            "",
            f"{ratio:.2f}; (ln n)^2 as m_n^4/2: {square:.2f}",
            bool(abs(ratio - expected) < 0.25),
            "Required: within 0.25. It grows like (ln n)^2: a lower bound is not contradicted, a rule of thumb is.",
        ),
    ]
    for reached, name in zip(REACHED, ("d50", "d75", "d90"), strict=True):
        rows = hard[hard.reached == reached].groupby("n").mean(numeric_only=True)
        rows = rows[rows.index >= 64]
        drift = {law: rows["width"] / rows[law] for law in ("log_n", "half_m4")}
        spread = {law: values.max() / values.min() for law, values in drift.items()}
        found.append(
            Claim(
                f"The width of {reached:.0%} of the ceiling is a constant times m_n^4/2, not times ln n (n from 64)",
                "ours",
                "",
                f"over m^4/2 {drift['half_m4'].min():.2f} to {drift['half_m4'].max():.2f}; over ln n "
                f"{drift['log_n'].min():.1f} to {drift['log_n'].max():.1f}",
                bool(spread["half_m4"] < 1.25 < spread["log_n"]),
                "Required: the largest is less than 1.25 times the smallest, and more with ln n.",
            )
        )
        earlier = published_table("saturation").set_index("n")[name]
        error = (rows["width"] / earlier.reindex(rows.index) - 1).abs().max()
        found.append(
            Claim(
                f"Simulated widths of {reached:.0%} of the ceiling are those of an earlier simulation",
                "ours",
                "",
                ", ".join(f"{n}: {width:.3g} ({earlier.get(n, math.nan):g})" for n, width in rows["width"].items()),
                bool(error < 0.12),
                "Required: within 12 %. In brackets the earlier simulation.",
            )
        )
    unit = (
        widths[(widths.kind == "hard") & (widths["keys"] == "unit") & (widths.reached == 0.9)]
        .groupby("n")["width"]
        .mean()
    )
    found.append(
        Claim(
            "With keys of unit length (QK-norm) the width of 90 % of the ceiling does not depend on n",
            "ours",
            "",
            ", ".join(f"n {n}: {width:.1f}" for n, width in unit.items()),
            bool(unit.max() < 4 and unit.max() - unit.min() < 1),
            "Required: widths that differ by less than 1.",
        )
    )
    soft = widths[(widths.kind == "soft") & (widths.reached == 0.75) & (widths.sharpness == 3)]
    if len(soft):
        by = soft.groupby(["keys", "n"])["width"].mean()
        per_log = {keys: by[keys] / [math.log(n) for n in by[keys].index] for keys in ("gaussian", "unit")}
        found.append(
            Claim(
                "Soft maps (deviation 3, effective rank): with QK-norm the ln n law holds, with Gaussian keys it does not",
                "ours",
                "",
                "; ".join(
                    f"{keys}: {values.iloc[0]:.2f} to {values.iloc[-1]:.2f} ln n" for keys, values in per_log.items()
                ),
                bool(
                    per_log["unit"].max() / per_log["unit"].min() < 1.25
                    and per_log["gaussian"].iloc[-1] / per_log["gaussian"].iloc[0] > 1.25
                ),
                "Required: the multiple of ln n stays within a factor 1.25 with QK-norm, and not without. Width for 75 % of the "
                "effective rank of independent logits; at deviation 1 the law holds with neither.",
            )
        )
    return found
