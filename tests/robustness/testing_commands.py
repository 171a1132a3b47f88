"""Helpers: run a command in this process or in its own, and check how it ended."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from testing_probe import run


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip().splitlines() or [""])[-1]


def run_here(capsys, arguments: list[str]) -> Ended:
    """`rankattn ARGUMENTS` in this process. An exception other than an exit is raised."""
    capsys.readouterr()
    return Ended(*run(capsys, *arguments))


def start(arguments: list[str], cwd: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "hf_rankattn", *arguments]
    return subprocess.Popen(command, cwd=cwd, env=environment, start_new_session=True, **pipes)


def wait(process: subprocess.Popen, seconds: float = 300) -> Ended:
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, err)


def refused_in_one_line(ended: Ended) -> None:
    """Exit code 2, no traceback, and a last line that says what is wrong."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err + ended.out, ended.err
    assert ended.last_line.startswith("rankattn: ") and len(ended.last_line) > 30, ended.err
    assert len(ended.last_line) < 2000, f"{len(ended.last_line)} characters: {ended.last_line[:300]}"
    assert sum(line.startswith("rankattn: ") for line in ended.err.splitlines()) == 1


def listing(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their bytes, hidden files and empty folders included."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
