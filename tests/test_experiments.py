"""Sweeps: cells that are known again, rows that are whole or absent, runs that go on where they were."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hf_rankattn.papers import EXPERIMENTS, Claim, reproduce, reproduce_all
from hf_rankattn.papers.sweep.audit import STATEMENTS, UNTESTED, audit_markdown, statement_of
from hf_rankattn.papers.sweep.engines import CellJob, run_slurm, slurm_options
from hf_rankattn.papers.sweep.grid import Cell
from hf_rankattn.papers.sweep.results import ResultFolder
from hf_rankattn.papers.sweep.runner import find_experiment
from hf_rankattn.tasks import task_builder


TIMES = ["wall_seconds", "cpu_seconds", "finished"]
# those on the benefits of rank; the others have files of tests of their own
BENEFITS = [name for name, module in EXPERIMENTS.items() if module.startswith("rank_benefits.")]


def assert_same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one.drop(columns=TIMES), other.drop(columns=TIMES), check_exact=True)


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "hf_rankattn", "reproduce", *arguments, "--scale", "smoke", "--out", str(out)]


def test_a_cell_is_known_by_its_parameters_alone():
    known = Cell({"dim": 16, "rank": 4}).id
    assert known == "e268ca36de1dcee8", "ids of results on disk must not change between releases"
    others = [Cell({"dim": 16, "rank": 8}), Cell({"dim": 16}), Cell({"dim": 16, "rank": 4.5})]
    assert len({known, *(cell.id for cell in others)}) == 4
    with pytest.raises(ValueError):
        Cell({"rank": float("nan")}).id  # noqa: B018


@pytest.mark.parametrize("name", list(EXPERIMENTS))
@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_cells_of_an_experiment_differ_and_do_not_depend_on_the_seeds_asked_for(name, scale):
    experiment = find_experiment(name)
    cells = [cell.id for cell in experiment.cells(scale, 3, {})]
    assert len(set(cells)) == len(cells)
    assert set(cells) >= {cell.id for cell in experiment.cells(scale, 1, {})}, "more seeds only add cells"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Every experiment of the benefits of rank at smoke scale, run once for all tests here."""
    out = tmp_path_factory.mktemp("runs")
    return {outcome.name: outcome for outcome in reproduce_all(BENEFITS, out, scale="smoke", workers=0)}


@pytest.mark.parametrize("name", BENEFITS)
def test_smoke(name, smoke):
    outcome = smoke[name]
    table = pd.read_parquet(outcome.folder / "table.parquet")
    assert len(table) == len(outcome.table) > 0
    assert {"cell", "seed", "hf_rankattn", "torch", "wall_seconds"} <= set(table.columns)
    assert outcome.claims and {claim.verdict for claim in outcome.claims} == {"not judged at this scale"}
    figures = [file for file in outcome.files if file.endswith(".png")]
    assert figures and all((outcome.folder / file).read_bytes()[:4] == b"\x89PNG" for file in figures)
    assert not (outcome.folder / "work").exists() or not any((outcome.folder / "work").iterdir())


def test_all_claims_stand_in_one_table(smoke):
    out = next(iter(smoke.values())).folder.parent.parent
    listed = json.loads((out / "claims-smoke.json").read_text())
    assert {entry["experiment"] for entry in listed} == set(BENEFITS)
    lines = (out / "claims-smoke.md").read_text().splitlines()
    assert lines[0] == f"{len(listed)} claims, not judged at this scale."
    rows = [line for line in lines[4:] if not line.startswith("| **")]
    assert len(rows) == len(listed) and all(line.count(" | ") >= 6 for line in rows)


def test_training_rows_hold_what_a_reader_needs(smoke):
    table = smoke["rank-separation"].table
    needed = "init_seed data_seed steps train_error held_out_error baseline_zero baseline_linear_attention"
    assert {*needed.split(), "parameters_live"} <= set(table.columns)
    assert (table.status == "finished").all() and table.held_out_error.between(0.1, 3).all()
    assert table.baseline_zero.eq(1).all()
    assert (table.published_estimator <= table.best_train_error).all()


