"""Error against rank for longer and longer rows of points: what depth repairs for few points, it does not for many."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, judge
from ..sweep.tolerances import GROWTH_WITH_POINTS, SEPARATION
from ._points import (
    FORMS,
    errors_by_seed,
    judge_separation,
    run_training,
    seeds_of,
    training_cell,
    with_published_estimator,
)


NAME = "context-length"
SHOWS = "error against rank for rows of 4 to 256 points, two layers, in the original form and with qk_norm"
REVISION = 1
OPTIONS = ("as_published",)

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "points": [3, 4], "ranks": [8, 1], "multiple": 1, "forms": ["original"], "seeds": 1,
        "training": {"dim": 8, "intermediate": 32, "steps": 60, "batch_size": 32, "held_out_rows": 256},
    },
    "laptop": {
        # many heads, as published: with few of them half rank errs as much on 4 points as on 32
        "points": [4, 16, 32], "ranks": [16, 8], "multiple": 8, "forms": list(FORMS), "seeds": 3,
        "training": {
            "dim": 16, "intermediate": 128, "steps": 1500, "batch_size": 64, "learning_rate": 0.005, "held_out_rows": 1024,
        },
    },
    "paper": {
        "points": [4, 16, 64, 256], "ranks": [64, 32, 16, 8, 1], "multiple": 64, "forms": list(FORMS), "seeds": 5,
        "training": {
            "dim": 64, "intermediate": 2048, "steps": 200_000, "batch_size": 256, "learning_rate": 0.005,
            "held_out_rows": 1024,
        },
    },
}  # fmt: skip
GROUP = ["num_points", "form", "rank", "as_published"]
LAYERS = 2


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    as_published = bool(options.get("as_published"))
    found = []
    for axis in grid(
        num_points=setting["points"],
        form=["original"] if as_published else setting["forms"],
        rank=setting["ranks"],
        seed=list(range(seeds or setting["seeds"])),
    ):
        heads = setting["training"]["dim"] * setting["multiple"] // axis["rank"]
        labels = {"form": axis["form"], "seed": axis["seed"], "as_published": as_published}
        found.append(
            training_cell(
                labels,
                **setting["training"],
                num_points=axis["num_points"],
                layers=LAYERS,
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
    from ._figures import context_length_figure

    return {"context-length": context_length_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    from ...report.plots import published_table

    published = published_table("context_length").set_index(["num_points", "rank"]).value
    full, found = int(table["dim"].iloc[0]), []
    for form, rows in table.groupby("form", sort=False):
        errors = errors_by_seed(rows, ["num_points", "rank"])
        mean = errors.mean()
        shortest, longest = int(rows.num_points.min()), int(rows.num_points.max())
        low = int(rows[rows["rank"] < full]["rank"].max())
        grows = errors[longest, low] / errors[shortest, low]
        steps = f"These runs have {int(rows.steps.iloc[0])} steps, the published ones 2e5."
        found.append(
            judge(
                f"error at N {longest} over that at N {shortest}", grows, least=GROWTH_WITH_POINTS, ratio=True
            ).claim(
                f"Two layers, {form}: the error of heads of half rank grows with the number of points",
                "Amsel et al., Conjecture 8 (error against rank for several N)",
                f"N 4: {published[4, 32]:.3g}, N 256: {published[256, 32]:.3g} (d 64)",
                f"N {shortest}: {mean[shortest, low]:.3g}, N {longest}: {mean[longest, low]:.3g}",
                no=steps,
            )
        )
        found.append(
            judge_separation(form, errors[longest, low], errors[longest, full], SEPARATION).claim(
                f"Two layers, {form}: at the largest N, full rank is at least {SEPARATION:g} times better than half rank",
                "Amsel et al., context length",
                f"{published[256, 32]:.3g} / {published[256, 64]:.3g} = {published[256, 32] / published[256, 64]:.0f}",
                f"{mean[longest, low]:.3g} / {mean[longest, full]:.3g} = {mean[longest, low] / mean[longest, full]:.1f}",
                no=steps,
            )
        )
    return found
