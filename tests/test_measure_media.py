"""`rankattn measure` on images and sounds as users have them: folders of files and tables of a dataset, in a new process."""

import io
import json
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Audio, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from scipy.io import wavfile
from scipy.signal import resample_poly
from test_measure_any import WHISPER, compare, measured, spread
from testing_probe import run as run_command
from transformers import (
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LAYERS = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}


def noise(seed, seconds, rate):
    return (0.3 * np.random.default_rng(seed).standard_normal(int(seconds * rate))).astype(np.float32)


def write(rows, features, folder):
    """A table as datasets writes it; it would need torchcodec for sounds, and would open the files that are named."""
    pq.write_table(pa.Table.from_pydict(rows, schema=features.arrow_schema), folder / "test.parquet")


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """A folder with sounds at two rates, in floats and in 16 and 8 bits, one with two channels; and the samples at 16 kHz."""
    folder, rate = tmp_path_factory.mktemp("sounds"), 16000
    a, b, c = noise(0, 0.1, rate), noise(1, 0.2, 8000), noise(2, 0.15, rate)
    (folder / "more").mkdir()
    wavfile.write(folder / "a.wav", rate, a)
    wavfile.write(folder / "b.WAV", 8000, np.round(b.clip(-1, 1) * 32767).astype(np.int16))
    wavfile.write(folder / "more" / "c.wav", rate, np.stack([c, np.zeros_like(c)], 1))
    (folder / "notes.txt").write_text("no sound")
    (folder / "more" / "._c.wav").write_bytes(b"Mac OS X")  # macOS writes such files beside those of an archive
    slow = np.round(b.clip(-1, 1) * 32767).astype(np.float32) / 32768
    return folder, [a, resample_poly(slow, 2, 1).astype(np.float32), c / 2]


@pytest.fixture(scope="module")
def wav2vec2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wav2vec2")
    torch.manual_seed(0)
    spread(Wav2Vec2Model(Wav2Vec2Config(**SIZES, **LAYERS, **POSITIONS))).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def test_a_folder_of_sounds_for_whisper(sounds, tmp_path):
    torch.manual_seed(0)
    model = spread(WhisperModel(WhisperConfig(**WHISPER)))
    model.save_pretrained(tmp_path / "model")
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400)  # 40 frames, so 20 tokens
    extractor.save_pretrained(tmp_path / "model")
    folder, samples = sounds
    options = ("--tower", "encoder", "--dataset", folder, "--batch-size", "2", "--out", tmp_path / "out")
    facts = measured(tmp_path / "model", *options)["facts"]
    assert (facts["examples"], facts["tower"]) == (3, "encoder") and facts["source"] == f"sounds in {folder.name}"
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    features = extractor(samples, sampling_rate=16000, return_tensors="pt")["input_features"]
    compare(table, model.encoder(features, output_hidden_states=True).hidden_states)


def test_sounds_of_unequal_length_are_not_padded(sounds, wav2vec2, tmp_path, capsys, caplog):
    folder, samples = sounds
    options = ("--dataset", folder, "--length", "200", "--out", tmp_path / "out", "--metrics", "cheap")
    code, _, error = run_command(capsys, "measure", wav2vec2, *options)
    assert code == 0, error
    assert "sounds of 8000 Hz are resampled to the 16000 Hz of the checkpoint" in caplog.text
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    # 160, 320 and 240 tokens; the second sound is cut to 200
    assert table[table.metric == "tokens"].value.tolist() == [159.0, 200.0, 200.0]
    model, extractor = Wav2Vec2Model.from_pretrained(wav2vec2), Wav2Vec2FeatureExtractor()
    for number, sound in enumerate(samples):
        values = extractor(sound[: (200 - 1) * 10 + 20], sampling_rate=16000, return_tensors="pt")["input_values"]
        own = table[table.example == number].assign(example=0)
        compare(own, model(values, output_hidden_states=True).hidden_states)


def test_a_dataset_with_a_column_of_sounds(sounds, wav2vec2, tmp_path, capsys):
    folder, samples = sounds
    data = [(folder / name).read_bytes() for name in ("a.wav", "b.WAV", "more/c.wav")]
    rows = {"audio": [{"bytes": entry, "path": None} for entry in data], "text": ["a", "b", "c"]}
    features = Features({"audio": Audio(decode=False), "text": Value("string")})
    (tmp_path / "data").mkdir()
    write(rows, features, tmp_path / "data")
    options = ("--dataset", tmp_path / "data", "--length", "20", "--out", tmp_path / "out", "--metrics", "cheap")
    code, output, error = run_command(capsys, "measure", wav2vec2, *options, "--json")
    assert code == 0, error
    facts = json.loads(output)["facts"]
    assert facts["examples"] == 3 and facts["model_type"] == "wav2vec2"
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    extractor = Wav2Vec2FeatureExtractor()
    values = extractor([sound[:210] for sound in samples], sampling_rate=16000, return_tensors="pt")["input_values"]
    compare(table, Wav2Vec2Model.from_pretrained(wav2vec2)(values, output_hidden_states=True).hidden_states)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    spread(ViTModel(ViTConfig(**SIZES, image_size=16, patch_size=8))).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def png(seed):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image_table(folder, columns, rows):
    folder.mkdir()
    features = Features(dict.fromkeys(columns, ImageFeature()) | {"label": Value("int64")})
    data = dict.fromkeys(columns, rows) | {"label": list(range(len(rows)))}
    write(data, features, folder)
    return folder


def test_a_dataset_with_a_column_of_images(vit, tmp_path):
    rows = [{"bytes": png(seed), "path": None} for seed in range(4)]
    data = image_table(tmp_path / "data", ["picture"], rows)
    options = ("--dataset", data, "--examples", "3", "--batch-size", "2", "--out", tmp_path / "out")
    facts = measured(vit, *options)["facts"]
    assert facts["examples"] == 3 and facts["source"] == "images in data"
    table = pd.read_parquet(tmp_path / "out" / "table.parquet")
    images = [Image.open(io.BytesIO(png(seed))) for seed in range(3)]
    pixels = ViTImageProcessorPil.from_pretrained(vit)(images=images, return_tensors="pt")["pixel_values"]
    compare(table, ViTModel.from_pretrained(vit)(pixels, output_hidden_states=True).hidden_states)


def test_what_a_column_may_not_hold(vit, tmp_path, capsys):
    good = {"bytes": png(0), "path": None}
    outside = tmp_path / "outside.png"
    outside.write_bytes(png(0))
    cases = {
        "two": (["a", "b"], [good], "give --column, the column of images of"),
        "url": (["a"], [{"bytes": None, "path": "http://localhost:1/a.png"}], "files elsewhere are not read"),
        "file": (["a"], [{"bytes": None, "path": str(outside)}], "files elsewhere are not read"),
        "words": (["a"], [{"bytes": b"words", "path": None}], "row 0 of"),
        "none": ([], [good], "has no images: give a folder with files that end in .png"),
    }
    for name, (columns, rows, message) in cases.items():
        data = image_table(tmp_path / name, columns, rows)
        code, _, error = run_command(capsys, "measure", vit, "--dataset", data, "--out", tmp_path / "x")
        assert code == 2 and message in error and error.count("\n") == 1, (name, error)
    two = ("--dataset", tmp_path / "two", "--column", "b", "--out", tmp_path / "out", "--metrics", "cheap")
    code, _, error = run_command(capsys, "measure", vit, *two)
    assert code == 0, error


def test_sounds_that_cannot_be_read(wav2vec2, sounds, tmp_path, capsys):
    def refused(folder, model=wav2vec2):
        code, _, error = run_command(capsys, "measure", model, "--dataset", folder, "--out", tmp_path / "x")
        assert code == 2 and error.count("\n") == 1 and not (tmp_path / "x").exists(), error
        return error

    folder = tmp_path / "bad"
    folder.mkdir()
    assert "has no sounds: give a folder with files that end in .wav" in refused(folder)
    (folder / "a.wav").write_bytes(b"words")
    assert "a.wav cannot be read as a WAV file" in refused(folder)
    wavfile.write(folder / "a.wav", 16000, np.full(3000, np.nan, np.float32))
    assert "it holds NaN or Inf" in refused(folder)
    wavfile.write(folder / "a.wav", 16000, np.zeros(20, np.float32))  # one token
    assert "is too short: it has 20 samples at 16000 Hz" in refused(folder)
    without = shutil.copytree(wav2vec2, tmp_path / "without")
    (without / "preprocessor_config.json").unlink()
    assert "no feature extractor can be read" in refused(sounds[0], without)