def test_a_second_run_computes_nothing_and_more_seeds_only_what_is_new(smoke):
    first = smoke["expansion"]
    out = first.folder.parent.parent
    again = reproduce("expansion", out, scale="smoke", workers=0)
    assert again.computed == 0
    pd.testing.assert_frame_equal(first.table, again.table)
    more = reproduce("expansion", out, scale="smoke", seeds=2, workers=0)
    assert more.computed == 1 and len(more.table) == 2 * len(first.table)


def test_two_processes_and_this_one_give_the_same_table(smoke, tmp_path):
    outcome = reproduce("rank-separation", tmp_path, scale="smoke", workers=2)
    assert_same(outcome.table, smoke["rank-separation"].table)


def test_rows_of_another_version_are_not_mixed(smoke, tmp_path):
    reproduce("expansion", tmp_path, scale="smoke", workers=0)
    manifest = tmp_path / "expansion" / "smoke" / "experiment.json"
    for name, value in (("torch", "1.0"), ("revision", 0)):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {name: value}))
        with pytest.raises(ValueError, match=f"are of {name} {value}.*Choose another --out"):
            reproduce("expansion", tmp_path, scale="smoke", workers=0)
    manifest.write_text("{")
    with pytest.raises(ValueError, match="not a manifest"):
        reproduce("expansion", tmp_path, scale="smoke", workers=0)


