"""Run every benchmark, print one table, and write it as JSON if asked to."""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import convert, encoder_attention, measure, paths, rank_bert, tasks, theory
from benchmarks.timing import Row


SUITES = {
    "rank_bert": rank_bert.run,
    "kernels": rank_bert.kernels,
    "encoder_attention": encoder_attention.run,
    "measure": measure.run,
    "paths": paths.run,
    "tasks": tasks.run,
    "convert": convert.run,
    "theory": theory.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=SUITES, nargs="+", default=list(SUITES), help="which benchmarks to run")
    parser.add_argument("--repeats", type=int, default=9, help="timed repeats of each competitor (at least 7)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    if arguments.repeats < 7:
        parser.error(f"--repeats {arguments.repeats}: a median needs at least 7")
    torch.set_num_threads(1)
    rows: list[Row] = []
    start = time.perf_counter()
    console = Console(width=None if Console().is_terminal else 150)
    for name in arguments.only:
        for row in SUITES[name](arguments.repeats):
            rows.append(row)
            console.print(f"{'met   ' if row.met else 'MISSED'} {row.ratio:6.2f}  {row.what}", highlight=False)
    table = Table("what", "against", "ratio", "target", "met", "note")
    for row in rows:
        table.add_row(row.what, row.against, f"{row.ratio:.2f}", row.target, "yes" if row.met else "NO", row.note)
    console.print(table)
    console.print(f"{sum(row.met for row in rows)} of {len(rows)} met, in {time.perf_counter() - start:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps([row.as_dict() for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
