"""The engine slurm on a real Slurm: one node, started here, and stopped again."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from slurm_node import SlurmNode, SlurmNotAvailable, slurm_node
from test_experiments import assert_same
from testing_common import hear_interrupts
from worker_slurm import SAVE_EVERY, run_slowly

from hf_rankattn.papers import reproduce
from hf_rankattn.papers.rank_benefits import _training as training
from hf_rankattn.papers.rank_benefits._points import training_cell
from hf_rankattn.papers.rank_benefits._training import PointTraining, train_points
from hf_rankattn.papers.sweep.engines import CellFailed, run_slurm
from hf_rankattn.papers.sweep.grid import Cell
from hf_rankattn.papers.sweep.results import ResultFolder


pytestmark = pytest.mark.slow
TINY = {"dim": 8, "num_points": 4, "layers": 1, "heads": 1, "rank": 8, "intermediate": 16, "batch_size": 16}


@pytest.fixture(scope="module")
def node():
    pytest.importorskip("submitit")
    try:
        with slurm_node() as started:
            yield started
    except SlurmNotAvailable as error:
        pytest.skip(f"no Slurm on this machine: {error}")


@pytest.fixture(autouse=True)
def environment(node, monkeypatch):
    """This process, and the jobs that inherit its environment, speak to the node and find the modules beside this one."""
    for name, value in node.environment.items():
        monkeypatch.setenv(name, value)
    places = [str(Path(training.__file__).parents[2]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, places)))


@pytest.fixture
def earlier(node) -> set[str]:
    return set(node.states())


def wait_until(true, what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.3)


def has_lines(path: Path, count: int) -> bool:
    return path.exists() and len(path.read_text().splitlines()) == count


def new_states(node: SlurmNode, earlier: set[str]) -> dict[str, str]:
    return {name: state for name, state in sorted(node.states().items()) if name not in earlier}


def sweep(out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "hf_rankattn", "reproduce", "random-features", "--scale", "smoke"]
    command += ["--out", str(out), "--engine", "slurm"]
    for option in options:
        command += ["--engine-option", option]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, preexec_fn=hear_interrupts, **pipes)


def in_background(function) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, raised


@pytest.fixture(scope="module")
def local_table(tmp_path_factory) -> pd.DataFrame:
    return reproduce("random-features", tmp_path_factory.mktemp("local"), scale="smoke", workers=0).table


def test_the_cluster_gives_the_table_of_this_machine(node, earlier, tmp_path, monkeypatch, capfd, local_table):
    monkeypatch.chdir(tmp_path)  # a relative folder is the same folder for the jobs
    options = {"partition": "main", "cells_per_job": 3, "parallel": 2, "minutes": 5}
    outcome = reproduce("random-features", "runs", scale="smoke", engine="slurm", engine_options=options)
    assert outcome.computed == 7
    assert_same(outcome.table, local_table)
    assert len(new_states(node, earlier)) == 3
    assert "sacct" not in capfd.readouterr().err


def test_a_job_out_of_time_is_queued_again_and_goes_on_from_its_checkpoint(node, earlier, tmp_path):
    """Two minutes are the least that the engine takes; the slow cell needs more, the other one is finished before."""
    long = PointTraining(**TINY, steps=900, init_seed=1, data_seed=2, held_out_rows=64)
    short = PointTraining(**TINY, steps=SAVE_EVERY, init_seed=3, data_seed=4, held_out_rows=64)
    cells = [
        Cell(training_cell({"seed": seed}, **vars(chosen)).parameters, cost=-seed)
        for seed, chosen in enumerate([short, long])
    ]
    results = ResultFolder(tmp_path / "results", "positions", "smoke", 1)
    results.open()
    reported: list[tuple[str, BaseException | None]] = []
    run_slurm(
        partial(run_slowly, results), cells, lambda cell, error: reported.append((cell.id, error)),
        results.folder / "slurm", {"minutes": 2, "cells_per_job": 2},
    )  # fmt: skip
    assert reported == [(cell.id, None) for cell in cells]
    (job,) = new_states(node, earlier)
    assert node.restarts(job) >= 1
    begun = [line.split() for line in (results.folder / "begun.txt").read_text().splitlines()]
    assert [line[:2] for line in begun if line[0] == cells[0].id] == [[cells[0].id, "0"]], "finished once, begun once"
    later = [line for line in begun if line[0] == cells[1].id]
    assert [line[1] for line in later] == [str(count) for count in range(node.restarts(job) + 1)]
    assert later[0][2:] == [] and all(line[2].startswith("checkpoint-") for line in later[1:])
    for cell, chosen in zip(cells, (short, long), strict=True):
        (row,) = results.record(cell)
        assert row["steps_done"] == chosen.steps
        _, whole = train_points(chosen, tmp_path / f"whole-{chosen.steps}")
        assert {name: row[name] for name in whole} == whole


def test_a_job_that_may_not_be_queued_again_says_so(node, earlier, tmp_path):
    chosen = {**TINY, "steps": 3000, "init_seed": 0, "data_seed": 0}
    cells = [training_cell({"seed": seed}, **chosen) for seed in range(2)]
    results = ResultFolder(tmp_path / "results", "positions", "smoke", 1)
    results.open()
    reported: list[BaseException | None] = []
    thread, raised = in_background(
        lambda: run_slurm(
            partial(run_slowly, results), cells, lambda cell, error: reported.append(error),
            results.folder / "slurm", {"minutes": 2, "requeues": 1, "cells_per_job": 2},
        )
    )  # fmt: skip
    begun = results.folder / "begun.txt"
    for times in (1, 2):
        wait_until(partial(has_lines, begun, times), "the cell", 180)
        (job,) = new_states(node, earlier)
        node.command("scancel", "--signal", "USR2", job)
    thread.join(120)
    assert not thread.is_alive() and not raised
    assert len(reported) == 2 and all(isinstance(error, CellFailed) for error in reported)
    assert "out of time and could not be queued again" in str(reported[0])
    assert "timed-out too many times" in str(reported[1]) and "more minutes or requeues" in str(reported[1])
    assert node.restarts(job) == 1 and len(begun.read_text().splitlines()) == 2, "no time to begin the second cell"


def test_a_cancelled_job_is_named_and_only_its_cells_are_run_again(node, earlier, tmp_path, local_table):
    options = {"cells_per_job": 3, "parallel": 1}
    thread, raised = in_background(
        lambda: reproduce("random-features", tmp_path, scale="smoke", engine="slurm", engine_options=options)
    )
    wait_until(lambda: "RUNNING" in new_states(node, earlier).values(), "a running job")
    first, _, last = new_states(node, earlier)
    node.command("scancel", first, last)
    thread.join(240)
    assert not thread.is_alive(), "lost jobs are waited for"
    assert isinstance(raised[0], ValueError)
    message = str(raised[0])
    assert "4 of 7 cells failed" in message and f"the job {first} was lost: it ended as CANCELLED" in message
    assert "The others are kept" in message
    kept = list((tmp_path / "random-features" / "smoke" / "cells").glob("*.json"))
    assert len(kept) == 3
    before = {path: path.stat().st_mtime_ns for path in kept}
    options["cells_per_job"] = 4
    again = reproduce("random-features", tmp_path, scale="smoke", engine="slurm", engine_options=options)
    assert again.computed == 4 and {path: path.stat().st_mtime_ns for path in kept} == before
    assert_same(again.table, local_table)


def test_control_c_cancels_the_jobs(node, earlier, tmp_path):
    process = sweep(tmp_path, "cells_per_job=1", "parallel=2")
    wait_until(lambda: "RUNNING" in new_states(node, earlier).values(), "a running job")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in errors, errors
    wait_until(lambda: not {"RUNNING", "PENDING", "COMPLETING"} & {*new_states(node, earlier).values()}, "the end", 60)
    states = set(new_states(node, earlier).values())
    assert "CANCELLED" in states and states <= {"CANCELLED", "COMPLETED"}
    assert len(list((tmp_path / "random-features" / "smoke" / "cells").glob("*.json"))) < 7


def test_jobs_outlive_a_killed_sweep_and_the_next_one_waits_for_them(node, earlier, tmp_path, local_table):
    process = sweep(tmp_path, "cells_per_job=4", "parallel=1")
    wait_until(lambda: "RUNNING" in new_states(node, earlier).values(), "a running job")
    process.kill()
    process.communicate()
    submitted = set(new_states(node, earlier))
    assert len(submitted) == 2
    outcome = reproduce("random-features", tmp_path, scale="smoke", engine="slurm")
    assert set(new_states(node, earlier)) == submitted, "no cell is submitted twice"
    assert_same(outcome.table, local_table)


def test_what_slurm_refuses_is_one_line(tmp_path):
    process = sweep(tmp_path, "partition=nowhere")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    told = "rankattn: Slurm did not take 7 jobs of 240 minutes in the partition nowhere"
    assert errors.splitlines()[-1].startswith(told)
    assert "Invalid partition name" in errors and "Traceback" not in errors
