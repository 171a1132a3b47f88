"""Folders that appear as a whole or not at all, and what is left of those that never did."""

import os
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest


pytest.importorskip("fcntl", reason="no such locks on this system, so nothing is cleaned up")

from hf_rankattn.files.atomic import LEFTOVER, REPLACED, check_replaceable, fresh_folder, staged
from hf_rankattn.files.checkpoints import data_source, readable
from hf_rankattn.report.results import report_page


MARK = {"overwrite": False, "marker": "done.txt", "what": "anything"}


def killed(work) -> None:
    """Run `work` in another process, which kills itself."""
    process = get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_run(folder):
    """What a process leaves that is killed while it writes `folder`."""

    def work():
        with fresh_folder(folder, **MARK) as staging:
            (staging / "half.bin").write_bytes(b"x" * 1000)
            die()

    killed(work)
    (left,) = folder.parent.iterdir()
    return left


def killed_replacement(folder, renames):
    """Replace `folder` in a process that is killed after this number of renames."""
    folder.mkdir(parents=True)
    (folder / "done.txt").write_text("old")
    left = [renames]

    def rename(self, target, rename=Path.rename):
        named = rename(self, target)
        left[0] -= not str(target).endswith((REPLACED, LEFTOVER))
        if left[0] == 0:
            die()
        return named

    def work():
        Path.rename = rename
        with fresh_folder(folder, **{**MARK, "overwrite": True}) as staging:
            (staging / "done.txt").write_text("new")

    killed(work)
    assert [path for path in folder.parent.iterdir() if path.name.endswith(REPLACED)]


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


@pytest.mark.parametrize("failing", [{1}, {2}, {2, 3}], ids=["first", "second", "second-and-rollback"])
def test_a_rename_that_fails_loses_nothing(failing, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "done.txt").write_text("old")
    rename, calls = Path.rename, []

    def flaky(self, target):
        if not str(target).endswith((LEFTOVER, REPLACED)):  # a temporary folder may keep the name it has
            calls.append(self)
            if len(calls) in failing:
                raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", flaky)
    with pytest.raises(OSError), fresh_folder(tmp_path / "out", **{**MARK, "overwrite": True}) as staging:
        (staging / "other.txt").write_text("new")
    assert [path.read_text() for path in tmp_path.rglob("done.txt")] == ["old"]


class TestKilledWhileReplacing:
    @pytest.mark.parametrize("renames, found", [(1, "old"), (2, "new")])
    def test_the_old_folder_gets_its_name_back_or_goes(self, renames, found, tmp_path):
        killed_replacement(tmp_path / "out", renames)
        assert (tmp_path / "out").exists() == (renames == 2)
        with pytest.raises(ValueError, match="exists already"):
            check_replaceable(tmp_path / "out", **MARK)
        assert (tmp_path / "out" / "done.txt").read_text() == found
        with fresh_folder(tmp_path / "out", **{**MARK, "overwrite": True}) as staging:
            (staging / "done.txt").write_text("newer")
        assert (tmp_path / "out" / "done.txt").read_text() == "newer"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_a_command_that_reads_the_folder_finds_it(self, tmp_path):
        killed_replacement(tmp_path / "out", renames=1)
        with readable(tmp_path / "out"):
            assert (tmp_path / "out" / "done.txt").read_text() == "old"
        killed_replacement(tmp_path / "data" / "out", renames=1)
        assert data_source(str(tmp_path / "data" / "out")) == str(tmp_path / "data" / "out")
        assert (tmp_path / "data" / "out" / "done.txt").read_text() == "old"
        killed_replacement(tmp_path / "report" / "out", renames=1)
        with pytest.raises(ValueError, match="holds no results"):  # and not: is not a folder
            report_page(tmp_path / "report" / "out")
        assert (tmp_path / "report" / "out" / "done.txt").read_text() == "old"

    def test_the_old_folder_stays_where_another_has_its_name(self, tmp_path):
        killed_replacement(tmp_path / "out", renames=1)
        (tmp_path / "out").mkdir()
        with pytest.raises(ValueError, match="exists already"):
            check_replaceable(tmp_path / "out", **MARK)
        assert [path.read_text() for path in tmp_path.glob(f".out-*{REPLACED}/out/done.txt")] == ["old"]

    def test_a_replacement_that_goes_on_is_left_alone(self, tmp_path, monkeypatch):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "done.txt").write_text("old")
        rename = type(tmp_path).rename

        def watched(self, target):
            if self.name.endswith(LEFTOVER):  # the second rename: there is no `out` now
                check_replaceable(tmp_path / "out", **MARK)
                assert not (tmp_path / "out").exists()
            return rename(self, target)

        with fresh_folder(tmp_path / "out", **{**MARK, "overwrite": True}) as staging:
            (staging / "done.txt").write_text("new")
            monkeypatch.setattr(type(tmp_path), "rename", watched)
        assert (tmp_path / "out" / "done.txt").read_text() == "new"


def test_files_and_folders_have_the_mode_that_the_user_wants(tmp_path, monkeypatch):
    """A folder that is replaced keeps its own."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "done.txt").touch()
    (tmp_path / "old").chmod(0o700)
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("other threads would see another umask"))
        with staged(tmp_path / "table.csv") as staging:
            staging.write_text("whole")
        for name, overwrite in (("out", False), ("old", True)):
            with fresh_folder(tmp_path / name, **{**MARK, "overwrite": overwrite}) as folder:
                (folder / "done.txt").write_text("whole")
                (folder / "done.txt").chmod(0o600)
    finally:
        monkeypatch.undo()
        os.umask(before)
    found = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("table.csv", "out", "old")}
    assert found == {"table.csv": 0o640, "out": 0o750, "old": 0o700}
    assert {(tmp_path / name / "done.txt").stat().st_mode & 0o777 for name in ("out", "old")} == {0o640}
