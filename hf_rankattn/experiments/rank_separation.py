"""Error against rank at equal budgets: one full-rank head against many of low rank, on farthest neighbour."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .grid import Cell, grid
from .points import FORMS, over_seeds, run_training, seeds_of, training_cell, with_published_estimator
from .runner import Claim


NAME = "rank-separation"
SHOWS = "error against rank for several depths and parameter budgets, in the original form and with qk_norm"
REVISION = 1
OPTIONS = ("as_published",)

# budgets as multiples of d^2, the parameters of one projection of an ordinary layer
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "panels": [{"layers": 1, "budgets": ["d^2"]}], "budgets": {"d^2": 1}, "ranks": [8, 4], "forms": ["original", "qk_norm"], "seeds": 1,
        "training": {"dim": 8, "num_points": 4, "intermediate": 32, "steps": 60, "batch_size": 32, "held_out_rows": 256},
    },
    "laptop": {
        # in so few steps three layers do not survive the published learning rate: they end at predicting zero
        "panels": [
            {"layers": 1, "budgets": ["d^2", "d^2.5"]},
            {"layers": 3, "budgets": ["d^2"], "ranks": [16, 8, 1], "learning_rate": 0.003},
        ],
        "budgets": {"d^2": 1, "d^2.5": 4}, "ranks": [16, 8, 4, 1], "forms": list(FORMS), "seeds": 2,
        "training": {"dim": 16, "num_points": 8, "intermediate": 128, "steps": 1500, "batch_size": 128},
    },
    "paper": {
        "panels": [{"layers": layers, "budgets": ["d^2", "d^2.5", "d^3"]} for layers in (1, 3, 5)],
        "budgets": {"d^2": 1, "d^2.5": 8, "d^3": 64}, "ranks": [64, 32, 16, 8, 4, 2, 1],
        "forms": list(FORMS), "seeds": 5,
        "training": {"dim": 64, "num_points": 16, "intermediate": 2048, "steps": 100_000, "batch_size": 256},
    },
}  # fmt: skip
GROUP = ["layers", "budget", "form", "rank", "as_published"]


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    as_published = bool(options.get("as_published"))
    found = []
    for panel in setting["panels"]:
        training = setting["training"] | {"layers": panel["layers"]}
        if "learning_rate" in panel:
            training["learning_rate"] = panel["learning_rate"]
        for axis in grid(
            budget=panel["budgets"],
            form=["original"] if as_published else setting["forms"],
            rank=panel.get("ranks", setting["ranks"]),
            seed=list(range(seeds or setting["seeds"])),
        ):
            heads = training["dim"] * setting["budgets"][axis["budget"]] // axis["rank"]
            labels = {name: axis[name] for name in ("budget", "form", "seed")} | {"as_published": as_published}
            found.append(
                training_cell(
                    labels,
                    **training,
                    heads=heads,
                    rank=axis["rank"],
                    qk_norm=axis["form"] == "qk_norm",
                    **seeds_of(axis["seed"], as_published),
                )  # fmt: skip
            )
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    return run_training(parameters, work)


def complete(table):
    return with_published_estimator(table, GROUP)


def figures(table, scale: str):
    from ..report.benefits import rank_separation_figure

    return {"rank-separation": rank_separation_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    folded = over_seeds(table, GROUP)
    full, found = int(table["dim"].iloc[0]), []
    for (layers, budget, form), rows in folded.groupby(["layers", "budget", "form"], sort=False):
        errors = rows.set_index("rank")["mean"]
        if full not in errors or full // 2 not in errors or errors[[full, full // 2]].isna().any():
            continue
        ratio = errors[full // 2] / errors[full]
        found.append(
            Claim(
                f"{layers} layer{'s' if layers > 1 else ''}, {budget} parameters, {FORM_NAMES[form]}: heads of half rank "
                "err at least 4 times as much as those of full rank",
                "Amsel et al., error against rank",
                published_ratio(layers, budget) if form == "original" else "",
                f"{errors[full // 2]:.3f} / {errors[full]:.4f} = {ratio:.1f}",
                bool(ratio > 4),
                "" if ratio > 4 or scale == "paper" else "Of 1500 steps, where the published runs have 1e5.",
            )
        )
    return [*found, headline(folded)]


def headline(folded) -> Claim:
    """What the paper makes of its own panel, judged where all of it was run."""
    from ..report.plots import published_table

    values = published_table("rank_separation").set_index(["layers", "budget", "rank"]).value
    ours = folded[folded.form == "original"].set_index(["layers", "budget", "rank"])["mean"]
    low, full = (5, "d^3", 32), (1, "d^2", 64)
    whole = low in ours.index and full in ours.index
    times = f"5 layers x 64 = {5 * 64} times the attention parameters, as the code counts"
    return Claim(
        "The best low-rank model (5 layers, d^3, rank 32) is no better than the worst full-rank one that converged (1 layer, d^2), "
        "with 80 times its attention parameters",
        "Amsel et al., error against rank",
        f"{values[low]:.4f} against {values[full]:.4f}; 80 times",
        f"{ours[low]:.4f} against {ours[full]:.4f}; {times}" if whole else times,
        bool(ours[low] > 0.5 * ours[full]) if whole else None,
        "Where the 80 comes from is not known." + ("" if whole else " The errors need --scale paper."),
    )


FORM_NAMES = {"original": "original form", "qk_norm": "qk_norm"}


def published_ratio(layers: int, budget: str) -> str:
    from ..report.plots import published_table

    values = published_table("rank_separation").set_index(["layers", "budget", "rank"]).value
    full, half = values[layers, budget, 64], values[layers, budget, 32]
    return f"{half:.3g} / {full:.3g} = {half / full:.0f} (d 64, N 16)"
