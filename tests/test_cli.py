"""The command line: help, JSON, exit codes."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_rankattn import __version__, cli, demo


@pytest.mark.parametrize("command", ["convert", "demo", "env", "make-data", "measure"])
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0 and f"Example: rankattn {command}" in result.output


def test_env_names_what_a_bug_report_needs():
    result = CliRunner().invoke(cli.app, ["env", "--json"])
    report = json.loads(result.output)
    assert {"hf_rankattn", "torch", "transformers", "python", "accelerator"} <= set(report)


def test_unknown_commands_and_options_exit_with_2():
    assert CliRunner().invoke(cli.app, ["explode"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["env", "--explode"]).exit_code == 2


def test_a_bad_value_is_one_line_and_exit_code_2(monkeypatch, capsys):
    def refuse():
        raise ValueError("`qk_rank` must be at least 1, got 0.")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "rankattn: `qk_rank` must be at least 1, got 0.\n"


@pytest.mark.parametrize(
    "error, line",
    [
        (OSError("disk full"), "rankattn: disk full\n"),
        (MemoryError(), "rankattn: there is not enough memory for this.\n"),
        (ValueError("first line\n  second line"), "rankattn: first line second line\n"),
    ],
)
def test_errors_of_the_machine_are_one_line_too(error, line, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2 and capsys.readouterr().err == line


def test_the_demo_shows_its_claims(monkeypatch):
    monkeypatch.setattr(demo, "STEPS", 40)
    monkeypatch.setattr(demo, "TOTAL_STEPS", 160)
    result = CliRunner().invoke(cli.app, ["demo", "--json"])
    assert result.exit_code == 0, result.output
    claims = json.loads(result.stdout)
    assert len(claims) == 7
    assert claims[4]["measured"] == "0" and claims[5]["measured"] == "16"
    assert claims[6]["measured"] == "884,736"


def test_the_installed_command_runs():
    command = [sys.executable, "-m", "hf_rankattn", "env"]
    assert "transformers" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_version():
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == __version__
