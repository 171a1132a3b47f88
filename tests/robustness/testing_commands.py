"""Helpers: run a command in this process or in its own, and check how it ended."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from rankattn_cli import main as cli


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip().splitlines() or [""])[-1]


def run_here(arguments: list[str]) -> Ended:
    """`rankattn ARGUMENTS` in this process. An exception other than an exit is raised."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["rankattn", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    return Ended(code, out.getvalue(), err.getvalue())


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


def tiny_checkpoint(folder: Path, minilm: str, **sizes) -> Path:
    """A tiny BERT with a real tokenizer."""
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(**{**fields, "max_position_embeddings": 64, **sizes})).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder
