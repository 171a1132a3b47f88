"""kill -9 and company: whatever moment a command dies at, and whoever writes beside it, no half of a folder is ever taken for a whole."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from testing_commands import Ended, listing, refused_in_one_line, start, wait
from testing_folders import tiny_checkpoint

from hf_rankattn import RankBertModel
from hf_rankattn.files.atomic import LEFTOVER


pytestmark = pytest.mark.slow
KILLS = 8

# the published folder, and what it takes to make it
COMMANDS = {
    "measure": ["measure", "tiny", "--random-inputs", "--examples", "4", "--length", "16", "--batch-size", "2", "--out", "out"],
    "convert": ["convert", "tiny", "--qk-rank", "3", "--out", "out"],
    "stream": ["convert", "tiny", "--qk-rank", "3", "--stream", "--out", "out"],
    "make-data": ["make-data", "farthest_neighbor", "--num-examples", "20000", "--num-eval-examples", "2000", "--out", "out"],
    "reproduce": ["reproduce", "path-counts", "--scale", "smoke", "--workers", "1", "--out", "out"],
}  # fmt: skip


def load(command: str, folder: Path) -> None:
    """Read all that a command publishes; fails on anything less than the whole."""
    if command == "measure":
        table = pd.read_parquet(folder / "table.parquet")
        assert set(table.question) == {"inputs", "collapse", "attention", "logits", "weights"}
        assert all(path.read_bytes().endswith(b"IEND\xaeB`\x82") for path in folder.glob("*.png"))
    elif command in ("convert", "stream"):
        assert RankBertModel.from_pretrained(folder).config.qk_rank == 3
        assert (folder / "README.md").read_text().strip()
    elif command == "make-data":
        rows = {path.name.split("-")[0]: len(pd.read_parquet(path)) for path in folder.rglob("*.parquet")}
        assert rows == {"train": 20000, "validation": 2000, "test": 2000}
        assert "rank-attention-task" in (folder / "README.md").read_text()
    else:
        (table,) = folder.rglob("table.parquet")
        assert len(pd.read_parquet(table)) and (folder / "claims-smoke.json").read_text().strip()


def same(command: str, one: Path, other: Path) -> None:
    """Two runs of a command published the same numbers."""
    if command == "measure":
        pd.testing.assert_frame_equal(*(pd.read_parquet(path / "table.parquet") for path in (one, other)))
    elif command in ("convert", "stream"):
        ours, theirs = ({file.name: file.read_bytes() for file in path.glob("*.safetensors")} for path in (one, other))
        assert ours and ours == theirs
    elif command == "make-data":
        assert listing(one) == listing(other)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, minilm):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", minilm)


def workplace(folder: Path, checkpoint: Path) -> Path:
    folder.mkdir()
    (folder / "tiny").symlink_to(checkpoint)
    return folder


def ends_within(process: subprocess.Popen, seconds: float) -> bool:
    """Whether a process ends by itself; it is killed with its children otherwise."""
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False
    return True


def is_whole(command: str, folder: Path) -> bool:
    """Whether a command has published, by what its reader looks for first."""
    if command == "reproduce":
        return (folder / "claims-smoke.json").exists()
    return folder.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_kill_leaves_half_a_folder(command, checkpoint, tmp_path):
    whole = workplace(tmp_path / "whole", checkpoint)
    begun = time.monotonic()
    ended = wait(start(COMMANDS[command], whole))
    lasts = time.monotonic() - begun
    assert ended.code == 0, ended.err
    load(command, whole / "out")
    rng = random.Random(int(np.random.SeedSequence([7, list(COMMANDS).index(command)]).generate_state(1)[0]))
    seen: Counter = Counter()
    work = workplace(tmp_path / "killed", checkpoint)
    for _ in range(KILLS):
        process = start(COMMANDS[command], work)
        by_itself = ends_within(process, rng.uniform(0, 1.05 * lasts))
        seen["ended first" if by_itself else "killed"] += 1
        assert not by_itself or process.returncode == 0
        if is_whole(command, work / "out"):
            load(command, work / "out")
            seen["whole"] += 1
            os.rename(work / "out", work / f"done-{seen['whole']}")
    print(command, f"{lasts:.1f} s", dict(seen))
    assert seen["killed"] >= KILLS // 2
    ended = wait(start(COMMANDS[command], work))  # without --overwrite: nothing stands in the way
    assert ended.code == 0, ended.err
    load(command, work / "out")
    same(command, whole / "out", work / "out")
    assert not [path for path in work.iterdir() if path.name.endswith(LEFTOVER)], "left by killed runs"


@pytest.mark.parametrize("command", COMMANDS)
def test_two_at_once_leave_one_whole_folder(command, checkpoint, tmp_path):
    work = workplace(tmp_path / "shared", checkpoint)
    outcomes: list[Ended] = []
    for late in (0.0, 0.3):
        first = start(COMMANDS[command], work)
        time.sleep(late)
        second = start(COMMANDS[command], work)
        outcomes = [wait(first), wait(second)]
        codes = sorted(ended.code for ended in outcomes)
        assert codes in ([0, 0], [0, 2]), [ended.err for ended in outcomes]
        for ended in outcomes:
            if ended.code == 2:
                refused_in_one_line(ended)
        load(command, work / "out")
        assert {path.name for path in work.iterdir()} == {"tiny", "out"}, "something is left beside the folder"
        os.rename(work / "out", tmp_path / f"out-{late}")
        print(command, codes, [ended.last_line[:120] for ended in outcomes if ended.code])


@pytest.mark.parametrize("command", ["measure", "convert", "stream", "make-data"])
def test_a_killed_replacement_leaves_the_old_or_the_new(command, checkpoint, tmp_path):
    work = workplace(tmp_path / "work", checkpoint)
    begun = time.monotonic()
    assert wait(start(COMMANDS[command], work)).code == 0
    lasts = time.monotonic() - begun
    rng = random.Random(11)
    for _ in range(3):
        ends_within(start([*COMMANDS[command], "--overwrite"], work), rng.uniform(0.5, 1) * lasts)
        load(command, work / "out")
