"""How much rank a model needs: models whose need is known, the same numbers by other means, and runs that are stopped."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from testing_pages import check_page
from testing_probe import run, small
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    XLNetConfig,
    XLNetModel,
)

from hf_rankattn import limit_rank, measure_need, package_text
from hf_rankattn.report.results import report_page


WIDTH, SIZES = 8, {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def louder(model, by=0.3):
    """The model with weights that make attention matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += by * torch.randn(weight.shape, generator=generator)
    return model.eval()


def bert(kind=BertModel, **fields):
    torch.manual_seed(0)  # in another process, too
    return louder(kind(BertConfig(**SIZES, vocab_size=50, max_position_embeddings=40, **fields)))


def llama(**fields):
    return louder(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=50, **fields)))


def ids(examples=6, n=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(5, 50, (examples, n), generator=generator)}


def narrowed(linear, rank):
    """Give each head's rows of a linear module this rank."""
    with torch.no_grad():
        for head in range(len(linear.weight) // WIDTH):
            rows = slice(head * WIDTH, (head + 1) * WIDTH)
            u, s, v = torch.linalg.svd(linear.weight[rows], full_matrices=False)
            linear.weight[rows] = (u[:, :rank] * s[:rank]) @ v[:rank]
        if linear.bias is not None:
            linear.bias.zero_()


def quality(table, **where):
    rows = table[table.metric == "quality"]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows.set_index("width").value


def needed(table):
    rows = table[table.metric == "needed_width"]
    return dict(zip(rows.kind, rows.value.astype(int), strict=True))


def test_the_rank_that_a_model_has_by_construction_is_what_it_needs():
    """Keys of rank 4 and values of rank 3 in heads of width 8; the keys of layer 0 have rank 1."""
    model = bert()
    for layer, (keys, values) in enumerate(((1, 3), (4, 3))):
        attention = model.encoder.layer[layer].attention.self
        narrowed(attention.key, keys)
        narrowed(attention.value, values)
        attention.key.weight.data *= 3  # sharper attention
    given = {"calibration": ids(12, seed=1), "widths": [1, 4, 6], "pooling": "cls"}
    table = measure_need(model, ids(), target_loss=0.001, **given)
    assert list(table.columns) == ["model", "kind", "layers", "objective", "width", "metric", "value"]
    assert needed(table) == {"qk": 4, "v": 3}
    every = quality(table, kind="qk", layers="all", objective="attention")
    assert set(every.index) == {1, 2, 3, 4, 6} and set(every[every < 0.999].index) == {1, 2, 3}  # 2 and 3 by bisection
    assert every[4] == pytest.approx(1, abs=1e-5) and every[6] == pytest.approx(1, abs=1e-5)
    values = quality(table, kind="v", layers="all", objective="attention")
    assert values[2] < 0.999 and values[3] == pytest.approx(1, abs=1e-5)
    # layer 0 needs one direction, and layer 1 four
    first, second = (quality(table, kind="qk", layers=layer, objective="attention") for layer in "01")
    assert first[1] == pytest.approx(1, abs=1e-5) and second[1] < 0.999 and second[4] == pytest.approx(1, abs=1e-5)
    # four directions hold all keys, so their principal components keep everything, too
    assert quality(table, kind="qk", objective="components")[4] == pytest.approx(1, abs=1e-5)
    assert quality(table, kind="qk", objective="weights")[4] == pytest.approx(1, abs=1e-5)
    assert quality(table, objective="whole").to_dict() == {WIDTH: 1.0}


def test_perplexities_are_those_of_transformers_and_one_layer_alone_is_a_limit_of_this_layer():
    """The oracle limits with lists of widths, runs every layer, and reads the loss that the model computes."""
    model, calibration = llama(), ids(8, seed=1)
    held = ids(6)
    held["attention_mask"] = torch.ones_like(held["input_ids"])
    held["attention_mask"][0, 12:] = 0

    def perplexity(batch):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        with torch.no_grad():
            return float(model(**batch, labels=labels).loss.double().exp())

    table = measure_need(model, held, calibration=calibration, widths=[2, 5], target_loss=0.5)
    found = table[table.metric == "perplexity"].set_index(["kind", "layers", "objective", "width"]).value
    whole, few = perplexity(held), {name: value[:4] for name, value in held.items()}

    def likely(batch):
        with torch.no_grad():
            probabilities = model(**batch).logits[:, :-1].double().softmax(-1)
        return probabilities[batch["attention_mask"][:, 1:] == 1]

    before = likely(few)

    def divergence(after):
        return float((before * (before / after).log()).sum(-1).mean())

    assert found["qk", "all", "whole", WIDTH] == pytest.approx(whole, rel=1e-5)
    for kind, name in (("qk", "qk_rank"), ("v", "v_head_dim")):
        for objective in ("attention", "components", "weights"):
            with limit_rank(model, **{name: 5}, calibration=calibration, objective=objective):
                limited = perplexity(held)
            assert found[kind, "all", objective, 5] == pytest.approx(limited, rel=1e-4)
            ratio = quality(table, kind=kind, layers="all", objective=objective)[5]
            assert ratio == pytest.approx(whole / limited, rel=1e-4)
        for layer in (0, 1):
            widths = [2 if number == layer else WIDTH for number in range(2)]
            with limit_rank(model, **{name: widths}, calibration=calibration):
                expected = divergence(likely(few))
            rows = (
                table[(table.layers == str(layer)) & (table.kind == kind) & (table.width == 2)]
                .set_index("metric")
                .value
            )
            assert rows["divergence"] == pytest.approx(expected, rel=1e-3)
            assert rows["quality"] == pytest.approx(math.exp(-expected), rel=1e-4)


def test_accuracy_is_relative_to_that_of_the_whole_model():
    model, held = bert(BertForSequenceClassification, num_labels=3), ids(24)
    with torch.no_grad():
        right = model(**held).logits.argmax(-1)
    labels = torch.where(torch.arange(24) < 18, right, (right + 1) % 3)
    table = measure_need(
        model, {**held, "labels": labels}, calibration=ids(8, seed=1), widths=[2], target_loss=0.9, by_layer=False
    )
    accuracy = table[table.metric == "accuracy"].set_index(["kind", "objective", "width"]).value
    assert accuracy["qk", "whole", WIDTH] == 0.75
    with limit_rank(model, v_head_dim=2, calibration=ids(8, seed=1)), torch.no_grad():
        limited = (model(**held).logits.argmax(-1) == labels).double().mean().item()
    assert accuracy["v", "attention", 2] == limited
    assert quality(table, kind="v", objective="attention")[2] == pytest.approx(limited / 0.75)
    with pytest.raises(ValueError, match="BertModel does not give one label"):
        measure_need(bert(), {**held, "labels": labels}, calibration=ids(8, seed=1))
    with pytest.raises(ValueError, match="none of the 24 labels"):
        measure_need(model, {**held, "labels": (right + 1) % 3}, calibration=ids(8, seed=1))


def test_a_model_that_shares_its_layers_and_one_that_fills_masks():
    albert = louder(small("albert", hidden=32, inner=32, vocabulary=50, layers=3, embedding_size=16))
    table = measure_need(albert, ids(), calibration=ids(8, seed=1), widths=[2])
    with limit_rank(albert, qk_rank=[8, 2, 8], calibration=ids(8, seed=1)), torch.no_grad():
        limited = albert(**ids()).last_hidden_state.mean(1)
    with torch.no_grad():
        cosine = torch.cosine_similarity(limited, albert(**ids()).last_hidden_state.mean(1)).mean()
    assert quality(table, kind="qk", layers="1")[2] == pytest.approx(float(cosine), abs=1e-5)
    masked, held = bert(BertForMaskedLM), ids()
    labels = torch.full_like(held["input_ids"], -100)
    labels[:, 3] = held["input_ids"][:, 3]
    table = measure_need(masked, {**held, "labels": labels}, calibration=ids(seed=1), widths=[4], by_layer=False)
    with torch.no_grad():
        expected = float(masked(**held, labels=labels).loss.exp())
    rows = table[(table.metric == "perplexity") & (table.objective == "whole")]
    assert rows.value.tolist() == pytest.approx([expected] * 2)


def test_measurements_in_a_folder_are_used_again(tmp_path, monkeypatch):
    model, given = bert(), {"calibration": ids(8, seed=1), "by_layer": False}
    table = measure_need(model, ids(), widths=[2, 4], folder=tmp_path, **given)
    assert table.equals(measure_need(model, ids(), widths=[2, 4], **given))

    def fail(*args, **kwargs):
        raise AssertionError("a measurement was repeated")

    with monkeypatch.context() as patch:
        patch.setattr("hf_rankattn.limit.need.limit_rank", fail)
        calls = []
        again = measure_need(
            model, ids(), widths=[2, 4], folder=tmp_path, progress=lambda *done: calls.append(done), **given
        )
        assert again.equals(table) and calls[-1][0] == calls[-1][1] > 4
        with pytest.raises(AssertionError, match="repeated"):  # another width is measured
            measure_need(model, ids(), widths=[2, 4, 5], folder=tmp_path, **given)
    for changed in ({"seed": 1}, {"pooling": "cls"}):
        with pytest.raises(ValueError, match=f"other settings \\({next(iter(changed))} was"):
            measure_need(model, ids(), widths=[2, 4], folder=tmp_path, **given, **changed)
    with pytest.raises(ValueError, match="held_out was"):
        measure_need(model, ids(seed=5), widths=[2, 4], folder=tmp_path, **given)
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key.weight[0, 0] += 1
    with pytest.raises(ValueError, match="model was"):
        measure_need(model, ids(), widths=[2, 4], folder=tmp_path, **given)
    other = measure_need(model, ids(), widths=[2, 4], folder=tmp_path, overwrite=True, **given)
    assert not other.equals(table) and other.equals(measure_need(model, ids(), widths=[2, 4], **given))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letters.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds letters.txt and no need.json"):
        measure_need(model, ids(), folder=tmp_path / "full", **given)


KILLED = """
import os, signal, sys
from test_need import bert, ids
from hf_rankattn import measure_need

def progress(done, total):
    if done == 7:
        os.kill(os.getpid(), signal.SIGKILL)

measure_need(bert(), ids(), calibration=ids(8, seed=1), widths=[2, 4], folder=sys.argv[1], progress=progress)
"""


def test_a_killed_run_continues(tmp_path):
    folder = tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)], cwd=Path(__file__).parent, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    cells = {path: path.stat().st_mtime_ns for path in (folder / "cells").glob("*.json")}
    assert len(cells) == 8  # the whole model is one
    (folder / "cells" / ".qk-all-logits-2.json-0a1b2c3d.json").write_text('{"quality": 2')  # half of a file
    given = {"calibration": ids(8, seed=1), "widths": [2, 4]}
    table = measure_need(bert(), ids(), folder=folder, **given)
    assert table.equals(measure_need(bert(), ids(), **given))
    assert all(path.stat().st_mtime_ns == time for path, time in cells.items())
    assert not [path for path in (folder / "cells").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_loss": 1.0}, "`target_loss` must be between 0 and 1"),
        ({"widths": [9]}, "`widths` has 9, and the queries and keys of a head have the width 8"),
        ({"widths": [0]}, "`widths` must be at least 1"),
        ({"widths": []}, "`widths` is empty"),
        ({"calibration": ids(2, 1)}, "Give texts of at least two tokens"),
        ({"held_out": ids(2, 1)}, "Give texts of at least two tokens"),
        ({"held_out": []}, "`inputs` is empty"),
        ({"pooling": "median"}, "`pooling` must be one of cls, max, mean"),
    ],
)
def test_bad_input_is_refused(changed, message):
    given = {"held_out": ids(), "calibration": ids(seed=1), **changed}
    with pytest.raises(ValueError, match=message):
        measure_need(bert(), given.pop("held_out"), **given)


def test_a_model_off_the_interface_is_refused():
    model = XLNetModel(XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=16)).eval()
    with pytest.raises(ValueError, match="interface"):
        measure_need(model, ids(), calibration=ids(seed=1))


QUICK = ("--examples", "3", "--length", "16", "--widths", "2,6")


def command(capsys, *arguments):
    code, output, error = run(capsys, "need", *arguments)
    assert code == 0, error
    return output


def test_the_command_on_a_decoder(tmp_path, tokenizer, capsys):
    config = small("qwen3", hidden=32, layers=2, inner=32, vocabulary=30522, num_key_value_heads=2, head_dim=8).config
    louder(AutoModelForCausalLM.from_config(config), 0.1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    shown = command(capsys, tmp_path / "model", "--out", out, *QUICK)
    assert "of 8 query-key directions in each head, or with" in " ".join(shown.split())
    # the same command measures nothing, and prints JSON
    told = json.loads(command(capsys, tmp_path / "model", "--out", out, *QUICK, "--json"))
    assert set(told["needed"]) == {"qk", "v"} and told["needed"]["qk"]["of"] == 8
    assert (
        told["facts"]["quality"] == "perplexity"
        and told["facts"]["held_out"] == "3 texts with 48 tokens together from the package's paragraphs"
    )
    table = pd.read_parquet(out / "table.parquet")
    assert set(table.metric) == {"quality", "perplexity", "divergence", "needed_width"} and set(table.layers) == {
        "all",
        "0",
        "1",
    }
    assert needed(table) == {kind: entry["needed"] for kind, entry in told["needed"].items()}
    page = check_page((out / "report.html").read_text())
    assert len(page.all("svg")) == 4 and told["sentences"][0] in " ".join(page.words)
    assert any(words.startswith("layer 1, 2 of 8 query-key directions: quality ") for words in page.words)
    assert (out / "need.png").stat().st_size > 10_000
    assert told["sentences"][0] in report_page(out)
    # another text, in the same folder
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(package_text()[60:62]))
    code, _, error = run(capsys, "need", tmp_path / "model", "--out", out, *QUICK, "--text", text)
    assert code == 2 and "other settings (held_out was" in error and "--overwrite" in error
    command(capsys, tmp_path / "model", "--out", out, *QUICK, "--text", text, "--overwrite", "--no-layers")
    assert set(pd.read_parquet(out / "table.parquet").layers) == {"all"}
    assert len(check_page((out / "report.html").read_text()).all("svg")) == 2


