"""Any arguments, sensible or not: a command succeeds, or ends with exit code 2 and one line, and leaves nothing half-written."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing_commands import listing, refused_in_one_line, run_here
from testing_folders import tiny_checkpoint
from transformers import AutoModel

from hf_rankattn.tasks import TASKS
from rankattn_cli.main import app


pytestmark = pytest.mark.slow
# no number that would only take for ever: a command does draw a billion rows if it is asked to
NUMBERS = ["0", "1", "2", "3", "-1", "-0", "1.5", "nan", "inf", "-inf", "1e3"]
NUMBERS += [str(10**12), str(10**30), "-" + "9" * 30]
NUMBERS += ["", " ", "x", "0x10", "٣", "½", "True", "None", "--json"]
WORDS = ["", " ", "x", "no such thing", "ü∞", "a,b", "../..", "-", "--", "-h", "\t", "💥" * 50, "a" * 5000, "%s", "{}"]
# names in the folder in which a command runs; `missing` and `fresh` do not exist
FILES = ["texts.txt", "binary", "empty", "folder", "missing", "tiny", "binary/x", "texts.txt/x", "", ".", "/dev/null"]
FILES += ["ü∞", "a" * 300, "tiny/config.json"]
OUTS = ["fresh", "fresh", "fresh", "deep/er/fresh", "folder", "texts.txt", "texts.txt/x", "", ".", "ü∞ 💥", "a" * 300]
# values for single options: allowed ones, and those that stay fast
VALUES = {
    "distil_steps": ["0", "1", "-1", "x", "1.5"],
    "distil_text": FILES,
    "ranks": ["spectra", "damage", *WORDS],
    "workers": ["0", "-1", "x", "1.5", str(10**30)],
    "variants": ["san", "san,transformer", ",", *WORDS],
    "metrics": ["full", "cheap", *WORDS],
    "scale": ["smoke", "", "x"],
    "engine": ["local", "", "x"],
    "engine_option": ["a=b", "=", *WORDS],
    "dtype": ["float64", "bfloat16", "float16", "int8", *WORDS],
    "calibration": ["texts.txt", "package", *FILES],
    "objective": ["logits", "attention", *WORDS],
    "base_model": ["some/bert", *WORDS],
    "config": ["d64_n16", "d64_n4", *WORDS],
    "distribution": ["uniform", "orthogonal", "doubled", *WORDS],
    "layout": ["joint", "pairs", *WORDS],
    "angles": ["grid", "uniform", *WORDS],
    "tokenizer": ["words", "bytes", "tiny", *WORDS],
    **dict.fromkeys(("text", "text_file", "dataset", "offload_folder", "checkpoint"), FILES),
    "out": OUTS,
}
# command -> cases, arguments that come first, and arguments that keep it small (the last value of an option counts)
SMALL = ["--examples", "2", "--length", "8", "--batch-size", "2", "--metrics", "cheap"]
ROWS = ["--num-examples", "8", "--num-eval-examples", "4"]
SMOKE = ["--scale", "smoke", "--workers", "0"]
ANY: dict[str, tuple[int, list[str], list[str]]] = {
    "measure": (120, ["tiny", "tiny", "tiny", *FILES, *WORDS], SMALL),
    "convert": (120, ["tiny", "tiny", "tiny", *FILES, *WORDS], ["--qk-rank", "3"]),
    "make-data": (150, [*TASKS, *TASKS, *WORDS], ROWS),
    "reproduce": (80, ["path-counts", "path-counts", "expansion", *WORDS, "all-of-them"], SMOKE),
    "report": (40, ["folder", *FILES], []),
    "env": (20, WORDS, []),
    "demo": (20, ["x"], []),
}
# what users mean who know the options: some combinations are refused, most run
SENSIBLE: dict[str, tuple[int, list[str], list[str]]] = {
    "measure": (
        40,
        [" ".join(["tiny", *SMALL])],
        ["--random-inputs", "--text texts.txt", "--random-init --random-inputs", "--variants san,transformer"]
        + ["--variants san+skip", "--metrics full", "--dtype float64", "--dtype bfloat16", "--examples 1"]
        + ["--length 3", "--length 64", "--batch-size 5", "--seed 7", f"--seed {2**40}"],
    ),
    "convert": (
        60,
        ["tiny --qk-rank 3", "tiny --qk-rank 8", "tiny --auto", "tiny --auto --energy 0.8"]
        + ["tiny --auto --mean-rank 4"],
        ["--stream", "--calibration texts.txt", "--calibration texts.txt --objective attention", "--seed 7"]
        + [
            "--calibration texts.txt --distil-steps 1",
            "--ranks damage",
            "--distil-text texts.txt",
            "--base-model some/bert",
        ],
    ),
    "make-data": (
        60,
        [" ".join([task, *ROWS]) for task in TASKS if task != "memorization"]
        + [" ".join(["memorization --text-file texts.txt --tokenizer words", *ROWS])],
        ["--seed 7", "--license cc0-1.0", "--num-examples 1", "--num-examples 9"],
    ),
    "reproduce": (
        12,
        ["path-counts --scale smoke", "expansion --scale smoke"],
        ["--seeds 2", "--workers 0", "--workers 1", "--as-published"],
    ),
}


def any_option(parameter) -> st.SearchStrategy[list[str]]:
    """An option of a command, with a value that it may or may not allow."""
    name = parameter.opts[-1]
    if getattr(parameter, "is_flag", False):
        return st.just([name])
    return st.sampled_from(VALUES.get(parameter.name, NUMBERS + WORDS)).map(lambda value: [name, value])


def any_arguments(command: str, first: list[str], small: list[str]) -> st.SearchStrategy[list[str]]:
    options = [
        parameter for parameter in typer.main.get_command(app).commands[command].params if parameter.opts[0][0] == "-"
    ]
    # --curve converts ten times, and all that --out allows is tried below
    drawn = st.one_of(*(any_option(option) for option in options if option.name not in ("out", "curve", "list_all")))
    some = st.lists(st.one_of(drawn, st.just(["--no-such"])), max_size=3).map(lambda parts: sum(parts, []))
    out = [option for option in options if option.name == "out"]
    where = any_option(out[0]) if out else st.just([])
    return st.tuples(st.sampled_from(first), some, where).map(lambda parts: [parts[0], *small, *parts[1], *parts[2]])


def sensible_arguments(first: list[str], more: list[str]) -> st.SearchStrategy[list[str]]:
    options = st.lists(st.sampled_from(more), max_size=2).map(" ".join)
    drawn = st.tuples(st.sampled_from(first), options).map(lambda parts: " ".join(parts).split())
    out = st.sampled_from(["fresh", "deep/er/fresh", "ü∞ 💥"])
    return st.tuples(drawn, out, st.sampled_from([[], ["--json"]])).map(lambda p: [*p[0], "--out", p[1], *p[2]])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, minilm):
    """A folder with the files that are named in FILES."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_checkpoint(folder / "tiny", minilm)
    (folder / "texts.txt").write_text("One bread is one bread.\n\nTwo loaves are twice as much.\n", encoding="utf-8")
    (folder / "binary").write_bytes(bytes(range(256)) * 4)
    (folder / "empty").write_bytes(b"")
    return folder


