"""The examples run from the command line, offline, in an empty folder."""

import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parent.parent / "examples"


def run(tmp_path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=300)


def test_choose_head_geometry(tmp_path):
    script = str(EXAMPLES / "choose_head_geometry.py")
    result = run(tmp_path, script, "--ranks", "1", "4", "--steps", "3", "--output_dir", "best")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "qk_rank   1: accuracy" in result.stdout and "qk_rank   4: accuracy" in result.stdout
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
    result = run(
        tmp_path,
        script,
        "--output_dir",
        "models",
        "--steps",
        "20",
        "--dim",
        "16",
        "--num_points",
        "4",
        "--intermediate",
        "16",
        "--cards",
        "cards",
    )
    assert result.returncode == 0, result.stderr[-2000:]
    names = {"rank-encoder-farthest-d16-r16", "rank-encoder-farthest-d16-r8"}
    assert {path.name for path in (tmp_path / "models").iterdir()} == {*names, "table.parquet"}
    assert {path.stem for path in (tmp_path / "cards").iterdir()} == names


def test_the_published_cards_tell_the_separation_that_was_measured():
    from huggingface_hub import ModelCard

    errors = {}
    for path in (EXAMPLES.parent / "model_cards").glob("*.md"):
        card = ModelCard.load(path)
        (result,) = card.data.eval_results
        errors[path.stem] = result.metric_value
        assert f"| {result.metric_value} |" in card.text, "the table repeats the metadata"
        assert "trust_remote_code=True" in card.text and "hf_rankattn" in card.text
    assert errors["rank-encoder-farthest-d32-r32"] < 0.05 < 0.5 < errors["rank-encoder-farthest-d32-r16"]


@pytest.mark.slow
def test_rank_separates_in_the_geometry_example(tmp_path):
    result = run(tmp_path, str(EXAMPLES / "choose_head_geometry.py"), "--ranks", "1", "4", "--output_dir", "best")
    accuracy = [
        float(line.split("accuracy ")[1].split(",")[0]) for line in result.stdout.splitlines() if "accuracy " in line
    ]
    assert accuracy[0] < 0.85 and accuracy[1] > 0.98
