"""From the name of an experiment to a table, figures, and claims with their verdicts."""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...files.atomic import staged, write_whole
from ...report.verdicts import verdict_counts
from .audit import audit_markdown
from .engines import ENGINES, run_local, run_slurm
from .grid import Cell
from .judging import Claim as Claim
from .results import ResultFolder, ResultsNotWritable, readable_errors, running_versions


if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SCALES = ("smoke", "laptop", "paper")


class Experiment(Protocol):
    """The names of the module of an experiment."""

    SHOWS: str
    # optional: what is raised when the experiment computes something else, and the options of the command line that it knows
    REVISION: int
    OPTIONS: tuple[str, ...]

    @staticmethod
    def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
        """The grid. With `seeds=None` it has the number of seeds of the scale."""

    @staticmethod
    def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
        """The rows of one cell; `work` is a folder for checkpoints, where an interrupted run may have left some."""

    @staticmethod
    def complete(table: "pd.DataFrame") -> "pd.DataFrame":
        """Optional: add the columns that depend on more than one cell."""

    @staticmethod
    def figures(table: "pd.DataFrame", scale: str) -> "dict[str, Figure]":
        """File name without ending -> figure."""

    @staticmethod
    def claims(table: "pd.DataFrame", scale: str) -> Iterable[Claim]:
        """The claims, judged on the table."""


PAPERS = Path(__file__).parent.parent
# one file per experiment in the folder of its paper, beside the published values; a file that starts with an underscore is
# shared by several
EXPERIMENTS = {
    file.stem.replace("_", "-"): f"{file.parent.name}.{file.stem}"
    for file in sorted(PAPERS.glob("*/[!_]*.py"))
    if (file.parent / "published").is_dir()
}


def find_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; the experiments are {', '.join(EXPERIMENTS)}, and all.")
    experiment: Any = import_module(f"..{EXPERIMENTS[name]}", __package__)
    for optional, default in (("REVISION", 1), ("OPTIONS", ()), ("complete", lambda table: table)):
        if not hasattr(experiment, optional):
            setattr(experiment, optional, default)
    return experiment


@dataclass
class Outcome:
    """The results of an experiment."""

    name: str
    scale: str
    folder: Path
    table: "pd.DataFrame"
    claims: Sequence[Claim]
    files: list[str]
    seconds: float
    computed: int
    failed: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "experiment": self.name,
            "scale": self.scale,
            "folder": str(self.folder),
            "files": self.files,
            "rows": len(self.table),
            "cells_computed": self.computed,
            "cells_failed": self.failed,
            "seconds": round(self.seconds, 1),
            "verdicts": verdict_counts(claim.verdict for claim in self.claims),
            "claims": [claim.as_dict() for claim in self.claims],
        }


