"""Run every benchmark, print one table with the baseline beside it, and write it as JSON if asked to."""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from benchmarks import (
    convert,
    encoder_attention,
    growth,
    import_time,
    limit,
    measure,
    measure_command,
    one_billion,
    paths,
    rank_bert,
    tasks,
    theory,
    widths,
)
from benchmarks.baseline import Run, comparison, read_run, this_machine, verdict
from benchmarks.timing import Row


BASELINE = Path(__file__).parent / "baseline.json"
LIMIT = 15 * 60


class Suite(NamedTuple):
    """What to run, and the seconds that it may take on a quiet core."""

    run: Callable[[int], Iterator[Row]]
    budget: int
    usual: bool = True


SUITES = {
    "import_time": Suite(import_time.run, 20),
    "rank_bert": Suite(rank_bert.run, 100),
    "kernels": Suite(rank_bert.kernels, 5),
    "encoder_attention": Suite(encoder_attention.run, 150),
    "measure": Suite(measure.run, 90),
    "one_billion": Suite(one_billion.run, 1200, usual=False),
    "measure_command": Suite(measure_command.run, 75),
    "paths": Suite(paths.run, 45),
    "tasks": Suite(tasks.run, 30),
    "convert": Suite(convert.run, 200),
    # of quality, not of speed, and as long as all the others: only when asked for
    "distilled": Suite(convert.distilled, 1200, usual=False),
    "theory": Suite(theory.run, 40),
    "growth": Suite(growth.run, 110),
    "widths": Suite(widths.run, 300, usual=False),
    "limit": Suite(limit.run, 35),
}
USUAL = [name for name, suite in SUITES.items() if suite.usual]


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        choices=SUITES,
        nargs="+",
        default=USUAL,
        help=f"which suites to run (default: all but {', '.join(name for name in SUITES if name not in USUAL)})",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats of each competitor (at least 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", default=BASELINE, help="compare with this run (default: %(default)s)"
    )
    parser.add_argument(
        "--write-baseline", action="store_true", help="write this run to the baseline; suites that are not run stay"
    )
    options = parser.parse_args(arguments)
    options.only = list(dict.fromkeys(options.only))
    if options.repeats < 7:
        parser.error(f"--repeats {options.repeats}: a median needs at least 7")
    # what cannot be written is said before a quarter of an hour has passed
    for path in [options.json] * bool(options.json) + [options.baseline] * options.write_baseline:
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            parser.error(f"{path} cannot be written: give a file in a folder that is there")
    options.before = None
    if options.baseline.exists():
        try:
            options.before = read_run(options.baseline)
        except ValueError as error:
            if not options.write_baseline:
                parser.error(f"{error}; write it anew with --write-baseline, or give another with --baseline")
    elif options.baseline != BASELINE and not options.write_baseline:
        parser.error(f"{options.baseline} is not there to compare with")
    return options


def stored_baseline(path: Path) -> Run | None:
    """The baseline, or None where there is none that can be read."""
    try:
        return read_run(path)
    except ValueError:
        return None


def measured(suites: list[str], repeats: int, console: Console) -> Run:
    """Run suites one after the other, a line for each row as it comes."""
    run = Run([], {}, this_machine())
    for name in suites:
        start = time.perf_counter()
        for row in SUITES[name].run(repeats):
            row.suite = name
            run.rows.append(row)
            console.print(f"{'met   ' if row.met else 'MISSED'} {row.ratio:6.2f}  {row.what}", highlight=False)
        run.seconds[name] = time.perf_counter() - start
    return run


def table_of(run: Run, before: Run | None) -> Table:
    table = Table("what", "against", "ratio", "target", "met", "baseline", "note")
    earlier = {row.key: row for row in before.rows} if before else {}
    for row in run.rows:
        beside = verdict(row, earlier.get(row.key)) if before else ""
        table.add_row(
            row.what, row.against, f"{row.ratio:.2f}", row.target, "yes" if row.met else "NO", beside, row.note
        )
    return table


def times_of(run: Run) -> Iterator[str]:
    """The seconds of each suite beside its budget, and the whole beside the limit."""
    for name, seconds in run.seconds.items():
        over = "  over: is the machine busy?" if seconds > SUITES[name].budget else ""
        yield f"{name:18} {seconds:5.0f} s of {SUITES[name].budget:4} s{over}"
    total = sum(run.seconds.values())
    limit = LIMIT if list(run.seconds) == USUAL else sum(SUITES[name].budget for name in run.seconds)
    yield f"{'all':18} {total:5.0f} s of {limit:4} s"


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    torch.set_num_threads(1)
    console = Console(width=None if Console().is_terminal else 170)
    with threadpool_limits(1):  # numpy's and scipy's threads, of which torch knows nothing
        run = measured(options.only, options.repeats, console)
    console.print(table_of(run, options.before))
    for line in times_of(run):
        console.print(line, highlight=False)
    if options.before:
        lines = comparison(run, options.before, options.only)
        for line in lines or ["nothing is worse than the baseline beyond noise, nothing is new, nothing is gone"]:
            console.print(line, highlight=False)
        if options.before.machine != run.machine:
            console.print(f"the baseline is of another machine: {options.before.machine}", highlight=False)
    else:
        console.print("there is no baseline to compare with: --write-baseline writes one", highlight=False)
    console.print(f"{sum(row.met for row in run.rows)} of {len(run.rows)} met")
    if options.json:
        run.write(options.json)
    if options.write_baseline:
        whole = stored_baseline(options.baseline)  # as it is now: another run may have written to it in the meantime
        (whole.updated_by(run, options.only) if whole else run).write(options.baseline)


if __name__ == "__main__":
    main()
