"""The command line: help, JSON, exit codes, completion, and what a shell does to a program."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hf_rankattn import __version__, cli, console
from hf_rankattn.experiments import EXPERIMENTS
from hf_rankattn.experiments.engines import deaf_to_interrupts
from hf_rankattn.tasks import TASKS


COMMANDS = sorted(command.name or command.callback.__name__ for command in cli.app.registered_commands)
# starts the command as its script does, wherever the package is installed
START = [sys.executable, "-c", "import sys; from rankattn_command import main; sys.exit(main())"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out, printed.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_json(command, capsys):
    code, out, err = run(capsys, command, "--help")
    assert code == 0 and not err
    assert f"Example: rankattn {command}" in out and "--json" in out


def test_help_without_a_command_and_no_escape_codes_in_it(capsys):
    code, out, _ = run(capsys)
    assert code == 2 and all(command in out for command in COMMANDS) and "Example: rankattn demo" in out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80


def test_env_names_what_a_bug_report_needs(capsys):
    code, out, err = run(capsys, "env", "--json")
    report = json.loads(out)
    assert code == 0 and not err
    wanted = (
        "hf_rankattn torch transformers python platform cores memory threads torch_build accelerator attention offline"
    )
    assert set(wanted.split()) <= set(report)
    assert "sdpa" in report["attention"]["rank_models"] and report["peft"]


def test_env_keeps_secrets_and_paths(capsys, monkeypatch):
    for name in ("HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "/private/hf_secret")
    _, out, _ = run(capsys, "env")
    assert "transformers" in out
    assert "secret" not in out and str(Path.home()) + os.sep not in out and os.getcwd() not in out


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


def with_body(monkeypatch, body) -> None:
    app = typer.Typer()
    app.command()(body)
    monkeypatch.setattr(cli, "app", app)


@pytest.mark.parametrize(
    "error, told",
    [
        (ValueError("`qk_rank` must be at least 1,\n  got 0."), "`qk_rank` must be at least 1, got 0."),
        (PermissionError(13, "Permission denied", "runs"), "[Errno 13] Permission denied: 'runs'"),
        (MemoryError(), "there is not enough memory for this."),
        (ValueError("long" * 1000), "long" * 375 + " ..."),
    ],
    ids=["many lines", "a folder that is closed", "memory", "long"],
)
def test_a_failure_is_one_line_and_exit_code_2(error, told, monkeypatch, capsys):
    def refuse() -> None:
        raise error

    with_body(monkeypatch, refuse)
    assert run(capsys) == (2, "", f"rankattn: {told}\n")


def test_an_interrupt_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with_body(monkeypatch, interrupted)
    assert run(capsys) == (130, "", "rankattn: interrupted.\n")


def test_workers_leave_an_interrupt_to_the_command():
    # whoever runs the tests in the background of a shell has a SIGINT that is ignored already
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    asking = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"]
    try:
        with deaf_to_interrupts():
            inside = subprocess.check_output(asking, text=True)
        outside = subprocess.check_output(asking, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (inside, outside) == ("True\n", "False\n")


def test_a_command_that_fails_on_its_own_keeps_its_exit_code(monkeypatch, capsys):
    def three() -> None:
        raise typer.Exit(3)

    with_body(monkeypatch, three)
    assert run(capsys) == (3, "", "")


def test_json_is_all_there_is_on_stdout(capsys):
    code, out, _ = run(capsys, "reproduce", "--list", "--json")
    assert code == 0 and list(json.loads(out)) == list(EXPERIMENTS)


def test_a_reader_that_leaves_early_gets_no_traceback():
    # the pipe is closed before anything is written, as head -1 closes it in the end; what is printed waits in a buffer
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [*START, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


def test_help_and_completion_do_not_wait_for_torch():
    code = (
        "import os, sys, rankattn_command\n"
        "sys.argv = ['rankattn', *sys.argv[1:]]\n"
        "try:\n    rankattn_command.main()\n"
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


def test_completion_knows_the_names_that_are_run():
    assert cli.complete_experiment("") == [*EXPERIMENTS, "all"]
    assert cli.complete_task("") == list(TASKS)
    assert cli.complete_task("conv") == ["convex_hull"]


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_tables_and_progress_without_escape_codes(setting, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if stdout were a terminal
    for name, value in ({"TERM": "xterm-256color"} | setting).items():
        monkeypatch.setenv(name, value)
    console.open_console().print("[bold red]loud[/]")
    with console.progress_bar("working", "steps") as start:
        start(1)()
    printed = capsys.readouterr()
    assert printed.out == "loud\n" and "\x1b" not in printed.err


def test_the_installed_command_runs():
    command = [sys.executable, "-m", "hf_rankattn", "env"]
    assert "transformers" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_tables_break_long_words_and_lose_none_of_their_letters(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    table = console.open_table("model", "source")
    table.add_row("sentence-transformers/all-MiniLM-L6-v2", "Softmax-Attended")
    console.open_console().print(table)
    printed = capsys.readouterr().out
    assert "…" not in printed and sum(letter.isalnum() for letter in printed.split("┡")[1]) == len(
        "sentencetransformersallMiniLML6v2SoftmaxAttended"
    )
