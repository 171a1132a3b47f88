"""The examples run from the command line, offline, in an empty folder."""

import csv
import json
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub import ModelCard
from scipy.stats import rankdata
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer

from hf_rankattn import convert_rank, package_text
from hf_rankattn.files.companions import copy_companions


EXAMPLES = Path(__file__).parent.parent / "examples"


def run(tmp_path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=300)


@pytest.mark.slow
def test_rank_separates_in_choose_head_geometry(tmp_path):
    script = str(EXAMPLES / "choose_head_geometry.py")
    result = run(tmp_path, script, "--ranks", "1", "4", "--output_dir", "best")
    assert result.returncode == 0, result.stderr[-2000:]
    accuracy = dict(re.findall(r"qk_rank +(\d+): accuracy ([\d.]+)", result.stdout))
    assert float(accuracy["1"]) < 0.85 and float(accuracy["4"]) > 0.98
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in (tmp_path / "best").iterdir()}
    refused = run(tmp_path, script, "--ranks", "1", "--steps", "1", "--output_dir", "best")
    assert refused.returncode == 2 and "exists already" in refused.stderr
    assert "accuracy | " in (tmp_path / "best" / "README.md").read_text()


def test_follow_rank_in_training(tmp_path):
    script = str(EXAMPLES / "follow_rank_in_training.py")
    result = run(tmp_path, script, "--steps", "4", "--every", "2", "--qk_rank", "3")
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] in (["2"], ["4"])]
    assert len(rows) == 2 and all(1 <= float(row[2]) <= 16 and float(row[4]) <= 3 for row in rows)
    refused = run(tmp_path, script, "--qk_rank", "0")
    assert refused.returncode == 2 and "qk_rank" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_publish_points_models(tmp_path):
    script = str(EXAMPLES / "publish_points_models.py")
    sizes = "--steps 20 --dim 16 --num_points 4 --intermediate 16".split()
    result = run(tmp_path, script, "--output_dir", "models", "--cards", "cards", *sizes)
    assert result.returncode == 0, result.stderr[-2000:]
    names = {"rank-encoder-farthest-d16-r16", "rank-encoder-farthest-d16-r8"}
    assert {path.name for path in (tmp_path / "models").iterdir()} == {*names, "table.parquet"}
    assert {path.stem for path in (tmp_path / "cards").iterdir()} == names


def accuracies_by_length(card: ModelCard) -> np.ndarray:
    """The rows of a card's table of paths: length, 5 and 20 isolated paths, exact terms alone and up to the length."""
    return np.array(
        [line.strip("| ").split(" | ") for line in re.findall(r"^\|(?: [\d.]+ \|){5}$", card.text, re.M)], float
    )


@pytest.mark.slow
def test_publish_sorting_model(tmp_path):
    script = str(EXAMPLES / "publish_sorting_model.py")
    small = {"epochs": 2, "train": 60, "scored": 64, "repetitions": 2, "seed": 3}
    flags = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    result = run(tmp_path, script, "--output_dir", "models", "--cards", "cards", *flags)
    assert result.returncode == 0, result.stderr[-2000:]
    folder = tmp_path / "models" / "rank-encoder-sorting"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    assert (folder / "README.md").read_text() == (tmp_path / "cards" / "rank-encoder-sorting.md").read_text()

    names = runpy.run_path(script)
    arguments = names["Arguments"](output_dir=str(tmp_path / "other"), **small)
    trained, scored, row = names["train_sorter"](names["setting"](arguments, False))
    loaded = AutoModelForTokenClassification.from_pretrained(folder)
    with torch.no_grad():
        logits = loaded(**scored).logits
        torch.testing.assert_close(logits, trained(**scored).logits)
    right = logits.argmax(-1) == scored["labels"]

    table = pd.read_parquet(tmp_path / "models" / "table.parquet")
    ours, published = (table[(table.way == "whole") & (table.as_published == flag)].iloc[0] for flag in (False, True))
    assert (ours.token_accuracy, ours.sequence_accuracy) == pytest.approx(
        (right.double().mean().item(), right.all(1).double().mean().item())
    )
    assert (ours.learning_rate, published.learning_rate) == (1e-3, 1e-5)
    card = ModelCard.load(folder / "README.md")
    measured = [round(accuracy, 4) for accuracy in (ours.token_accuracy, ours.sequence_accuracy)]
    assert [result.metric_value for result in card.data.eval_results] == measured
    text = " ".join(card.text.split())
    assert f"(position only: {ours.baseline_position_only:.4f}) | {round(ours.token_accuracy, 4)} |" in text
    assert f"token accuracy was {published.token_accuracy:.4f}, and {published.sequence_accuracy:.4f} of the" in text
    paths = table[table.way != "whole"]
    expected = [
        [length]
        + [rows[rows.drawn == drawn].accuracy.mean() for drawn in (5, 20)]
        + [rows[rows.way == way].accuracy.item() for way in ("only", "up_to")]
        for length, rows in paths.groupby("length")
    ]
    assert len(expected) == 7
    np.testing.assert_allclose(accuracies_by_length(card), expected, atol=5.1e-4)
    # all terms together are the model
    assert expected[-1][-1] == pytest.approx(ours.token_accuracy, abs=0.005)


