"""What the experiments that train point encoders share: cells from settings, one row a run, seeds folded together."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sweep.grid import Cell
from ..sweep.judging import Judgement, judge, not_testable
from ..sweep.tolerances import TRAINED_ERROR
from ._training import PointTraining, train_points


if TYPE_CHECKING:
    import pandas as pd

FORMS = ("original", "qk_norm")
# of the published runs: all had these weights to start from, and saw these batches again and again
PUBLISHED_INIT_SEED = 613
PUBLISHED_REPLAY = 100
TRAINING_FIELDS = {field.name for field in fields(PointTraining)}


def training_cell(labels: Mapping[str, Any], **training: Any) -> Cell:
    """A run with the names it has in figures. The parameters of a cell are all of both, defaults included."""
    chosen = PointTraining(**training)
    return Cell({**asdict(chosen), **labels}, cost=training_cost(chosen))


def training_cost(training: PointTraining) -> float:
    """Products of a step, roughly, times the steps; a constant stands for what every step costs."""
    tokens = training.batch_size * training.num_points
    width = training.heads * training.rank
    layer = training.dim * (4 * width + 2 * training.intermediate) + 2 * training.num_points * width
    scores = training.heads * training.num_points * (24 if training.qk_norm else 12)
    return training.steps * (5e7 + training.layers * tokens * (layer + scores))


def seeds_of(seed: int, as_published: bool) -> dict[str, Any]:
    """Seeds of weights and of rows: both differ between runs, unless the published habit is asked for."""
    if not as_published:
        return {"init_seed": seed, "data_seed": seed}
    return {
        "init_seed": PUBLISHED_INIT_SEED,
        "data_seed": seed,
        "replay": PUBLISHED_REPLAY,
        "equal_layers": True,
    }


def training_of(parameters: Mapping[str, Any]) -> PointTraining:
    return PointTraining(**{name: value for name, value in parameters.items() if name in TRAINING_FIELDS})


def run_training(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """The one row of a run."""
    return [train_points(training_of(parameters), work)[1]]


def with_published_estimator(table: "pd.DataFrame", by: Iterable[str]) -> "pd.DataFrame":
    """One column more: what the paper reports of runs that differ in their seed only, the least train error of any."""
    estimate = table.groupby(list(by), dropna=False)["best_train_error"].transform("min")
    return table.assign(published_estimator=estimate)


def over_seeds(table: "pd.DataFrame", by: list[str], value: str = "held_out_error") -> "pd.DataFrame":
    """Mean, least and largest value over the seeds, and how many of them diverged."""
    groups = table.groupby(by, dropna=False)
    folded = groups[value].agg(["mean", "min", "max"])
    return folded.assign(
        runs=groups.size(), diverged=groups.status.agg(lambda s: int((s == "diverged").sum()))
    ).reset_index()


def errors_by_seed(table: "pd.DataFrame", by: list[str]) -> "pd.DataFrame":
    """Held-out errors, a row for each seed and a column for each setting, so that settings are compared seed by seed."""
    return table.pivot(index="seed", columns=by, values="held_out_error").sort_index(axis=1)


def judge_separation(what: str, half: "pd.Series", full: "pd.Series", least: float) -> Judgement:
    """Whether half rank errs at least so many times as much as full rank, where full rank has trained in every seed."""
    if full.max() > TRAINED_ERROR:
        return not_testable(
            f"Full rank itself has not trained ({what}): its error is {full.min():.2f} to {full.max():.2f} over "
            f"{len(full)} seeds, and at most {TRAINED_ERROR} counts as trained."
        )
    return judge(f"error of half rank over that of full rank ({what})", half / full, least=least, ratio=True)