def test_a_damaged_row_is_computed_again(tmp_path):
    outcome = reproduce("expansion", tmp_path, scale="smoke", workers=0)
    (cell,) = (outcome.folder / "cells").glob("*.json")
    whole = json.loads(cell.read_text())["rows"]
    cell.write_text(cell.read_text()[:100])
    again = reproduce("expansion", tmp_path, scale="smoke", workers=0)
    assert again.computed == 1
    assert_same(pd.DataFrame(whole), pd.DataFrame(json.loads(cell.read_text())["rows"]))


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    experiment = find_experiment("expansion")
    results = ResultFolder(tmp_path / "expansion" / "smoke", "expansion", "smoke", experiment.REVISION)
    results.open()
    with results.locked(), pytest.raises(ValueError, match="another process is filling"):
        reproduce("expansion", tmp_path, scale="smoke", workers=0)
    assert reproduce("expansion", tmp_path, scale="smoke", workers=0).computed == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "rank-seperation"}, "the experiments are convert, families"),
        ({"scale": "huge"}, "smoke, laptop, paper"),
        ({"engine": "kubernetes"}, "local, slurm"),
        ({"seeds": 0}, "at least 1"),
        ({"workers": -1}, "at least 0"),
        ({"engine": "slurm", "engine_options": {"partitions": "x"}}, "it has cluster, partition"),
        ({"engine": "slurm", "engine_options": {"minutes": "soon"}}, "whole number from 2, got 'soon'"),
        ({"engine": "slurm", "engine_options": {"cluster": "pbs"}}, "'slurm' or 'local'"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    given = {"name": "expansion", "scale": "smoke", **arguments}
    with pytest.raises(ValueError, match=message):
        reproduce(given.pop("name"), tmp_path / "runs", **given)
    assert not list(tmp_path.glob("runs/**/*.json")) or arguments.get("engine") == "slurm"


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written: Not a directory.*goes on from there"):
        reproduce("expansion", tmp_path / "file", scale="smoke", workers=0)


def test_a_full_disk_leaves_earlier_rows_intact(tmp_path):
    """A limit on the size of files stands in for the disk: the first seed is written before, the second does not fit."""
    first = reproduce("expansion", tmp_path, scale="smoke", workers=0)
    (cell,) = (first.folder / "cells").glob("*.json")
    before = cell.read_bytes()
    script = (
        "import resource, signal, sys\n"
        "from rankattn_cli.main import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"sys.argv = {['rankattn', *command(tmp_path, 'expansion')[3:], '--seeds', '2', '--workers', '0']!r}\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 2 and "cannot be written: File too large" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert cell.read_bytes() == before and list((first.folder / "cells").glob("*.json")) == [cell]
    assert reproduce("expansion", tmp_path, scale="smoke", seeds=2, workers=0).computed == 1


def test_a_failing_cell_is_named_and_the_others_are_kept(tmp_path, monkeypatch):
    experiment = find_experiment("random-features")
    original = experiment.run

    def sometimes(parameters, work):
        if parameters["heads"] == 4:
            raise RuntimeError("no such luck")
        return original(parameters, work)

    monkeypatch.setattr(experiment, "run", sometimes)
    with pytest.raises(ValueError, match="1 of 7 cells failed.*no such luck.*tries the failed ones again"):
        reproduce("random-features", tmp_path, scale="smoke", workers=0)
    monkeypatch.setattr(experiment, "run", original)
    assert reproduce("random-features", tmp_path, scale="smoke", workers=0).computed == 1


def test_diverged_runs_are_drawn_and_judged_without_them(smoke):
    table = smoke["rank-separation"].table.copy()
    table.loc[table["rank"] == 4, ["held_out_error", "train_error", "best_train_error"]] = np.nan
    table.loc[table["rank"] == 4, "status"] = "diverged"
    experiment = find_experiment("rank-separation")
    assert experiment.figures(table, "laptop")
    assert all(claim.verdict == "not testable" and claim.why for claim in experiment.claims(table, "laptop"))


def test_the_published_fault_of_random_features_gives_the_published_number():
    experiment = find_experiment("random-features")
    reported, weights, keys = experiment.published_computation(8, 256, seed=0)
    assert abs(reported - 0.191) < 0.012
    assert np.linalg.norm(keys, axis=1).min() < 0.8
    (row,) = experiment.run({"dim": 8, "heads": 256, "seed": 0, "rows": 8192, "faulty": True}, Path())
    assert abs(row["predicted"] - 0.205) < 0.01 and abs(row["measured"] - row["predicted"]) < 0.02
    assert row["published_weights_measured"] > row["predicted"] > row["published_formula"]


def test_the_measured_error_is_that_of_the_model():
    """The sum over signs against the construction as a model, on the same rows."""
    from hf_rankattn.papers.rank_benefits._training import held_out_error
    from hf_rankattn.papers.rank_benefits.random_features import measured_error
    from hf_rankattn.theory import random_heads
    from hf_rankattn.theory.constructions import rank_one_layer

    heads = random_heads(8, 16, 3, "uniform_cosine")
    weights = np.linspace(-1, 1, 16)
    builder = task_builder("nearest_neighbor", dim=8, num_points=2, distribution="orthogonal", seed=3)
    error = held_out_error(rank_one_layer(*heads, weights), builder, 512)
    assert abs(measured_error(*heads, weights, 512, 3) - error) < 1e-4


def test_the_audit_has_a_row_for_every_claim_and_every_statement():
    claims = [
        ("depth", Claim("a | b", "ours", "", "1", True, "since")),
        ("residuals", Claim("c", "Dong et al., Theorem 2.3; ours", "3", "2.9", False, "so")),
    ]
    lines = audit_markdown(claims, complete=False).splitlines()
    assert lines[-1].endswith("| a \\| b | `depth` | - | 1 | yes | since |")
    assert lines[5].endswith("| c | `residuals` | 3 | 2.9 | no | so |") and "Theorem 2.3" in lines[5]
    assert lines[0] == "2 claims: 1 yes, 1 no, 0 undecided, 0 not testable."
    whole = audit_markdown(claims, complete=True)
    without = sum(map(len, STATEMENTS.values())) - 2
    assert whole.startswith(f"{lines[0]} {without} more rows are statements without an experiment")
    for statement in (statement for paper in STATEMENTS.values() for statement in paper):
        assert f"| {statement} |" in whole and UNTESTED.get(statement, "") in whole
    with pytest.raises(ValueError, match="no statement of a paper has the source 'hearsay'"):
        statement_of(Claim("d", "hearsay", "", "", None))


def test_slurm_jobs_run_cells_and_queue_themselves_again(tmp_path):
    pytest.importorskip("submitit")
    assert slurm_options({"minutes": "30"})["minutes"] == 30
    options = {"cluster": "local", "cells_per_job": "4"}
    outcome = reproduce("random-features", tmp_path, scale="smoke", engine="slurm", engine_options=options)
    assert outcome.computed == 7 and len(outcome.table) == 7

    def fail(cell):
        raise RuntimeError(f"lost {cell.parameters['x']}")

    job, cells = CellJob(fail), [Cell({"x": 1}), Cell({"x": 2})]
    assert job.errors(cells) == {cells[0].id: "RuntimeError: lost 1", cells[1].id: "RuntimeError: lost 2"}
    job.time_is_up = True
    assert all("more minutes or requeues help" in text for text in job.errors(cells).values())
    queued = job.checkpoint([Cell({"x": 3})])
    assert isinstance(queued.function, CellJob) and queued.args == ([Cell({"x": 3})],)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, sprung: Path):
        self.sprung = sprung

    def __reduce__(self):
        return Path.touch, (self.sprung,)


@pytest.mark.parametrize("known", [True, False], ids=["with its cells", "without"])
def test_no_pickle_of_a_results_folder_is_opened(known, tmp_path, monkeypatch):
    """The stand-in for squeue says that a job is running whose files came with the folder."""
    pytest.importorskip("submitit")
    commands, folder, sprung = tmp_path / "bin", tmp_path / "slurm", tmp_path / "sprung"
    commands.mkdir()
    folder.mkdir()
    (commands / "squeue").write_text("#!/bin/sh\necho 77_0 RUNNING\n")
    (commands / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    cells = [Cell({"x": 1}), Cell({"x": 2})]
    for name in ("77_0_submitted.pkl", "77_0_0_result.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    reported: dict[str, str | None] = {}

    def sweep():
        run_slurm(print, cells, lambda cell, error: reported.update({cell.id: error and str(error)}), folder)

    if known:
        (folder / "77_0_cells.json").write_text(json.dumps([cell.id for cell in cells]))
        (folder / "77_0_errors.json").write_text(json.dumps({cells[1].id: "RuntimeError: lost"}))
        sweep()
        assert reported == {cells[0].id: None, cells[1].id: "RuntimeError: lost"}
    else:
        with pytest.raises(ValueError, match="there is no sbatch"):
            sweep()
    assert not sprung.exists()


def test_a_job_that_left_no_rows_is_a_failed_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(ResultFolder, "write", lambda self, cell, rows: None)
    with pytest.raises(ValueError, match="cells failed; cell .*: it ended and left no rows"):
        reproduce("random-features", tmp_path, scale="smoke", workers=0)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
        return True
    except ProcessLookupError:
        return False


def kill_until_done(out: Path, kills: int, seed: int, longest: float) -> tuple[int, pd.DataFrame]:
    """Start a sweep of two workers over and over, kill -9 at random moments so many times, then let it end."""
    rng = random.Random(seed)
    done = 0
    while True:
        sweep = command(out, "rank-separation", "--seeds", "4", "--workers", "2")
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(sweep, start_new_session=True, **pipes)
        if done < kills:
            try:
                process.wait(rng.uniform(0.5, longest))
            except subprocess.TimeoutExpired:
                if rng.random() < 0.5:
                    process.kill()  # the workers are left to notice
                else:
                    os.killpg(process.pid, signal.SIGKILL)
                done += 1
            process.communicate()
            deadline = time.monotonic() + 60
            while alive(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not alive(process.pid), "workers outlive the sweep that started them"
            if process.returncode == 0:
                raise AssertionError("the sweep ended before it was killed often enough: give it more cells")
        else:
            _, errors = process.communicate()
            assert process.returncode == 0, errors[-2000:]
            return done, pd.read_parquet(out / "rank-separation" / "smoke" / "table.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("kills, seed, longest", [(2, 0, 12.0), (12, 1, 14.0)])
def test_a_killed_sweep_ends_with_the_same_table(kills, seed, longest, tmp_path):
    undisturbed = reproduce("rank-separation", tmp_path / "undisturbed", scale="smoke", seeds=4, workers=0)
    done, table = kill_until_done(tmp_path / "killed", kills, seed, longest)
    assert done == kills and len(table) == 16
    assert_same(table, pd.read_parquet(undisturbed.folder / "table.parquet"))
