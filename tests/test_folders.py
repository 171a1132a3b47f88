"""Folders that appear as a whole or not at all, and what is left of those that never did."""

import os
import signal
import subprocess
import sys

import pytest


pytest.importorskip("fcntl", reason="no such locks on this system, so nothing is cleaned up")

from hf_rankattn.folders import LEFTOVER, fresh_folder


MARK = {"overwrite": False, "marker": "done.txt", "what": "anything"}
DIES = """
import os, signal, sys
from hf_rankattn.folders import fresh_folder
with fresh_folder(sys.argv[1], overwrite=False, marker="done.txt", what="anything") as staging:
    (staging / "half.bin").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_run(folder):
    process = subprocess.run([sys.executable, "-c", DIES, str(folder)], check=False)
    assert process.returncode == -signal.SIGKILL
    (left,) = folder.parent.iterdir()
    return left


def test_what_a_killed_run_left_is_gone_after_the_next(tmp_path):
    left = killed_run(tmp_path / "out")
    assert left.name.endswith(LEFTOVER) and (left / "half.bin").exists()
    with fresh_folder(tmp_path / "out", **MARK) as staging:
        assert not left.exists()
        (staging / "done.txt").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["done.txt"]


def test_a_run_that_goes_on_keeps_its_folder(tmp_path):
    with fresh_folder(tmp_path / "out", **MARK) as first:
        (first / "done.txt").write_text("first")
        with (
            pytest.raises(ValueError, match="made by another process meanwhile"),
            fresh_folder(tmp_path / "out", **MARK) as second,
        ):
            assert first.exists() and second.exists()
            os.mkdir(tmp_path / "out")
        assert first.exists() and not second.exists()
        os.rmdir(tmp_path / "out")
    assert (tmp_path / "out" / "done.txt").read_text() == "first"


def test_nobody_elses_folders_are_touched(tmp_path):
    killed_run(tmp_path / "output").rename(tmp_path / f".other-1{LEFTOVER}")
    elsewhere = LEFTOVER.replace(LEFTOVER[1:9], "0" * 8)  # of another machine
    for name in (".out-backup", ".out-12345678", "out-12345678" + LEFTOVER, ".out-2-12345678" + LEFTOVER,
                 ".out-12345678" + elsewhere):  # fmt: skip
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / f".out-abcdefgh{LEFTOVER}")
    before = {path.name for path in tmp_path.iterdir()}
    with fresh_folder(tmp_path / "out", **MARK):
        pass
    assert {path.name for path in tmp_path.iterdir()} == before | {"out"}


def test_a_name_that_is_nearly_too_long_is_used(tmp_path):
    folder = tmp_path / ("a" * 245)
    handles = len(os.listdir("/dev/fd"))
    with fresh_folder(folder, **MARK) as staging:
        (staging / "done.txt").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert len(os.listdir("/dev/fd")) == handles


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), fresh_folder(tmp_path / "out", **MARK) as staging:
        (staging / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