def test_the_command_on_an_encoder_with_labels(tmp_path, tokenizer, capsys):
    config = BertConfig(**SIZES, num_labels=2, problem_type="single_label_classification")
    louder(BertForSequenceClassification(config), 0.1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(package_text()[40:52])]
    pd.DataFrame(rows).to_csv(tmp_path / "data" / "test.csv", index=False)
    given = ("--length", "16", "--widths", "2", "--no-layers", "--target-loss", "50%", "--json")
    labelled = ("--dataset", tmp_path / "data", "--label-column", "label")
    told = json.loads(command(capsys, tmp_path / "model", "--out", tmp_path / "a", *labelled, *given))
    assert told["facts"]["quality"] == "accuracy" and "accuracy" in told["sentences"][1]
    assert told["facts"]["held_out"].startswith("12 texts")
    told = json.loads(command(capsys, tmp_path / "model", "--out", tmp_path / "b", *given))
    assert told["facts"]["quality"] == "embedding_cosine"


def test_the_command_on_a_model_that_fills_masks(tmp_path, tokenizer, capsys):
    louder(BertForMaskedLM(BertConfig(**SIZES)), 0.1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    told = json.loads(command(capsys, tmp_path / "model", "--out", tmp_path / "out", *QUICK, "--no-layers", "--json"))
    assert told["facts"]["quality"] == "perplexity"


def test_the_command_on_images(tmp_path, capsys):
    from PIL import Image

    config = ViTConfig(**SIZES, image_size=16, patch_size=4)
    louder(ViTModel(config)).save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "model")
    (tmp_path / "images").mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(6):
        pixels = torch.randint(256, (16, 16, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(tmp_path / "images" / f"{number}.png")
    given = ("--widths", "2", "--target-loss", "0.5", "--no-layers", "--json", "--examples", "3")
    told = json.loads(
        command(capsys, tmp_path / "model", "--out", tmp_path / "a", "--dataset", tmp_path / "images", *given)
    )
    assert told["facts"]["held_out"] == "3 inputs from every second input of images"
    told = json.loads(command(capsys, tmp_path / "model", "--out", tmp_path / "b", "--random-inputs", *given))
    assert told["facts"]["quality"] == "embedding_cosine"
    code, _, error = run(capsys, "need", tmp_path / "model", "--out", tmp_path / "c", *given)
    assert code == 2 and "--random-inputs" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target-loss", "2"), "--target-loss must be between 0 and 1"),
        (("--target-loss", "little"), "--target-loss must be a share such as 1% or 0.01"),
        (("--widths", "a,b"), "--widths must be whole numbers"),
        (("--label-column", "label"), "--label-column is a column of a dataset"),
        (("--examples", "0"), "--examples must be at least 1"),
        (("--calibration", "there-is-none.txt"), "cannot be read as UTF-8 text"),
    ],
)
def test_bad_options_are_one_line(options, message, tmp_path, tokenizer, capsys):
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    code, _, error = run(capsys, "need", tmp_path / "model", "--out", tmp_path / "out", *options)
    assert code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "out" / "cells").exists()


@pytest.mark.slow
def test_minilm_needs_more_value_width_than_query_key_rank(minilm, tmp_path, capsys):
    given = ("--json", "--no-layers", "--examples", "8", "--widths", "8,16,24")
    told = json.loads(command(capsys, minilm, "--out", tmp_path / "out", *given))
    assert told["facts"]["quality"] == "embedding_cosine"
    assert told["needed"]["qk"]["needed"] < told["needed"]["v"]["needed"] <= 32


@pytest.mark.slow
def test_smollm2(smollm2, tmp_path, capsys):
    given = ("--json", "--no-layers", "--examples", "4", "--widths", "32,56", "--target-loss", "50%")
    told = json.loads(command(capsys, smollm2, "--out", tmp_path / "out", *given))
    assert told["facts"]["quality"] == "perplexity" and told["facts"]["layers"] == 30
    assert told["needed"]["qk"]["of"] == 64 and told["needed"]["qk"]["needed"] < 64
