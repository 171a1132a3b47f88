"""Error against training steps: how much sooner unit-norm queries and keys with a learned temperature get there."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...report.plots import STYLES, new_figure
from ..drawing import level, log_ticks, plural
from ..sweep.grid import Cell
from ..sweep.judging import Claim, judge
from ..sweep.tolerances import SEPARATION_WITH_NORM
from ._curves import ERROR_LABEL, draw_runs
from ._points import FORMS, TRAINING, errors_by_seed, estimator_by, judge_separation, run_training, training_cells


SHOWS = "error against training steps, in the original form and with qk_norm, full and half rank"

LAPTOP = {"num_points": 16, "intermediate": 256, "batch_size": 256}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"ranks": [8, 4], "steps": {"original": [40], "qk_norm": [20, 40]}, "seeds": 1},
    "laptop": {
        "ranks": [16, 8],
        "steps": dict.fromkeys(FORMS, [250, 500, 1000, 2000]),
        "seeds": 3,
        "training": LAPTOP,
    },
    "paper": {"ranks": [64, 32], "steps": {"original": [3000], "qk_norm": [3000, 10_000]}, "seeds": 1},
}
GROUP = ["form", "rank", "steps"]
PUBLISHED = {"full rank, 1e5 steps": 0.0153, "half rank, 1e5 steps": 0.695, "64 full-rank heads, 1e5 steps": 0.0019}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, found = SETTINGS[scale], []
    training = TRAINING[scale] | setting.get("training", {}) | {"layers": 1}
    for form, steps in setting["steps"].items():
        found += training_cells(
            lambda axis: {**training, "heads": training["dim"] // axis["rank"]},
            seeds or setting["seeds"],
            form=form,
            rank=setting["ranks"],
            steps=steps,
        )
    return found


run = run_training
complete = estimator_by(*GROUP)


def figures(table, scale: str):
    figure, axes = new_figure(1, 1, 7.5, 5.0)
    axis = axes[0, 0]
    for ((form, rank), rows), style in zip(table.groupby(["form", "rank"], sort=False), STYLES, strict=False):
        draw_runs(axis, rows, "steps", style, f"{form}: {plural(int(rows.heads.iloc[0]), 'head')} of rank {rank}")
    for name, value in PUBLISHED.items():
        level(axis, value, f"published, d 64: {name}, {value}", 0.99)
    log_ticks(axis, table.steps, base=10)
    axis.set(yscale="log", ylabel=ERROR_LABEL, xlabel="training steps (each point is a run with its own schedule)")
    axis.legend(loc="lower left")
    first = table.iloc[0]
    figure.suptitle(f"One layer on the farthest of {int(first.num_points)} points, d {int(first['dim'])}")
    return {"training-speed": figure}


def claims(table, scale: str) -> Iterator[Claim]:
    errors = errors_by_seed(table, GROUP)
    mean, full = errors.mean(), int(table["dim"].iloc[0])
    half = full // 2
    steps = sorted(set(mean["qk_norm", full].index) & set(mean["original", full].index))
    for count in steps[-1:]:
        ratio = errors["qk_norm", full, count] / errors["original", full, count]
        yield judge("error with qk_norm over that without", ratio, most=1, ratio=True).unpublished(
            f"qk_norm errs less than the original form, one full-rank head, {count} steps",
            "ours",
            f"{mean['qk_norm', full, count]:.4f} against {mean['original', full, count]:.4f}",
            no="The original form errs less here.",
        )
    for count in sorted(mean["qk_norm", half].index):
        low, high = errors["qk_norm", half, count], errors["qk_norm", full, count]
        yield judge_separation("qk_norm", low, high, SEPARATION_WITH_NORM).claim(
            f"With qk_norm, half rank is at least {SEPARATION_WITH_NORM:g} times worse than full rank after {count} steps",
            "ours; Amsel et al. for the original form",
            f"{0.695 / 0.0153:.0f} times after 1e5 steps (d 64)",
            f"{low.mean():.3f} / {high.mean():.4f} = {low.mean() / high.mean():.0f}",
            no="So few steps do not bring full rank down far enough.",
        )
