"""What the experiments that train point encoders share: cells from settings, one row a run, errors by seed."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd

from ..sweep.grid import Cell, grid
from ..sweep.judging import Judgement, judge, not_testable
from ..sweep.tolerances import TRAINED_ERROR
from ._training import PointTraining, train_points


FORMS = ["original", "qk_norm"]
# The published runs all start from the same weights and replay the same 100 batches.
PUBLISHED_RUNS = {"init_seed": 613, "replay": 100, "equal_layers": True}
TRAINING_FIELDS = {field.name for field in fields(PointTraining)}
# Most experiments train with these sizes; the settings of an experiment hold what differs.
TRAINING: dict[str, dict[str, Any]] = {
    "smoke": {"dim": 8, "num_points": 4, "intermediate": 32, "steps": 60, "batch_size": 32, "held_out_rows": 256},
    "laptop": {"dim": 16, "num_points": 8, "intermediate": 128, "steps": 1500, "batch_size": 128},
    "paper": {"dim": 64, "num_points": 16, "intermediate": 2048, "steps": 100_000, "batch_size": 256},
}


def training_cells(
    training_of_axis: Callable[[dict[str, Any]], Mapping[str, Any]],
    seeds: int,
    options: Mapping[str, Any] | None = None,
    **axes: Any,
) -> list[Cell]:
    """A cell for each combination of the axes and of the seeds.

    Args:
        training_of_axis: Takes one combination, and returns the fields of [`PointTraining`] that are no axis.
        seeds: The number of seeds. A seed is that of the weights and of the rows.
        options: Those of the command line, for experiments that know `as_published`.
        axes: As for [`grid`]. Axes that are no field of [`PointTraining`] are columns of the table; `form` sets `qk_norm`.
    """
    axes["seed"] = list(range(seeds))
    as_published = bool(options and options.get("as_published"))
    if options is not None:
        axes["as_published"] = as_published
    if as_published:
        axes["form"] = "original"
    found = []
    for axis in grid(**axes):
        seed = axis["seed"]
        training = {"init_seed": seed, "data_seed": seed, "qk_norm": axis.get("form") == "qk_norm"}
        training |= PUBLISHED_RUNS if as_published else {}
        training |= {name: value for name, value in axis.items() if name in TRAINING_FIELDS}
        labels = {name: value for name, value in axis.items() if name not in TRAINING_FIELDS}
        found.append(training_cell(labels, **{**training_of_axis(axis), **training}))
    return found


def training_cell(labels: Mapping[str, Any], **training: Any) -> Cell:
    """A run with its names in figures. The parameters of the cell are all of both, defaults included."""
    chosen = PointTraining(**training)
    return Cell({**asdict(chosen), **labels}, cost=training_cost(chosen))


def training_cost(training: PointTraining) -> float:
    """Products of a step, roughly, times the steps; a constant stands for the fixed cost of a step."""
    tokens = training.batch_size * training.num_points
    width = training.heads * training.rank
    layer = training.dim * (4 * width + 2 * training.intermediate) + 2 * training.num_points * width
    scores = training.heads * training.num_points * (24 if training.qk_norm else 12)
    return training.steps * (5e7 + training.layers * tokens * (layer + scores))


def training_of(parameters: Mapping[str, Any]) -> PointTraining:
    return PointTraining(**{name: value for name, value in parameters.items() if name in TRAINING_FIELDS})


def run_training(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """The one row of a run."""
    return [train_points(training_of(parameters), work)[1]]


def estimator_by(*columns: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """The `complete` of an experiment that adds what the paper reports: the least train error of any seed of a setting."""

    def complete(table: pd.DataFrame) -> pd.DataFrame:
        errors = table.groupby(list(columns), dropna=False)["best_train_error"]
        return table.assign(published_estimator=errors.transform("min"))

    return complete


def errors_by_seed(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Held-out errors, a row for each seed and a column for each setting, so that settings are compared seed by seed."""
    return table.pivot(index="seed", columns=by, values="held_out_error").sort_index(axis=1)


def judge_separation(what: str, half: pd.Series, full: pd.Series, least: float) -> Judgement:
    """Whether half rank errs at least `least` times as much as full rank, if full rank has trained in every seed."""
    if full.max() > TRAINED_ERROR:
        return not_testable(
            f"Full rank itself has not trained ({what}): its error is {full.min():.2f} to {full.max():.2f} over "
            f"{len(full)} seeds, and at most {TRAINED_ERROR} counts as trained."
        )
    return judge(f"error of half rank over that of full rank ({what})", half / full, least=least, ratio=True)
