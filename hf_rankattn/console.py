"""What the commands print with: tables on stdout, progress on stderr, plain text where nobody can read more."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table


def open_console(stderr: bool = False) -> Console:
    """A console that sends no escape code at all under NO_COLOR or TERM=dumb; rich alone would still send bold."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Console(stderr=stderr, color_system=None if plain else "auto", force_terminal=False if plain else None)


def open_table(*names: str, **options: Any) -> Table:
    """A table whose cells break long words instead of cutting them off: a name that ends in dots is no name."""
    return Table(*(Column(name, overflow="fold") for name in names), **options)


def open_progress(*columns: str | ProgressColumn, transient: bool = True) -> Progress:
    """A progress bar on stderr, which draws nothing where stderr is no terminal that can redraw a line."""
    console = open_console(stderr=True)
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int], Callable[[], object]]]:
    """Gives a function that takes a total and returns what to call at every step; drawn on stderr, gone when done."""
    columns = TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total} " + unit), TimeRemainingColumn()
    with open_progress(*columns) as progress:

        def start(total: int) -> Callable[[], object]:
            task = progress.add_task(what, total=total)
            return lambda: progress.advance(task)

        yield start


@contextmanager
def sweep_bar() -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """A line for each experiment: cells done and time left, on stderr; plain lines where nobody watches a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} cells"),
        TimeRemainingColumn(),
    )
    with open_progress(*columns, transient=False) as progress:

        def start(name: str, total: int) -> Callable[[], object]:
            task = progress.add_task(name, total=total)
            begun, done = time.perf_counter(), 0

            def advance() -> None:
                nonlocal done
                done += 1
                progress.advance(task)
                if progress.disable:
                    spent = time.perf_counter() - begun
                    left = spent / done * (total - done)
                    print(
                        f"{name}: {done}/{total} cells, {spent:.0f} s, about {left:.0f} s left",
                        file=sys.stderr,
                        flush=True,
                    )

            return advance

        yield start


@contextmanager
def demo_bar(jobs: Sequence[Any]) -> Iterator[Callable[[Any, float, bool], object]]:
    """Share of the work done and time left, on stderr; a plain line for each finished part where nobody watches."""
    begun, over = time.perf_counter(), 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with open_progress(*columns) as bar:
        task = bar.add_task("demo", total=sum(job.cost for job in jobs))

        def advance(job: Any, seconds: float, done: bool) -> None:
            nonlocal over
            over += done
            bar.update(task, advance=seconds, description=f"demo: {over} of {len(jobs)} parts")
            if done and bar.disable:
                spent = time.perf_counter() - begun
                print(f"demo: {job.part}, {over}/{len(jobs)} parts, {spent:.0f} s", file=sys.stderr, flush=True)

        yield advance
