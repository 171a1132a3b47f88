"""What the jobs of test_slurm.py run: a cell of an experiment that is slow, saves often, and says when it begins."""

import os
import time

from hf_rankattn.papers import training as shared
from hf_rankattn.papers.rank_benefits import _training as training
from hf_rankattn.papers.sweep.grid import Cell
from hf_rankattn.papers.sweep.results import ResultFolder
from hf_rankattn.papers.sweep.runner import run_cell


SAVE_EVERY = 50


class Slowly(training.StopWhenLost):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.1)


def run_slowly(results: ResultFolder, cell: Cell) -> None:
    shared.SAVE_EVERY = SAVE_EVERY
    training.StopWhenLost = Slowly  # type: ignore[misc]
    found = sorted(path.name for path in results.work(cell).glob("checkpoint-*"))
    if results.record(cell) is None:
        with (results.folder / "begun.txt").open("a") as file:
            file.write(f"{cell.id} {os.environ.get('SLURM_RESTART_COUNT', '0')} {' '.join(found)}\n")
    run_cell("positions", results, cell)