@pytest.mark.parametrize("name", ["publish_points_models", "publish_sorting_model"])
@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "the following arguments are required: --output_dir"),
        (["--output_dir", "there"], "there exists already: choose another --output_dir, or add --overwrite."),
        (["--output_dir", "new", "--cards", "there/file"], "there/file is no folder"),
        (["--output_dir", "new", "--seed", "-1"], "--seed must be at least 0 and below 2**32, got -1."),
        (["--output_dir", "new", "--colour", "red"], "unknown argument --colour"),
    ],
)
def test_what_a_publishing_script_refuses(name, flags, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


class TestSimilarity:
    SCRIPT = EXAMPLES / "evaluate_similarity.py"
    # sentences of the package's text, which share their paragraph or not, and some that break a careless reader
    SENTENCES = [text.split(". ")[:2] for text in package_text()[:8] if text.count(". ") > 1]
    PAIRS = [
        *((first, second, 3.5 + place / 10) for place, (first, second) in enumerate(SENTENCES)),
        *((one[0], other[1], 1 - place / 10) for place, (one, other) in enumerate(pairwise(SENTENCES))),
        ('A man plays a "guitar', "A man is playing a guitar, alone.", 4.8),
        ("A dog runs\x85 on the beach.", "The bank raised its rates.", 0.0),
    ]

    def write(self, folder: Path, kind: str) -> str:
        """The pairs in one of the formats that the script reads."""
        rows = self.PAIRS
        if kind == "STS-B":
            lines = [
                "\t".join(("main", "package", "2026", str(n), str(row[2]), *row[:2])) for n, row in enumerate(rows)
            ]
            # some lines of STS-B end with the licences of their sources
            text = "\n".join([lines[0] + "\tCC-BY\thttps://", *lines[1:]]) + "\n"
            (folder / "sts.csv").write_text(text, encoding="utf-8")
            return "sts.csv"
        name, encoding = ("pairs.csv", "utf-8-sig") if kind == "header" else ("pairs.tsv", "utf-8")
        with (folder / name).open("w", encoding=encoding, newline="") as lines:
            if kind == "header":
                writer = csv.writer(lines)
                writer.writerow(["score", "sentence2", "sentence1", "more"])
                writer.writerows([*row[::-1], ""] for row in rows)
            else:
                lines.writelines(f"{row[0]}\t{row[1]}\t{row[2]}\r\n\r\n" for row in rows)
        return name

    def by_hand(self, folder: Path | str) -> tuple[float, float, int]:
        model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        cosines = []
        for *sentences, _ in self.PAIRS:
            means = []
            for sentence in sentences:
                with torch.no_grad():
                    means.append(model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0].mean(0))
            cosines.append(torch.cosine_similarity(*means, dim=0).item())
        scores = [pair[2] for pair in self.PAIRS]
        spearman = np.corrcoef(rankdata(cosines), rankdata(scores))[0, 1]
        return spearman, np.corrcoef(cosines, scores)[0, 1], sum(weight.numel() for weight in model.parameters())

    def test_the_scores_before_and_after_a_cut(self, minilm, tmp_path, monkeypatch, capsys):
        pytest.importorskip("sentence_transformers")
        copy_companions(minilm, tmp_path / "narrow")
        convert_rank(AutoModel.from_pretrained(minilm), 16).save_pretrained(tmp_path / "narrow")
        files = [self.write(tmp_path, kind) for kind in ("STS-B", "header", "three columns")]
        arguments = [str(self.SCRIPT), minilm, "narrow", "--pairs"]
        result = run(tmp_path, *arguments, files[0], "--json")
        assert result.returncode == 0, result.stderr[-2000:]
        told = json.loads(result.stdout)
        assert told["pairs"] == len(self.PAIRS)
        expected = {"original": self.by_hand(minilm), "cut": self.by_hand(tmp_path / "narrow")}
        for which, numbers in expected.items():
            found = [told[which][name] for name in ("spearman", "pearson", "parameters")]
            assert found == pytest.approx(numbers, abs=1e-4), which
        assert abs(expected["original"][1] - expected["cut"][1]) > 1e-3
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [*arguments, files[1]])
        read_pairs = runpy.run_path(str(self.SCRIPT), run_name="__main__")["read_pairs"]
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("cut"))
        assert row.split()[1:] == [f"{x:.4f}" for x in expected["cut"][:2]] + [f"{expected['cut'][2]:,}"]
        for name in files:
            assert read_pairs(name) == [tuple(pair) for pair in self.PAIRS], name

    @pytest.mark.parametrize(
        "text, more, message",
        [
            (None, [], "pairs.csv cannot be read: No such file or directory."),
            (b"a,b,\xff", [], "pairs.csv is not UTF-8 text"),
            (b"", [], "its first line has 0 columns"),
            (b"a,b,1\nc,d,2\n", [], "pairs.csv has 2 pairs: a correlation needs at least 3"),
            (b"a,b,1\nc,d,1\ne,f,1\n", [], "with different scores"),
            (b"a,b,1\nc,d\ne,f,1\n", [], "line 2 of pairs.csv has 2 columns, and column 3 is needed"),
            (b"one,two,label\nc,d,1\n", [], "line 1 of pairs.csv has the score 'label', which is not a number"),
            (b"a,b,1\nc,d,nan\ne,f,2\n", [], "line 2 of pairs.csv has the score 'nan'"),
            (b"a,b,1\n,d,3\ne,f,2\n", [], "line 2 of pairs.csv has an empty sentence"),
            (b"a,b,1\nc,d,3\ne,f,2\n", ["--columns", "one", "two", "label"], "must name the columns one, two, label"),
            (b"a,b,1\nc,d,3\ne,f,2\n", [], "nowhere cannot be loaded as a sentence encoder: "),
        ],
    )
    def test_bad_input_is_one_line(self, text, more, message, tmp_path, monkeypatch, capsys):
        pytest.importorskip("sentence_transformers")
        monkeypatch.chdir(tmp_path)
        if text is not None:
            (tmp_path / "pairs.csv").write_bytes(text)
        monkeypatch.setattr(sys, "argv", ["evaluate", "nowhere", "nowhere", "--pairs", "pairs.csv", *more])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(self.SCRIPT), run_name="__main__")
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and message in error and len(error.splitlines()) == 1


