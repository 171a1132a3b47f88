"""From the name of an experiment to a table, figures, and claims with their verdicts."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...files.atomic import staged
from ...report.verdicts import verdict_counts
from .engines import ENGINES, run_local, run_slurm
from .grid import Cell
from .judging import Claim as Claim
from .results import ResultFolder, ResultsNotWritable, readable_errors, running_versions, write_whole


if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SCALES = ("smoke", "laptop", "paper")
MOST = 10_000  # seeds or processes: more is a slip of the hand, and a grid of them would fill the memory


class Experiment(Protocol):
    """What a module of this package has to offer to be run."""

    NAME: str
    SHOWS: str
    REVISION: int

    @staticmethod
    def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
        """The grid. `seeds` is None for as many as the scale has; `options` are those of the command line."""

    @staticmethod
    def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
        """The rows of one cell; `work` is a folder for checkpoints, in which an interrupted run may have left some."""

    # and, where columns depend on more than one cell: complete(table) -> table
    # and, where the command line can tell it something: OPTIONS, the names that `options` may hold

    @staticmethod
    def figures(table: "pd.DataFrame", scale: str) -> "dict[str, Figure]":
        """File name without ending -> figure."""

    @staticmethod
    def claims(table: "pd.DataFrame", scale: str) -> Sequence[Claim]:
        """What the table says of what was claimed."""


PAPERS = Path(__file__).parent.parent
# one file per experiment in the folder of its paper; a file that starts with an underscore is shared by several
EXPERIMENTS = {
    file.stem.replace("_", "-"): f"{file.parent.name}.{file.stem}" for file in sorted(PAPERS.glob("rank_*/[!_]*.py"))
}


def find_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; the experiments are {', '.join(EXPERIMENTS)}, and all.")
    return import_module(f"..{EXPERIMENTS[name]}", __package__)  # type: ignore[return-value]


@dataclass
class Outcome:
    """What came out of an experiment."""

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
    """Run one cell and keep its rows; what every engine calls, in whatever process."""
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
    """Run an experiment, or what is missing of it, and write its table, figures and claims.

    Args:
        name (`str`): One of [`EXPERIMENTS`].
        out (`str` or `Path`):
            Results are kept in `out/name/scale`: a file for each finished cell, so that an interrupted run goes on where
            it was, and `table.parquet`, `claims.json` and figures of all of them at the end.
        scale (`str`, *optional*, defaults to `"laptop"`): `"smoke"` (seconds), `"laptop"` (minutes) or `"paper"`.
        seeds (`int`, *optional*): How many seeds of weights and data; by default as many as the scale has.
        engine (`str`, *optional*, defaults to `"local"`): `"local"` or `"slurm"`.
        engine_options (`dict`, *optional*): Options of the engine slurm.
        workers (`int`, *optional*): Processes of the engine local; by default one a core, and with 0 this one.
        options (`Mapping`, *optional*): What the experiment itself can be told, `as_published` for one.
        start_progress: Takes the name and the number of cells to run, and returns what to call when one is done.
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
            # a job that was lost may have finished some of its cells before, and one that ended may have left no rows
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
            raise ValueError(describe_failures(failed, len(missing), results.folder))
        table = results.table(cells)
        if hasattr(experiment, "complete"):
            table = experiment.complete(table)
        results.write_table(table)
        claims = judged(experiment.claims(table, scale), scale)
        files = ["table.parquet", *write_reports(results.folder, experiment.figures(table, scale), claims)]
    return Outcome(
        name, scale, results.folder, table, claims, files, time.perf_counter() - start, len(missing), failed
    )


def judged(claims: Sequence[Claim], scale: str) -> list[Claim]:
    """The claims with their verdicts, which a smoke run is too short to give."""
    if scale != "smoke":
        return list(claims)
    why = "A smoke run checks that the experiment runs; --scale laptop judges its claims."
    return [replace(claim, holds=None, why=why, interval=None, judged=False) for claim in claims]


def reproduce_all(names: Sequence[str], out: str | Path, **arguments: Any) -> Iterator[Outcome]:
    """One experiment after the other; then `out/claims-SCALE.json` and `.md` hold the claims of all of them."""
    outcomes = []
    options = arguments.pop("options", None) or {}
    for option in options:
        if not any(option in known_options(name) for name in names):
            check_options(names[0], {option: options[option]})
    for name in names:
        # of several experiments each is told what it knows; one alone refuses what it does not
        own = {key: value for key, value in options.items() if len(names) == 1 or key in known_options(name)}
        outcomes.append(reproduce(name, out, options=own, **arguments))
        yield outcomes[-1]
    from .audit import audit_markdown

    claims = [(outcome.name, claim) for outcome in outcomes for claim in outcome.claims]
    path = Path(out) / f"claims-{arguments.get('scale', 'laptop')}"
    with readable_errors(Path(out)):
        write_whole(
            path.with_suffix(".json"), json.dumps([c.as_dict() | {"experiment": n} for n, c in claims], indent=2)
        )
        write_whole(path.with_suffix(".md"), audit_markdown(claims, complete=set(names) == set(EXPERIMENTS)))


def known_options(name: str) -> tuple[str, ...]:
    """What an experiment can be told on the command line."""
    return tuple(getattr(find_experiment(name), "OPTIONS", ()))


def check_options(name: str, options: Mapping[str, Any]) -> None:
    known = known_options(name)
    for option in options:
        if option not in known:
            can = ", ".join(spelled(one) for one in known) or "no options"
            others = ", ".join(other for other in EXPERIMENTS if option in known_options(other))
            raise ValueError(
                f"the experiment {name} takes {can}, not {spelled(option)}"
                + (f", which is for {others}." if others else ", and neither does any other.")
            )


def spelled(option: str) -> str:
    return "--" + option.replace("_", "-")


def describe_failures(failed: Mapping[str, str], total: int, folder: Path) -> str:
    first, text = next(iter(failed.items()))
    return (
        f"{len(failed)} of {total} cells failed; cell {first}: {text} The others are kept in {folder}, and the same command "
        "tries the failed ones again."
    )


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
        if value is not None and value > MOST:
            raise ValueError(f"`{what}` must be at most {MOST}, got {value}.")


def write_reports(folder: Path, figures: "dict[str, Figure]", claims: Sequence[Claim]) -> list[str]:
    with readable_errors(folder):
        for name, figure in figures.items():
            with staged(folder / f"{name}.png") as staging:
                figure.savefig(staging, format="png")
        write_whole(folder / "claims.json", json.dumps([claim.as_dict() for claim in claims], indent=2))
    return [*(f"{name}.png" for name in figures), "claims.json"]