def run_cell(name: str, results: ResultFolder, cell: Cell) -> None:
    """Run one cell and write its rows. Every engine calls this function, in any process."""
    import torch
    from transformers.utils import logging

    if results.record(cell) is not None:
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start, busy = time.perf_counter(), time.process_time()
    work = results.work(cell)
    try:
        with readable_errors(results.folder):
            work.mkdir(parents=True, exist_ok=True)
        rows = find_experiment(name).run(cell.parameters, work)
    finally:
        torch.set_num_threads(threads)
    stamp = running_versions() | {
        "wall_seconds": round(time.perf_counter() - start, 3),
        "cpu_seconds": round(time.process_time() - busy, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    results.write(cell, [row | stamp for row in rows])
    shutil.rmtree(work, ignore_errors=True)


def reproduce(
    name: str,
    out: str | Path,
    *,
    scale: str = "laptop",
    seeds: int | None = None,
    engine: str = "local",
    engine_options: dict[str, Any] | None = None,
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    start_progress: Callable[[str, int], Callable[[], object]] = lambda name, total: lambda: None,
) -> Outcome:
    """Run the missing cells of an experiment, and write its table, figures and claims.

    Args:
        name (`str`): One of [`EXPERIMENTS`].
        out (`str` or `Path`):
            Results are written to `out/name/scale`: a file for each finished cell, so that an interrupted run continues,
            and `table.parquet`, `claims.json` and figures at the end.
        scale (`str`, *optional*, defaults to `"laptop"`): `"smoke"` (seconds), `"laptop"` (minutes) or `"paper"`.
        seeds (`int`, *optional*): Number of seeds of weights and data; the default depends on the scale.
        engine (`str`, *optional*, defaults to `"local"`): `"local"` or `"slurm"`.
        engine_options (`dict`, *optional*): Options of the engine slurm.
        workers (`int`, *optional*): Processes of the engine local, by default one per core; 0 is this process.
        options (`Mapping`, *optional*): Options of the experiment itself, such as `as_published`.
        start_progress: Takes the name and the number of cells to run, and returns a function to call after each cell.
    """
    experiment = find_experiment(name)
    check_arguments(scale, seeds, engine, workers)
    check_options(name, options or {})
    start = time.perf_counter()
    cells = experiment.cells(scale, seeds, options or {})
    results = ResultFolder(Path(out) / name / scale, name, scale, experiment.REVISION)
    results.open()
    failed: dict[str, str] = {}
    with results.locked():
        missing = results.missing(cells)
        advance = start_progress(name, len(missing))

        def report(cell: Cell, error: BaseException | None) -> None:
            if isinstance(error, ResultsNotWritable):
                raise error
            # a lost job may have finished some of its cells, and a job that ended may have left no rows
            if results.record(cell) is None:
                failed[cell.id] = f"{type(error).__name__}: {error}" if error else "it ended and left no rows."
            advance()

        if missing:
            run = partial(run_cell, name, results)
            if engine == "local":
                run_local(run, missing, report, workers)
            else:
                run_slurm(run, missing, report, results.folder / "slurm", engine_options)
        if failed:
            first, text = next(iter(failed.items()))
            raise ValueError(
                f"{len(failed)} of {len(missing)} cells failed; cell {first}: {text} The others are kept in "
                f"{results.folder}, and the same command tries the failed ones again."
            )
        table = experiment.complete(results.table(cells))
        results.write_table(table)
        claims = judged(experiment.claims(table, scale), scale)
        files = ["table.parquet", *write_reports(results.folder, drawn(experiment, table, scale), claims)]
    return Outcome(name, scale, results.folder, table, claims, files, time.perf_counter() - start, len(missing))


def judged(claims: Iterable[Claim], scale: str) -> list[Claim]:
    """The claims, without their verdicts if the scale is smoke."""
    if scale != "smoke":
        return list(claims)
    why = "A smoke run checks that the experiment runs; --scale laptop judges its claims."
    return [replace(claim, holds=None, why=why, interval=None, judged=False) for claim in claims]


def drawn(experiment: Experiment, table: "pd.DataFrame", scale: str) -> "dict[str, Figure]":
    """The figures in the style that all experiments share."""
    import matplotlib

    from ..drawing import FIGURE_STYLE

    with matplotlib.rc_context(FIGURE_STYLE):
        return experiment.figures(table, scale)


def reproduce_all(names: Sequence[str], out: str | Path, **arguments: Any) -> Iterator[Outcome]:
    """Run the experiments one after the other; at the end write all claims to `out/claims-SCALE.json` and `.md`."""
    outcomes = []
    options = arguments.pop("options", None) or {}
    for option in options:
        if not any(option in find_experiment(name).OPTIONS for name in names):
            check_options(names[0], {option: options[option]})
    for name in names:
        # each of several experiments gets the options that it knows; a single experiment refuses the others
        known = find_experiment(name).OPTIONS
        own = {key: value for key, value in options.items() if len(names) == 1 or key in known}
        outcomes.append(reproduce(name, out, options=own, **arguments))
        yield outcomes[-1]
    claims = [(outcome.name, claim) for outcome in outcomes for claim in outcome.claims]
    path = Path(out) / f"claims-{arguments.get('scale', 'laptop')}"
    listed = [claim.as_dict() | {"experiment": name} for name, claim in claims]
    with readable_errors(Path(out)):
        write_whole(path.with_suffix(".json"), json.dumps(listed, indent=2))
        write_whole(path.with_suffix(".md"), audit_markdown(claims, complete=set(names) == set(EXPERIMENTS)))


def check_options(name: str, options: Mapping[str, Any]) -> None:
    known = find_experiment(name).OPTIONS
    for option in options:
        if option not in known:
            can = ", ".join(spelled(one) for one in known) or "no options"
            others = ", ".join(other for other in EXPERIMENTS if option in find_experiment(other).OPTIONS)
            raise ValueError(
                f"the experiment {name} takes {can}, not {spelled(option)}"
                + (f", which is for {others}." if others else ", and neither does any other.")
            )


def spelled(option: str) -> str:
    return "--" + option.replace("_", "-")


def key_values(texts: Sequence[str]) -> dict[str, str]:
    """Options given as KEY=VALUE.

    >>> key_values(["partition=gpu", "minutes=60"])
    {'partition': 'gpu', 'minutes': '60'}
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"options of an engine are KEY=VALUE, got {text!r}.")
        found[key] = value
    return found


def check_arguments(scale: str, seeds: int | None, engine: str, workers: int | None) -> None:
    if scale not in SCALES:
        raise ValueError(f"`scale` must be one of {', '.join(SCALES)}; got {scale!r}.")
    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}; got {engine!r}.")
    for what, value, least in (("seeds", seeds, 1), ("workers", workers, 0)):
        if value is not None and value < least:
            raise ValueError(f"`{what}` must be at least {least}, got {value}.")


def write_reports(folder: Path, figures: "dict[str, Figure]", claims: Sequence[Claim]) -> list[str]:
    with readable_errors(folder):
        for name, figure in figures.items():
            with staged(folder / f"{name}.png") as staging:
                figure.savefig(staging, format="png")
        write_whole(folder / "claims.json", json.dumps([claim.as_dict() for claim in claims], indent=2))
    return [*(f"{name}.png" for name in figures), "claims.json"]