def test_the_published_cards_tell_the_separation_that_was_measured():
    values = {}
    for path in (EXAMPLES.parent / "model_cards").glob("*.md"):
        card = ModelCard.load(path)
        values[path.stem] = [result.metric_value for result in card.data.eval_results]
        for value in values[path.stem]:
            assert f"| {value} |" in card.text, "the table repeats the metadata"
        assert "trust_remote_code=True" in card.text and "hf_rankattn" in card.text
    (full,), (half,) = (values[f"rank-encoder-farthest-d32-r{rank}"] for rank in (32, 16))
    assert full < 0.05 < 0.5 < half
    tokens, rows = values["rank-encoder-sorting"]
    assert tokens >= 0.95 and tokens**8 - 0.05 < rows < tokens


def test_the_card_of_the_sorting_model_says_that_short_paths_carry_it():
    card = ModelCard.load(EXAMPLES.parent / "model_cards" / "rank-encoder-sorting.md")
    tokens = card.data.eval_results[0]
    position_only = float(re.search(r"position only: ([\d.]+)", tokens.metric_name).group(1))
    at_published_rate = float(re.search(r"token accuracy\s+was ([\d.]+)", card.text).group(1))
    assert 0.33 < position_only < 0.35 and at_published_rate < 0.7
    _, five, twenty, _, up_to = accuracies_by_length(card).T
    assert twenty[1] > five[1] > position_only > twenty[3:].max()
    assert up_to[1] > 0.85 and up_to[-1] == pytest.approx(tokens.metric_value, abs=0.002)
