"""Any arguments, sensible or not: a command ends well, or with exit code 2 and one line, and leaves nothing half-written."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing_commands import listing, refused_in_one_line, run_here, start, tiny_checkpoint, wait
from transformers import AutoModel

from hf_rankattn.tasks.loading import TASKS


CASES = {"measure": 120, "convert": 120, "make-data": 150, "reproduce": 80, "env": 20, "demo": 20}
SENSIBLE_CASES = {"measure": 40, "convert": 60, "make-data": 60, "reproduce": 12}

# No number that would only take for ever: a command that was told to draw a billion rows, or to distil as long, does.
NUMBERS = ["0", "1", "2", "3", "-1", "-0", "1.5", "nan", "inf", "-inf", "1e3", str(10**12), str(10**30), "-" + "9" * 30,
           "", " ", "x", "0x10", "٣", "½", "True", "None", "--json"]  # fmt: skip
WORDS = [
    "",
    " ",
    "x",
    "no such thing",
    "ü∞",
    "a,b",
    "../..",
    "-",
    "--",
    "-h",
    "\t",
    "💥" * 50,
    "a" * 5000,
    "%s",
    "{}",
    "$HOME",
]
# names in the folder in which a command runs; `fresh` is the only one that is not there
FILES = ["texts.txt", "binary", "empty", "folder", "missing", "tiny", "binary/x", "texts.txt/x", "", ".", "/dev/null", "ü∞",
         "a" * 300, "tiny/config.json"]  # fmt: skip
OUTS = [
    "fresh",
    "fresh",
    "fresh",
    "deep/er/fresh",
    "folder",
    "texts.txt",
    "texts.txt/x",
    "",
    ".",
    "tiny",
    "ü∞ 💥",
    "a" * 300,
]


def option(name: str, *values: str) -> st.SearchStrategy[list[str]]:
    return st.sampled_from(values).map(lambda value: [name, value])


def some(*options: st.SearchStrategy[list[str]], most: int = 3) -> st.SearchStrategy[list[str]]:
    return st.lists(st.one_of(*options), max_size=most).map(lambda parts: [word for part in parts for word in part])


def joined(*parts: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    return st.tuples(*parts).map(lambda chosen: [word for part in chosen for word in part])


def one_of(*values: str) -> st.SearchStrategy[list[str]]:
    return st.sampled_from(values).map(lambda value: [value])


JSON = st.sampled_from([[], ["--json"]])
# an option given twice counts as given last, so these keep what is drawn after them small
SMALL = st.just(["--examples", "2", "--length", "8", "--batch-size", "2", "--metrics", "cheap"])
FEW_ROWS = st.just(["--num-examples", "8", "--num-eval-examples", "4"])
COMMANDS: dict[str, st.SearchStrategy[list[str]]] = {
    "measure": joined(
        one_of("tiny", "tiny", "tiny", *FILES, *WORDS),
        SMALL,
        some(
            option("--text", *FILES),
            option("--dataset", *FILES),
            option("--split", *WORDS),
            option("--column", *WORDS),
            option("--variants", "san", "san,transformer", ",", *WORDS),
            option("--metrics", "full", *WORDS),
            option("--dtype", "float64", "bfloat16", "float16", "int8", *WORDS),
            option("--revision", "main", *WORDS),
            option("--device-map", "cpu", *WORDS),
            option("--offload-folder", *FILES),
            *(option(f"--{name}", *NUMBERS) for name in ("examples", "length", "batch-size", "seed", "processes")),
            st.sampled_from([["--random-inputs"], ["--random-init"], ["--overwrite"], ["--no-such"]]),
        ),
        option("--out", *OUTS),
        JSON,
    ),
    "convert": joined(
        one_of("tiny", "tiny", "tiny", *FILES, *WORDS),
        st.sampled_from([["--qk-rank", "3"], ["--qk-rank", "12"], ["--auto"], []]),
        some(
            *(option(f"--{name}", *NUMBERS) for name in ("qk-rank", "energy", "mean-rank", "seed")),
            option("--distil-steps", "0", "1", "-1", "x", "1.5"),
            option("--calibration", "texts.txt", "package", *FILES),
            option("--objective", "logits", "attention", *WORDS),
            option("--base-model", "some/bert", *WORDS),
            st.sampled_from([["--stream"], ["--overwrite"], ["--auto"], ["--no-such"]]),
        ),
        option("--out", *OUTS),
        JSON,
    ),
    "make-data": joined(
        one_of(*TASKS, *TASKS, *WORDS),
        FEW_ROWS,
        some(
            *(
                option(f"--{name}", *NUMBERS)
                for name in ("dim", "num-points", "num-queries", "length", "num-values", "num-keys", "max-length", "seed",
                             "num-examples", "num-eval-examples")
            ),
            option("--config", "d64_n16", "d64_n4", *WORDS),
            option("--distribution", "uniform", "orthogonal", "doubled", *WORDS),
            option("--layout", "joint", "pairs", *WORDS),
            option("--angles", "grid", "uniform", *WORDS),
            option("--text-file", *FILES),
            option("--tokenizer", "words", "bytes", "tiny", *WORDS),
            option("--license", "cc0-1.0", *WORDS),
            option("--push", "somebody/data", *WORDS),
            st.sampled_from([["--overwrite"], ["--no-such"]]),
        ),
        option("--out", *OUTS),
        JSON,
    ),
    "reproduce": joined(
        one_of("path-counts", "path-counts", "expansion", *WORDS, "all-of-them"),
        st.just(["--scale", "smoke", "--workers", "0"]),
        some(
            option("--seeds", *NUMBERS),
            option("--scale", *WORDS),
            option("--engine", "local", *WORDS),
            option("--engine-option", "a=b", "=", *WORDS),
            option("--workers", "0", "-1", "x", "1.5", str(10**30)),
            option("--checkpoint", *FILES),
            option("--text", *FILES),
            option("--dataset", *FILES),
            st.sampled_from([["--as-published"], ["--list"], ["--no-such"]]),
        ),
        # it adds to a folder that is there, so not to one that other cases share
        option("--out", *(out for out in OUTS if out != "tiny")),
        JSON,
    ),
    "env": some(option("--json"[:2], *WORDS), one_of(*WORDS), one_of("--no-such"), JSON).filter(bool),
    "demo": some(one_of(*(word for word in WORDS if word != "-h")), one_of("--no-such")).map(lambda words: ["--", "x", *words]),
}  # fmt: skip
# what a user means who knows the options: some combinations are still refused, but most run
SENSIBLE: dict[str, st.SearchStrategy[list[str]]] = {
    "measure": joined(
        one_of("tiny"),
        SMALL,
        st.sampled_from([[], ["--random-inputs"], ["--text", "texts.txt"], ["--random-init", "--random-inputs"]]),
        some(
            option("--variants", "san", "san,transformer", "san+skip", "transformer,san+mlp"),
            option("--metrics", "full", "cheap"),
            option("--dtype", "float32", "float64", "bfloat16"),
            option("--examples", "1", "2", "3"),
            option("--length", "3", "8", "64"),
            option("--batch-size", "1", "2", "5"),
            option("--seed", "0", "7", str(2**40)),
        ),
        option("--out", "fresh", "deep/er/fresh", "ü∞ 💥"),
        JSON,
    ),
    "convert": joined(
        one_of("tiny"),
        st.sampled_from([["--qk-rank", "3"], ["--qk-rank", "12"], ["--qk-rank", "8"], ["--auto"], ["--auto", "--energy", "0.8"],
                         ["--auto", "--mean-rank", "4"], ["--qk-rank", "2,5"]]),
        st.sampled_from([[], ["--stream"], ["--calibration", "texts.txt"],
                         ["--calibration", "texts.txt", "--objective", "attention"],
                         ["--calibration", "texts.txt", "--distil-steps", "1"]]),
        some(option("--seed", "0", "7"), option("--base-model", "some/bert"), most=2),
        option("--out", "fresh", "deep/er/fresh", "ü∞ 💥"),
        JSON,
    ),
    "make-data": joined(
        st.sampled_from([
            *([task] for task in TASKS if task != "memorization"),
            ["farthest_neighbor", "--dim", "5", "--num-points", "3"],
            ["nearest_neighbor", "--num-points", "7"],
            ["sorting", "--length", "4", "--num-values", "9"],
            ["convex_hull", "--num-points", "6"],
            ["memorization", "--text-file", "texts.txt", "--tokenizer", "words"],
        ]),
        FEW_ROWS,
        some(option("--seed", "0", "7"), option("--license", "cc0-1.0"), option("--num-examples", "1", "9"), most=2),
        option("--out", "fresh", "deep/er/fresh", "ü∞ 💥"),
        JSON,
    ),
    "reproduce": joined(
        one_of("path-counts", "expansion"),
        st.just(["--scale", "smoke"]),
        some(option("--seeds", "1", "2"), option("--workers", "0", "1"), one_of("--as-published"), most=2),
        option("--out", "fresh", "deep/er/fresh", "ü∞ 💥"),
        JSON,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, minilm):
    """A folder with what the names in FILES speak of."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_checkpoint(folder / "tiny", minilm)
    (folder / "texts.txt").write_text("One bread is one bread.\n\nTwo loaves are twice as much.\n", encoding="utf-8")
    (folder / "binary").write_bytes(bytes(range(256)) * 4)
    (folder / "empty").write_bytes(b"")
    return folder


