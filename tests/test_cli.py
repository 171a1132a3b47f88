"""The command line: help, JSON, exit codes, completion, one line for every error, and what a shell does to a program."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import typer
from safetensors import SafetensorError
from testing_probe import run

from hf_rankattn import __version__
from hf_rankattn.papers import EXPERIMENTS
from hf_rankattn.papers.sweep.engines import deaf_to_interrupts
from hf_rankattn.tasks import TASKS
from rankattn_cli import completion
from rankattn_cli import main as cli


COMMANDS = sorted(command.name for command in cli.app.registered_commands)
# starts the command as its script does, wherever the package is installed
START = [sys.executable, "-c", "from rankattn_cli.main import main; main()"]


def test_every_file_is_a_command_with_help_an_example_and_json(capsys):
    files = Path(cli.commands.__path__[0]).glob("[!_]*.py")
    assert sorted(file.stem.replace("_", "-") for file in files) == COMMANDS
    for command in COMMANDS:
        code, out, err = run(capsys, command, "--help")
        assert code == 0 and not err
        assert f"Example: rankattn {command}" in out and "--json" in out


def test_help_without_a_command_and_no_escape_codes_in_it(capsys):
    code, out, _ = run(capsys)
    assert code == 2 and all(command in out for command in COMMANDS) and "Example: rankattn demo" in out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_env_has_what_a_bug_report_needs_without_secrets_and_paths(capsys, monkeypatch):
    for name in ("HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "/private/hf_secret")
    code, out, err = run(capsys, "env", "--json")
    report = json.loads(out)
    wanted = (
        "hf_rankattn torch transformers python cores memory threads torch_build accelerator attention offline peft"
    )
    assert code == 0 and not err and set(wanted.split()) <= set(report)
    assert "sdpa" in report["attention"]["rank_models"]
    _, lines, _ = run(capsys, "env")
    assert f"- torch: {report['torch']}\n" in lines
    for printed in (out, lines):
        assert "secret" not in printed and str(Path.home()) + os.sep not in printed and os.getcwd() not in printed


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["explode"], "No such command 'explode'"),
        (["env", "--explode"], "No such option: --explode"),
        (["measure"], "Missing argument 'model'"),
        (["measure", "model", "--out", "folder", "--dtype", "int8"], "'int8' is not one of 'float32', 'float64'"),
        (["make-data", "sorting", "--out", "folder", "--dim", "wide"], "Invalid value for '--dim'"),
        (["reproduce", "nothing"], "there is no experiment 'nothing'; the experiments are"),
        (["reproduce", "expansion", "--seeds", "0"], "equal to 1, got '0'. See"),
        (["measure", "model", "--seed", "1.5"], "as an integer, got '1.5'. See"),
    ],
)
def test_bad_usage_is_one_line_on_stderr_and_exit_code_2(arguments, told, capsys):
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out
    assert err.startswith("rankattn: ") and err.count("\n") == 1 and err.endswith("\n")
    assert told in err and "Value error" not in err
    # an unknown experiment lists those that exist instead
    assert "--help" in err or "the experiments are" in err


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.fixture
def raising(monkeypatch):
    """Replaces the commands by one that raises an error."""

    def replace(error: BaseException) -> None:
        def fails() -> None:
            raise error

        app = typer.Typer()
        app.command()(fails)
        monkeypatch.setattr(cli, "app", app)

    return replace


@pytest.mark.parametrize(
    "error, code, told",
    [
        (ValueError("`qk_rank` must be at least 1,\n  got 0."), 2, "`qk_rank` must be at least 1, got 0.\n"),
        (ValueError("long" * 1000), 2, "long" * 375 + " ...\n"),
        (PermissionError(13, "Permission denied", "runs"), 2, "[Errno 13] Permission denied: 'runs'\n"),
        (MemoryError(), 2, "there is not enough memory for this.\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 2, "there is not enough memory"),
        (OSError(errno.ENOSPC, "No space left on device", "out/model"), 2, "the disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 2, "the disk is full"),
        (httpx2.ConnectError("Connection refused"), 2, "the network or the Hub"),
        (ConnectionResetError(), 2, "the network or the Hub"),
        (RecursionError("maximum recursion depth exceeded"), 2, "a file is nested too deeply"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 2, "a file is not UTF-8"),
        (RuntimeError("Symlink loop from 'out'"), 2, "Symlink loop from 'out'\n"),
        (KeyError("layers"), 1, "unexpected KeyError: 'layers'. RANKATTN_DEBUG=1 shows the traceback.\n"),
        (AssertionError(), 1, "unexpected AssertionError: no message. RANKATTN_DEBUG=1 shows the traceback.\n"),
        (PanicException("out of bounds"), 1, "unexpected PanicException: out of bounds. RANKATTN_DEBUG=1 shows"),
        (KeyboardInterrupt(), 130, "interrupted.\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_one_line_and_an_exit_code(error, code, told, raising, capsys):
    raising(error)
    ended, out, err = run(capsys)
    assert (ended, out) == (code, "") and err.startswith(f"rankattn: {told}") and err.count("\n") == 1


def test_a_command_that_exits_keeps_its_code(raising, capsys):
    raising(typer.Exit(3))
    assert run(capsys) == (3, "", "")


@pytest.mark.parametrize("error", [ValueError("a wrong rank"), KeyError("a wrong rank")])
def test_an_error_is_raised_for_debugging(error, raising, monkeypatch):
    raising(error)
    monkeypatch.setenv("RANKATTN_DEBUG", "1")
    with pytest.raises(type(error), match="a wrong rank") as caught:
        cli.main([])
    assert caught.traceback[-1].name == "fails"


@pytest.mark.parametrize(
    "message, told",
    [
        ("`qk_rank` must be at least 1, got 0.", "--qk-rank must be at least 1, got 0."),
        ("replace it with overwrite=True.", "replace it with --overwrite."),
        ("`energy` is for qk_rank='auto', got qk_rank=4.", "--energy is for --auto, got --qk-rank 4."),
        ("`mean_rank`=3.5 is high: use objective='logits'.", "--mean-rank 3.5 is high: use --objective logits."),
        ("`hidden_size` and hidden_size=3 are no options.", "`hidden_size` and hidden_size=3 are no options."),
        ("/runs/seed=1/out exists already, seed=1.", "/runs/seed=1/out exists already, --seed 1."),
        ("the seed and the model of a stream", "the seed and the model of a stream"),
        ("m cannot be read as a checkpoint: `qk_rank` is 0.", "m cannot be read as a checkpoint: `qk_rank` is 0."),
    ],
)
def test_messages_of_the_library_name_options(message, told):
    assert cli.in_options(message, cli.options_of(["convert", "model"])) == told


def test_workers_ignore_an_interrupt_that_the_command_handles():
    # a shell that runs the tests in the background ignores SIGINT already
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    asking = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"]
    try:
        with deaf_to_interrupts():
            inside = subprocess.check_output(asking, text=True)
        outside = subprocess.check_output(asking, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (inside, outside) == ("True\n", "False\n")


def test_json_is_all_there_is_on_stdout(capsys):
    code, out, _ = run(capsys, "reproduce", "--list", "--json")
    assert code == 0 and list(json.loads(out)) == list(EXPERIMENTS)


def test_a_closed_pipe_gives_no_traceback():
    # the pipe is closed before anything is written, as by head -1 in the end; the output waits in a buffer
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*START, "--version"], env=settings, **pipes)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


def test_help_and_completion_do_not_import_torch():
    code = (
        "import os, sys\nfrom rankattn_cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'hf_rankattn'} & set(sys.modules)\n"
        "    os._exit(bool(sys.stdout.flush() or heavy))\n"
    )
    start = [sys.executable, "-c", code]
    asked = {"COMP_WORDS": "rankattn reproduce rank-", "COMP_CWORD": "2", "_RANKATTN_COMPLETE": "complete_bash"}
    helped = subprocess.run([*start, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and "reproduce" in helped.stdout, helped.stderr
    completed = subprocess.run(start, capture_output=True, text=True, env=os.environ | asked)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == [name for name in EXPERIMENTS if name.startswith("rank-")]


def test_completion_has_the_names_that_can_be_run():
    assert completion.complete_experiment("") == [*EXPERIMENTS, "all"]
    assert completion.complete_task("") == sorted(TASKS)
    assert completion.complete_task("conv") == ["convex_hull"]