def attempt(command: str, arguments: list[str], work: Path, inputs: Path, capsys) -> str:
    for path in inputs.iterdir():
        (work / path.name).symlink_to(path)
    (work / "folder").mkdir()
    before = listing(inputs)
    ended = run_here(capsys, [command, *arguments])
    assert listing(inputs) == before, "an input was changed"
    left = {path.name for path in work.iterdir()} - {path.name for path in inputs.iterdir()} - {"folder"}
    if ended.code == 0:
        assert "Traceback" not in ended.err
        assert not [name for name in left if name.startswith(".")], "a temporary folder is left"
        if command == "convert" and "Usage:" not in ended.out:
            # a streamed conversion writes several files
            weights = [path for path in work.rglob("model*.safetensors") if inputs not in path.resolve().parents]
            (folder,) = {path.parent for path in weights}
            AutoModel.from_pretrained(folder)
        return "ran"
    refused_in_one_line(ended)
    if command == "reproduce":  # its folder, which may have existed, holds what is finished, and nothing else
        left -= {"fresh", "deep"}
    else:
        assert not list((work / "folder").iterdir())
    assert left <= {"deep"}, f"{left} left by a command that failed"
    assert not [path for path in (work / "deep").rglob("*") if path.is_file()] or command == "reproduce"
    return "refused"


@pytest.fixture
def fuzz(inputs, tmp_path, monkeypatch, capsys):
    """Runs cases of a command, each in a folder of its own; returns how many ended how."""

    def run(command: str, drawn: st.SearchStrategy, cases: int) -> Counter:
        counts: Counter = Counter()
        fixed = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}

        @settings(max_examples=cases, **fixed)
        @given(drawn)
        def case(arguments):
            work = tmp_path / "work"
            work.mkdir()
            monkeypatch.chdir(work)
            try:
                counts[attempt(command, arguments, work, inputs, capsys)] += 1
            finally:
                monkeypatch.chdir(tmp_path)
                shutil.rmtree(work, ignore_errors=True)

        case()
        print(command, dict(counts))
        return counts

    return run


@pytest.mark.parametrize("command", ANY)
def test_arguments_run_or_are_refused(command, fuzz):
    cases, first, small = ANY[command]
    counts = fuzz(command, any_arguments(command, first, small), cases)
    assert sum(counts.values()) >= min(cases, 20) or command in ("env", "demo")


@pytest.mark.parametrize("command", SENSIBLE)
def test_sensible_arguments_run(command, fuzz):
    cases, first, more = SENSIBLE[command]
    counts = fuzz(command, sensible_arguments(first, more), cases)
    assert counts["ran"] >= 0.7 * sum(counts.values()) > 0, counts
