"""`rankattn measure` on checkpoints without a row in the table of architectures: folders on disk, a new process, an oracle."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from testing_common import run_python
from testing_pages import check_page
from testing_probe import run as run_command
from testing_probe import small
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    WhisperConfig,
    WhisperModel,
)

from hf_rankattn import package_text, relative_residual
from hf_rankattn.files.batches import random_batches
from hf_rankattn.probe.survey import load_checkpoint, measure_checkpoint, take_tower
from hf_rankattn.report.results import report_page
from hf_rankattn.report.summary import Finding, comparison


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
QUICK = ("--examples", "3", "--length", "16", "--batch-size", "2")
QUESTIONS = {"inputs", "collapse", "attention", "logits", "weights"}


def measured(*arguments):
    """What a new process prints as JSON."""
    done = run_python("-m", "hf_rankattn", "measure", *arguments, "--json")
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def residuals(table, **labels):
    rows = table[(table.variant == "transformer") & (table.metric == "relative_residual")]
    return rows.set_index(["example", "layer"]).value.astype(float)


def compare(table, states):
    """The residuals of the whole model are those of the hidden states that transformers returns; its last are normed."""
    found = residuals(table)
    for layer, hidden in enumerate(states[:-1]):
        expected = relative_residual(hidden)
        for example, value in enumerate(expected.tolist()):
            assert found[example, layer] == pytest.approx(value, rel=1e-4), (example, layer)


def spread(model):
    """Fresh weights are so small that heads do nothing."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    return model.eval()


