"""The command line: help, JSON, exit codes."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_rankattn import __version__, cli


@pytest.mark.parametrize("command", ["convert", "demo", "env", "make-data", "measure", "report"])
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


def test_the_installed_command_runs():
    command = [sys.executable, "-m", "hf_rankattn", "env"]
    assert "transformers" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_version():
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == __version__