def attempt(command: str, arguments: list[str], work: Path, inputs: Path) -> str:
    for path in inputs.iterdir():
        (work / path.name).symlink_to(path)
    (work / "folder").mkdir()
    before = listing(inputs)
    ended = run_here([command, *arguments])
    assert listing(inputs) == before, "an input was changed"
    left = {path.name for path in work.iterdir()} - {path.name for path in inputs.iterdir()} - {"folder"}
    if ended.code == 0:
        assert "Traceback" not in ended.err
        assert not [name for name in left if name.startswith(".")], "a temporary folder is left"
        if command == "convert" and "Usage:" not in ended.out:
            (folder,) = (
                path.parent for path in work.rglob("model.safetensors") if inputs not in path.resolve().parents
            )
            AutoModel.from_pretrained(folder)
        return "ran"
    refused_in_one_line(ended)
    if command == "reproduce":  # its folder, which may have been there, holds what is finished, and nothing else
        left -= {"fresh", "deep"}
    else:
        assert not list((work / "folder").iterdir())
    assert left <= {"deep"}, f"{left} left by a command that failed"
    assert not [path for path in (work / "deep").rglob("*") if path.is_file()] or command == "reproduce"
    return "refused"


def fuzz(command: str, drawn: st.SearchStrategy, cases: int, inputs: Path, folder: Path, monkeypatch) -> Counter:
    counts: Counter = Counter()

    @settings(
        max_examples=cases, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(drawn)
    def case(arguments):
        work = folder / "work"
        work.mkdir()
        monkeypatch.chdir(work)
        try:
            counts[attempt(command, arguments, work, inputs)] += 1
        finally:
            monkeypatch.chdir(folder)
            shutil.rmtree(work, ignore_errors=True)

    case()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_run_or_are_refused(command, inputs, tmp_path, monkeypatch):
    counts = fuzz(command, COMMANDS[command], CASES[command], inputs, tmp_path, monkeypatch)
    print(command, dict(counts))
    assert sum(counts.values()) >= min(CASES[command], 20)


@pytest.mark.slow
@pytest.mark.parametrize("command", SENSIBLE)
def test_sensible_arguments_run(command, inputs, tmp_path, monkeypatch):
    counts = fuzz(command, SENSIBLE[command], SENSIBLE_CASES[command], inputs, tmp_path, monkeypatch)
    print(command, "sensible", dict(counts))
    assert counts["ran"] >= 0.7 * SENSIBLE_CASES[command], counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["measure", "missing", "--out", "fresh"],
        ["measure", "tiny", "--out", "texts.txt/x"],
        ["measure", "tiny", "--text", "binary", "--out", "fresh"],
        ["convert", "tiny/config.json", "--qk-rank", "3", "--out", "fresh"],
        ["convert", "tiny", "--qk-rank", "9" * 40, "--out", "fresh"],
        ["make-data", "sorting", "--length", "-3", "--out", "fresh"],
        ["make-data", "memorization", "--text-file", "binary", "--out", "fresh"],
        ["reproduce", "expansion", "--scale", "smoke", "--out", "texts.txt"],
        ["reproduce", "nothing"],
        ["explode"],
    ],
    ids=lambda arguments: "-".join(arguments[:2])[:40],
)
def test_a_process_of_its_own_ends_in_one_line_too(arguments, inputs, tmp_path):
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    refused_in_one_line(wait(start(arguments, tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in inputs.iterdir()}
