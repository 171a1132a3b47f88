"""What commands print: tables at every width, names as they are, progress, and errors in terms of the command line."""

import json
import os
import subprocess
import sys
import time

import pytest
from datasets import Dataset
from matplotlib.text import Text as FigureText
from rich.text import Text
from testing_folders import change_config, tiny_checkpoint
from testing_probe import run

from hf_rankattn import package_text
from hf_rankattn.report.plots import literal
from rankattn_cli import console
from rankattn_cli.commands import reproduce


FORBIDDEN = ("\x1b", "\x9b", "\x07", "\u202e", "\u2066")
EVIL = "e\x1b[31m\x1b]0;title\x07\u202evil"
QUICK = ("--examples", "2", "--length", "16", "--metrics", "cheap")


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory, minilm):
    """Writes a tiny BERT with a real tokenizer to a folder of any name."""

    def make(name: str, **fields) -> str:
        folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / name, minilm)
        change_config(folder, **fields)
        return str(folder)

    return make


def refused(capsys, *command) -> str:
    """The one line of a command that is refused."""
    code, out, err = run(capsys, *command)
    assert code == 2 and not out and err.startswith("rankattn: ") and err.count("\n") == 1, (command, err)
    return err


ROWS = (
    ("Do tokens stay apart from layer to layer?", "yes: 0.98 at the input", "published, bert-base-uncased: 0.69"),
    ("How much query-key rank is used?", "12 of 32", "sentence-transformers/all-MiniLM-L6-v2"),
)


@pytest.mark.parametrize("width", (40, 60, 80, 120))
def test_tables_break_no_word_and_are_stacked_on_a_narrow_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    console.print_table(["question", "answer", "to compare"], ROWS, title="a model", show_lines=True)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert {word for row in ROWS for cell in row for word in cell.split()} <= set(printed.split())
    assert ("┃" in printed) == (width >= 80)
    assert width >= 80 or ("answer: 12 of 32\n" in printed and printed.startswith("a model\n"))


