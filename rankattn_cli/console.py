"""What the commands print: tables, lines and JSON on stdout, progress on stderr."""

import json
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text


# seconds between two plain lines of progress
PLAIN_EVERY = 30.0
# switched off by `set_progress`: the variable that each library reads when it is imported, and the call for afterwards
OTHER_BARS = (
    ("HF_HUB_DISABLE_PROGRESS_BARS", "huggingface_hub.utils", "disable_progress_bars"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "transformers.utils.logging", "disable_progress_bar"),
    ("HF_DATASETS_DISABLE_PROGRESS_BARS", "datasets", "disable_progress_bars"),
)
progress_wanted = True


def printable(text: str) -> str:
    """`text` with its control characters escaped, such as `\\x1b`: names in files must not control the terminal.

    Marks that change the direction of text are escaped too, as are undecodable bytes of file names.
    """
    return "".join(char if char.isprintable() or char in "\t\n" else ascii(char)[1:-1] for char in text)


def open_console(stderr: bool = False) -> Console:
    """A console that prints text literally, and without any escape code under NO_COLOR or TERM=dumb."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Console(
        stderr=stderr,
        color_system=None if plain else "auto",
        force_terminal=False if plain else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


def say(text: str) -> None:
    """Print text on stdout: wrapped between words on a terminal, unchanged in a pipe or a file."""
    console, lines = open_console(), printable(text).splitlines()
    if console.is_terminal:  # a path that is wider than the terminal stays in one piece, so that it can be copied
        wrapper = textwrap.TextWrapper(console.width, break_long_words=False, break_on_hyphens=False)
        lines = [wrapper.fill(line) for line in lines]
    console.print(Text("\n".join(lines)), soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def column_widths(rows: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """The width of each column of a table, or None if a column would be narrower than its longest word."""
    columns = list(zip(*rows, strict=True))
    least = [max(Text(word).cell_len for cell in cells for word in cell.split() or [""]) for cells in columns]
    widths = [max(Text(line).cell_len for cell in cells for line in cell.splitlines() or [""]) for cells in columns]
    room = available - 3 * len(columns) - 1
    if sum(least) > room:
        return None
    while sum(widths) > room:
        # the widest column that can still shrink
        place = max(range(len(widths)), key=lambda column: (widths[column] > least[column], widths[column]))
        widths[place] -= 1
    return widths


def print_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", show_lines: bool = False
) -> None:
    """Print a table, or one "name: value" line per cell where the terminal is too narrow for the words of the table."""
    console, cells = open_console(), [[printable(cell) for cell in row] for row in rows]
    heading = Text(printable(title), style="italic") if title else None
    widths = column_widths([names, *cells], console.width)
    if widths is not None:
        columns = [Column(name, width=width) for name, width in zip(names, widths, strict=True)]
        table = Table(*columns, title=heading, show_lines=show_lines)
        for row in cells:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    if heading:
        console.print(heading)
    for row in cells:
        console.print()
        for name, cell in zip(names, row, strict=True):
            console.print(Text.assemble((f"{name}: " if name else "", "bold"), cell, overflow="fold"))
    console.print()


def set_progress(wanted: bool) -> None:
    """Whether progress is shown. Progress bars of other libraries are shown on a terminal only."""
    global progress_wanted
    progress_wanted = wanted
    if wanted and open_console(stderr=True).is_terminal:
        return
    for setting, module, switch in OTHER_BARS:
        os.environ[setting] = "1"
        if module in sys.modules:
            getattr(sys.modules[module], switch)()


def without_progress(as_json: bool) -> bool:
    set_progress(not as_json)
    return as_json


# every command has it; with it, stderr holds errors and warnings only
Json = typer.Option(False, "--json", help="Print JSON, without progress.", callback=without_progress)


class Bar(Progress):
    """A progress bar on stderr; where stderr is no terminal, a plain line every `plain_every` seconds instead.

    `count` is the text after the bar, as `rich` formats it.
    """

    def __init__(
        self,
        count: str,
        *,
        shown: bool = True,
        time_left: bool = True,
        transient: bool = True,
        plain_every: float = PLAIN_EVERY,
    ):
        console, shown = open_console(stderr=True), shown and progress_wanted
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn(count), TimeRemainingColumn()]
        super().__init__(
            *(columns if time_left else columns[:-1]),
            console=console,
            transient=transient,
            disable=not (shown and console.is_terminal),
        )
        self.plain = shown and not console.is_terminal
        self.plain_every, self.begun, self.last = plain_every, time.perf_counter(), time.perf_counter()

    def update(self, task_id: TaskID, **fields: Any) -> None:  # type: ignore[override]
        super().update(task_id, **fields)
        self.print_plain(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self.print_plain(task_id)

    def print_plain(self, task_id: TaskID) -> None:
        now = time.perf_counter()
        if self.plain and now - self.last >= self.plain_every:
            self.last = now
            task = next(task for task in self.tasks if task.id == task_id)
            total = "" if task.total is None else f"/{task.total:.0f}"
            self.print_line(f"{task.description}: {task.completed:.0f}{total}, {now - self.begun:.0f} s")

    def print_line(self, text: str) -> None:
        """Print a line of progress, if stderr is no terminal."""
        if self.plain:
            print(printable(text), file=sys.stderr, flush=True)
