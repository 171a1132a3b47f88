"""Error against training steps: how much sooner unit-norm queries and keys with a learned temperature get there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, judge
from ..sweep.tolerances import SEPARATION_WITH_NORM
from ._points import (
    FORMS,
    errors_by_seed,
    judge_separation,
    run_training,
    seeds_of,
    training_cell,
    with_published_estimator,
)


NAME = "training-speed"
SHOWS = "error against training steps, in the original form and with qk_norm, full and half rank"
REVISION = 1

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "ranks": [8, 4], "steps": {"original": [40], "qk_norm": [20, 40]}, "seeds": 1,
        "training": {"dim": 8, "num_points": 4, "intermediate": 32, "batch_size": 32, "held_out_rows": 256},
    },
    "laptop": {
        "ranks": [16, 8], "steps": dict.fromkeys(FORMS, [250, 500, 1000, 2000]), "seeds": 3,
        "training": {"dim": 16, "num_points": 16, "intermediate": 256, "batch_size": 256},
    },
    "paper": {
        "ranks": [64, 32], "steps": {"original": [3000], "qk_norm": [3000, 10_000]}, "seeds": 1,
        "training": {"dim": 64, "num_points": 16, "intermediate": 2048, "batch_size": 256},
    },
}  # fmt: skip
GROUP = ["form", "rank", "steps"]
PUBLISHED = {"full rank, 1e5 steps": 0.0153, "half rank, 1e5 steps": 0.695, "64 full-rank heads, 1e5 steps": 0.0019}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    found = []
    for form, steps in setting["steps"].items():
        for axis in grid(rank=setting["ranks"], steps=steps, seed=list(range(seeds or setting["seeds"]))):
            training = setting["training"] | {"steps": axis["steps"], "rank": axis["rank"]}
            found.append(
                training_cell(
                    {"form": form, "seed": axis["seed"]},
                    **training,
                    layers=1,
                    heads=training["dim"] // axis["rank"],
                    qk_norm=form == "qk_norm",
                    **seeds_of(axis["seed"], False),
                )  # fmt: skip
            )
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    return run_training(parameters, work)


def complete(table):
    return with_published_estimator(table, GROUP)


def figures(table, scale: str):
    from ._figures import training_speed_figure

    return {"training-speed": training_speed_figure(table, PUBLISHED)}


def claims(table, scale: str) -> Sequence[Claim]:
    errors = errors_by_seed(table, GROUP)
    mean, full, found = errors.mean(), int(table["dim"].iloc[0]), []
    half = full // 2
    steps = sorted(set(mean["qk_norm", full].index) & set(mean["original", full].index))
    for count in steps[-1:]:
        ratio = errors["qk_norm", full, count] / errors["original", full, count]
        found.append(
            judge("error with qk_norm over that without", ratio, most=1, ratio=True).claim(
                f"qk_norm errs less than the original form, one full-rank head, {count} steps",
                "ours",
                "",
                f"{mean['qk_norm', full, count]:.4f} against {mean['original', full, count]:.4f}",
                no="The original form errs less here.",
            )
        )
    for count in sorted(mean["qk_norm", half].index):
        low, high = errors["qk_norm", half, count], errors["qk_norm", full, count]
        found.append(
            judge_separation("qk_norm", low, high, SEPARATION_WITH_NORM).claim(
                f"With qk_norm, half rank is at least {SEPARATION_WITH_NORM:g} times worse than full rank after {count} steps",
                "ours; Amsel et al. for the original form",
                f"{0.695 / 0.0153:.0f} times after 1e5 steps (d 64)",
                f"{low.mean():.3f} / {high.mean():.4f} = {low.mean() / high.mean():.0f}",
                no="So few steps do not bring full rank down far enough.",
            )
        )
    return found