def test_a_word_wider_than_the_terminal_loses_no_letter(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    console.print_table(["model"], [["sentence-transformers/all-MiniLM-L6-v2"]])
    assert "sentence-transformers/all-MiniLM-L6-v2" in capsys.readouterr().out.replace("\n", "")


def test_lines_are_wrapped_between_words_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    line = "In a/folder/with/a/long/name: table.parquet, residuals.png"
    console.say(line)
    assert capsys.readouterr().out == f"{line}\n"
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    console.say(line)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 2 and printed.split() == line.split()


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_tables_and_progress_without_escape_codes(setting, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if stdout were a terminal
    for name, value in ({"TERM": "xterm-256color"} | setting).items():
        monkeypatch.setenv(name, value)
    console.open_console().print(Text("loud", style="bold red"))
    with console.Bar("{task.completed}") as bar:
        bar.advance(bar.add_task("working", total=1))
    printed = capsys.readouterr()
    assert printed.out == "loud\n" and "\x1b" not in printed.err


class TestNames:
    @pytest.mark.parametrize("name", ["a[/b] :smile:", rf"$\frac$ {EVIL}"])
    def test_any_name_is_printed_and_drawn(self, name, make_checkpoint, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "40")
        model, shown = make_checkpoint(name), console.printable(name)
        commands = (
            ("measure", model, "--out", tmp_path / name, *QUICK),
            ("report", tmp_path / name, "--out", tmp_path / f"{name}.html"),
            ("convert", model, "--qk-rank", "4", "--calibration", "none", "--out", tmp_path / "converted" / name),
            ("convert", model, "--curve", "--out", tmp_path / f"{name}.png"),
        )
        for command in commands:
            code, out, err = run(capsys, *command)
            assert code == 0, err
            assert shown in "".join(out.split("\n")) and not any(mark in out + err for mark in FORBIDDEN), command[0]
            assert command[0] != "measure" or all(
                words in " ".join(out.split())
                for words in ("to compare: published, bert-base-cased,", "(1: tokens share nothing; 0: all tokens are")
            )
        assert (tmp_path / f"{name}.png").stat().st_size

    @pytest.mark.parametrize("name", ["$x$", r"$\frac", r"a\$b$c$", "plain"])
    def test_figures_show_a_name_letter_by_letter(self, name):
        drawn = FigureText(text=literal(name))
        assert drawn._preprocess_math(drawn.get_text()) == (name, False)

    def test_file_names_that_are_not_utf_8_are_printed(self, capsys):
        console.say("caf\udce9")
        assert capsys.readouterr().out == "caf\\udce9\n"

    def test_what_files_hold_cannot_control_the_terminal(self, make_checkpoint, tmp_path, capsys):
        Dataset.from_dict({EVIL: ["a"], f"{EVIL}2": ["b"]}).to_parquet(tmp_path / "data" / "test-0.parquet")
        capsys.readouterr()  # datasets shows its progress if no test before this one has switched it off
        of_type = make_checkpoint("of-type", model_type=EVIL)
        commands = (
            ("measure", of_type, "--out", tmp_path / "out"),
            ("convert", of_type, "--qk-rank", "4", "--out", tmp_path / "out"),
            ("measure", make_checkpoint("tiny"), "--dataset", tmp_path / "data", "--out", tmp_path / "out"),
            ("report", EVIL, "--out", tmp_path / "page.html"),
        )
        for command in commands:
            err = refused(capsys, *command)
            assert "\\x1b" in err and not any(mark in err for mark in FORBIDDEN), command


class TestProgress:
    def test_nothing_but_json_under_json(self, make_checkpoint, tmp_path):
        start = [sys.executable, "-m", "hf_rankattn", "convert", make_checkpoint("tiny"), "--qk-rank", "4", "--json"]
        start += ["--calibration", "none"]
        shown = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
        shown.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
        done = subprocess.run([*start, "--out", tmp_path / "out"], capture_output=True, text=True, env=shown)
        assert done.returncode == 0 and json.loads(done.stdout)["folder"]
        assert "it/s" not in done.stderr and "%|" not in done.stderr and "converting" not in done.stderr

    @pytest.mark.parametrize("as_json", [True, False])
    def test_plain_lines_where_there_is_no_terminal(self, as_json, monkeypatch, capsys):
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setattr(console, "progress_wanted", True)
        console.set_progress(not as_json)
        with console.Bar("{task.completed}", plain_every=0.0) as bar:
            task = bar.add_task("measuring", total=2)
            bar.advance(task)
            bar.update(task, completed=2)
        monkeypatch.setattr(reproduce, "PLAIN_EVERY", 0.0)
        with reproduce.sweep_bar() as start_sweep:
            start_sweep("expansion", 1)()
        printed = capsys.readouterr().err
        if as_json:
            assert not printed
        else:
            assert "measuring: 1/2, 0 s\nmeasuring: 2/2, 0 s\nexpansion: 1/1 cells" in printed

    def test_plain_lines_are_rare(self, monkeypatch, capsys):
        monkeypatch.setattr(console, "progress_wanted", True)
        now = iter(range(0, 1000, 10))
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
        bar = console.Bar("{task.completed}", plain_every=30.0)
        task = bar.add_task("working", total=10)
        for _ in range(10):
            bar.advance(task)
        assert 1 <= capsys.readouterr().err.count("working: ") <= 5
        with reproduce.sweep_bar() as start_sweep:
            advance = start_sweep("sweep", 10)
            for _ in range(10):
                advance()
        assert 1 <= capsys.readouterr().err.count("sweep: ") <= 5


def test_errors_name_options_and_not_python_arguments(make_checkpoint, tmp_path, capsys):
    model, there, texts = make_checkpoint("tiny"), tmp_path / "there", tmp_path / "texts.txt"
    there.mkdir()
    texts.write_text("\n\n".join(package_text()[:2]))
    out = ("--out", tmp_path / "out")
    commands = (
        ("convert", model, "--qk-rank", "0", *out),
        ("convert", model, "--qk-rank", "4", "--energy", "0.5", *out),
        ("convert", model, "--auto", "--energy", "0.5", "--mean-rank", "3", *out),
        ("convert", model, "--auto", "--energy", "5", *out),
        ("convert", model, "--auto", "--mean-rank", "99", *out),
        ("convert", model, "--qk-rank", "4", "--objective", "nothing", *out),
        ("convert", model, "--qk-rank", "4", "--distil-steps", "-1", *out),
        ("convert", model, "--qk-rank", "4", "--out", there),
        ("measure", model, "--out", there),
        ("measure", model, "--length", "1", *out),
        ("measure", model, "--batch-size", "0", *out),
        ("measure", model, "--variants", "all", *out),
        ("make-data", "sorting", "--length", "0", *out),
        ("make-data", "nearest_neighbor", "--num-points", "8", "--dim", "4", "--distribution", "orthogonal", *out),
        ("make-data", "token_retrieval", "--length", "64", "--num-keys", "2", *out),
        ("make-data", "memorization", "--text-file", texts, "--max-length", "9999", *out),
        ("make-data", "sorting", "--out", there),
        ("report", there, *out),
        ("demo", "--out", there),
    )
    for command in commands:
        err = refused(capsys, *command)
        assert not any(mark in err for mark in ("`", "=True", "='", "list of", "batches")), (command, err)


def test_named_pipes_are_refused_before_they_are_opened(make_checkpoint, tmp_path, capsys):
    model, out = make_checkpoint("tiny"), ("--out", tmp_path / "out")
    for pipe in (tmp_path / "pipe", tmp_path / "pipe.html"):
        os.mkfifo(pipe)
    text = tmp_path / "pipe"
    commands = (
        ("measure", model, "--text", text, *out),
        ("convert", model, "--qk-rank", "4", "--calibration", text, *out),
        ("make-data", "memorization", "--text-file", text, *out),
        ("reproduce", "residuals", "--scale", "smoke", "--checkpoint", model, "--text", text, *out),
        ("report", tmp_path, "--out", tmp_path / "pipe.html", "--overwrite"),
    )
    for command in commands:
        err = refused(capsys, *command)
        assert "it is not a regular file" in err or "was not written by rankattn" in err, err


def test_code_of_a_checkpoint_is_refused_in_plain_words(make_checkpoint, tmp_path, capsys):
    model = make_checkpoint("custom", model_type="mine", auto_map={"AutoConfig": "m.C", "AutoModel": "m.M"})
    for command in (("measure", model), ("convert", model, "--qk-rank", "4")):
        err = refused(capsys, *command, "--out", tmp_path / "out")
        assert "trust_remote_code" not in err and "code of its own" in err