@pytest.fixture(scope="module")
def clip(tmp_path_factory, minilm):
    """CLIP with a tokenizer and an image processor, and a folder of three images, one of them in a subfolder."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**SIZES, "vocab_size": 30522, "max_position_embeddings": 24, "eos_token_id": 102},
        vision_config={**SIZES, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8},
    )
    spread(CLIPModel(config)).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder / "model")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    CLIPImageProcessorPil(**sizes).save_pretrained(folder / "model")
    (folder / "images" / "more").mkdir(parents=True)
    for number, name in enumerate(("a.png", "more/b.png", "c.PNG")):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / name)
    (folder / "images" / "notes.txt").write_text("no image")
    return folder


def test_two_checkpoints_are_one_table_and_one_page(tmp_path, minilm):
    torch.manual_seed(0)
    for kind in ("bert", "gpt2"):
        small(kind, hidden=16, layers=2, heads=2, vocabulary=30522).save_pretrained(tmp_path / kind)
        AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / kind)
    report = measured(tmp_path / "bert", tmp_path / "gpt2", "--out", tmp_path / "out", *QUICK)
    assert [part["facts"]["model_type"] for part in report["checkpoints"]] == ["bert", "gpt2"]
    assert set(report["files"]) == {path.name for path in (tmp_path / "out").iterdir()}
    assert {"bert-residuals.png", "gpt2-residuals.png", "report.html", "table.parquet"} <= set(report["files"])
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    assert list(table.columns[:2]) == ["checkpoint", "model"] and set(table.checkpoint) == {"bert", "gpt2"}
    for kind in ("bert", "gpt2"):
        own = table[table.checkpoint == kind].drop(columns="checkpoint").reset_index(drop=True)
        alone, _ = measure_checkpoint(str(tmp_path / kind), examples=3, length=16, batch_size=2)
        pd.testing.assert_frame_equal(own, alone, check_exact=True)
    page = check_page((tmp_path / "out" / "report.html").read_text())
    answer = {part["facts"]["checkpoint"]: part["findings"][0]["answer"] for part in report["checkpoints"]}
    assert page.words.index("Side by side") < page.words.index(report["checkpoints"][0]["facts"]["title"])
    assert len(page.all("svg")) == 4 and all(page.words.count(words) >= 2 for words in answer.values())
    assert {"bert", "gpt2"} <= {cell["data-column"] for cell in page.all("td")}


def test_several_checkpoints_are_checked_before_one_is_measured(tmp_path, capsys):
    for kind in ("bert", "gpt2"):
        small(kind, hidden=16, layers=1, heads=2).save_pretrained(tmp_path / kind)
    options = ("--random-inputs", "--out", tmp_path / "out", *QUICK)
    code, _, error = run_command(capsys, "measure", tmp_path / "bert", tmp_path / "nothing", *options)
    assert code == 2 and "there is no such folder" in error and not (tmp_path / "out").exists()
    code, _, error = run_command(capsys, "measure", tmp_path / "bert", tmp_path / "bert", *options)
    assert code == 2 and "each checkpoint must be given once" in error
    # the same name in two folders: each is called as it was given
    small("bert", hidden=16, layers=1, heads=2).save_pretrained(tmp_path / "other" / tmp_path.name / "bert")
    again = tmp_path / "other" / tmp_path.name / "bert"
    code, output, error = run_command(capsys, "measure", tmp_path / "bert", again, *options, "--json")
    assert code == 0, error
    assert {part["facts"]["checkpoint"] for part in json.loads(output)["checkpoints"]} == {
        str(tmp_path / "bert"),
        str(again),
    }


def test_a_vision_tower_reads_a_folder_of_images(clip, tmp_path):
    arguments = ("--tower", "vision", "--dataset", clip / "images", "--out", tmp_path / "out", "--batch-size", "2")
    report = measured(clip / "model", *arguments)
    facts = report["facts"]
    assert (facts["model_type"], facts["tower"], facts["layers"], facts["examples"]) == (
        "clip_vision_model",
        "vision",
        3,
        3,
    )
    assert not facts["causal"]
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    assert set(table.question) == QUESTIONS and not facts["not_measured"]
    assert set(table[table.metric == "tokens"].value) == {5.0}  # four patches and a class token
    processor = CLIPImageProcessorPil.from_pretrained(clip / "model")
    images = [Image.open(clip / "images" / name) for name in ("a.png", "c.PNG", "more/b.png")]
    model = CLIPModel.from_pretrained(clip / "model").vision_model
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    compare(table, model(pixel_values=pixels, output_hidden_states=True).hidden_states)


def test_the_text_tower_reads_text_and_the_error_names_the_towers(clip, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(package_text()[:3]))
    code, output, error = run_command(
        capsys, "measure", clip / "model", "--tower", "text", "--text", text, "--json", "--out", tmp_path / "out"
    )
    assert code == 0, error
    facts = json.loads(output)["facts"]
    assert (facts["model_type"], facts["layers"]) == ("clip_text_model", 2)
    assert facts["causal"]  # by its mask, which its attention modules do not know
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    assert set(table[table.metric == "tokens"].value) == {24.0}  # all positions of the model, as it has fewer than 128
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"text")
    for options, message in (
        ([], "give one as --tower, of 'text', 'vision'"),
        (["--tower", "sound"], "of 'text', 'vision', got 'sound'"),
        (["--tower", "vision"], "not text: give --random-inputs, or a folder of images as --dataset."),
        (["--tower", "vision", "--dataset", clip / "model"], "has no images"),
        (["--tower", "vision", "--dataset", tmp_path / "images"], "a.png cannot be read as an image"),
    ):
        code, _, error = run_command(capsys, "measure", clip / "model", *options, "--out", tmp_path / "x")
        assert code == 2 and message in error and error.count("\n") == 1, error
    (clip / "model" / "preprocessor_config.json").rename(tmp_path / "preprocessor_config.json")
    try:
        options = ("--tower", "vision", "--dataset", clip / "images", "--out", tmp_path / "x")
        code, _, error = run_command(capsys, "measure", clip / "model", *options)
    finally:
        (tmp_path / "preprocessor_config.json").rename(clip / "model" / "preprocessor_config.json")
    assert code == 2 and "no image processor can be read" in error and "Or give --random-inputs" in error


WHISPER = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 24))},
    **{"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 60},
    **{"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 30, "pad_token_id": 1},
    **{"bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2},
}


def test_an_audio_encoder_with_random_inputs(tmp_path, capsys):
    torch.manual_seed(0)
    model = spread(WhisperModel(WhisperConfig(**WHISPER)))
    model.save_pretrained(tmp_path / "whisper")
    options = ("--random-inputs", "--tower", "encoder", "--out", tmp_path / "out", *QUICK)
    facts = measured(tmp_path / "whisper", *options)["facts"]
    assert facts["tower"] == "encoder" and not facts["causal"] and not facts["not_measured"]
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    assert set(table.question) == QUESTIONS and set(table[table.metric == "tokens"].value) == {20.0}
    features = torch.cat([batch["input_features"] for batch in random_batches(model.config, 3, 16, 2, seed=0)])
    compare(table, model.encoder(features, output_hidden_states=True).hidden_states)
    code, _, error = run_command(
        capsys, "measure", tmp_path / "whisper", "--tower", "encoder", "--out", tmp_path / "x"
    )
    assert (
        code == 2
        and "input_features, not text: give --random-inputs, or a folder of sounds (.wav) as --dataset." in error
    )


def test_a_decoder_with_cross_attention_runs_in_the_whole_model(tmp_path):
    torch.manual_seed(0)
    model = spread(WhisperModel(WhisperConfig(**WHISPER)))
    model.save_pretrained(tmp_path)
    table, facts = measure_checkpoint(str(tmp_path), random_inputs=True, tower="decoder", examples=2, length=9)
    assert facts["causal"] and set(table.question) == QUESTIONS
    assert set(table[table.metric == "tokens"].value) == {9.0}
    (batch,) = random_batches(model.config, 2, 9, 8, seed=0)
    compare(table, model(**batch, output_hidden_states=True).decoder_hidden_states)


def test_weights_of_another_tower_may_be_missing(clip, tmp_path):
    """As in a checkpoint of T5EncoderModel."""
    model = CLIPModel.from_pretrained(clip / "model")
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("vision_model")}
    model.save_pretrained(tmp_path, state_dict=weights)
    part, inside = take_tower(load_checkpoint(str(tmp_path), tower="text"), "text")
    assert type(part).__name__ == "CLIPTextModel" and inside is None
    with pytest.raises(ValueError, match="weights of .* are missing"):
        load_checkpoint(str(tmp_path), tower="vision")


HYBRIDS = {
    "bamba": {
        **{"num_hidden_layers": 3, "attn_layer_indices": [1], "num_key_value_heads": 1, "mamba_n_heads": 8},
        **{"mamba_d_head": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    },
    "qwen3_moe": {
        **{"num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 4},
        **{"num_experts_per_tok": 2},
    },
}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_and_a_mixture_of_experts(kind, tmp_path, minilm):
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **SIZES | HYBRIDS[kind], vocab_size=30522, **ids)
    model = spread(AutoModel.from_config(config))
    model.save_pretrained(tmp_path / kind)
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(tmp_path / kind)
    report = measured(tmp_path / kind, "--out", tmp_path / "out", *QUICK)
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    found = {finding["name"]: finding for finding in report["findings"]}
    assert set(table.question) == QUESTIONS and set(table.variant.dropna()) == {
        "san",
        "san+mlp",
        "san+skip",
        "transformer",
    }
    layers = {"bamba": {1}, "qwen3_moe": {0, 1}}[kind]
    for question in ("attention", "logits", "weights"):
        assert set(table[table.question == question].layer) == layers
    if kind == "bamba":
        assert found["layers/without_attention"]["answer"] == "2 of 3: 0, 2"
    else:
        assert "layers/without_attention" not in found
    batch = tokenizer(package_text()[:3], truncation=True, max_length=16, return_tensors="pt")
    compare(table, model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states)


def test_gguf_needs_a_package_and_one_file(tmp_path, monkeypatch, capsys):
    small("bert", hidden=16, layers=1, heads=2).config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("hf_rankattn.files.checkpoints.is_gguf_available", lambda: False)
    options = ("measure", tmp_path / "model", "--out", tmp_path / "x")
    code, _, error = run_command(capsys, *options)
    assert code == 2 and "a.gguf needs the package gguf: pip install 'gguf>=" in error and error.count("\n") == 1
    code, _, error = run_command(capsys, *options, "--gguf", "b.gguf")
    assert code == 2 and "there is no GGUF file b.gguf" in error
    (tmp_path / "model" / "b.gguf").write_bytes(b"GGUF")
    code, _, error = run_command(capsys, *options)
    assert code == 2 and "has 2 GGUF files: name one with --gguf, of a.gguf, b.gguf" in error
    code, _, error = run_command(capsys, *options, "--gguf", "config.json")
    assert code == 2 and "must name a file that ends in .gguf" in error


def test_checkpoints_with_unequal_inputs_stand_side_by_side(tmp_path, capsys):
    """Questions name the number of tokens only where it is the same for all, and a question of one checkpoint is kept."""
    small("vit", layers=1).save_pretrained(tmp_path / "vit")
    small("bert", hidden=16, layers=1, heads=2).save_pretrained(tmp_path / "bert")
    options = ("--random-inputs", "--out", tmp_path / "out", "--metrics", "cheap", *QUICK)
    code, _, error = run_command(capsys, "measure", tmp_path / "vit", tmp_path / "bert", *options)
    assert code == 0, error
    rows = comparison([[Finding("a", "one?", "yes", "-")], [Finding("b", "two?", "no", "-")]])
    assert rows == [["one?", "yes", "-"], ["two?", "-", "no"]]
    page = check_page(report_page(tmp_path / "out"))
    assert "Side by side" in page.words and len(page.all("svg")) == 4
    assert page.words.count("How many directions does an attention map use?") == 1
    answers = [word for word in page.words if "(participation ratio, mean head" in word]
    assert [re.search(r"of (\d+) directions", answer)[1] for answer in answers] == ["5", "16"]
