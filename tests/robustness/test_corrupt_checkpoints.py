"""Damaged, foreign and hostile checkpoints: an error of one line from every door, and nothing of theirs is ever run."""

import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from testing_commands import refused_in_one_line, run_here
from testing_folders import change_config, tiny_checkpoint

from hf_rankattn import RankBertConfig, RankBertModel


WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
QUERY = "encoder.layer.0.attention.self.query.weight"


class Trap:
    """Pickled, it is a call that makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def with_weights(change):
    def spoil(folder: Path, marker: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(change(tensors) or tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def with_bytes(change):
    return lambda folder, marker: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def with_config(text: str):
    return lambda folder, marker: (folder / CONFIG).write_bytes(text.encode())


def with_fields(**given):
    return lambda folder, marker: change_config(folder, **given)


def header_of(size: int, content: bytes) -> bytes:
    return struct.pack("<Q", size) + content


def cut_out(tensors, part: str):
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def pickle_alone(folder: Path, marker: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(marker)))


def torch_pickle_alone(folder: Path, marker: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({QUERY: Trap(marker)}, folder / "pytorch_model.bin")


def index_to_a_pickle(folder: Path, marker: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({QUERY: Trap(marker)}, folder / "trap.bin")
    index = {"metadata": {}, "weight_map": {QUERY: "trap.bin"}}
    (folder / INDEX).write_text(json.dumps(index))


def foreign_code(model_type: str, **fields):
    def spoil(folder: Path, marker: Path) -> None:
        code = "from transformers import BertConfig as Evil, BertModel as EvilModel\n"
        (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n{code}")
        auto_map = {"AutoConfig": "evil.Evil", "AutoModel": "evil.EvilModel", "AutoTokenizer": ["evil.Evil", None]}
        with_fields(model_type=model_type, auto_map=auto_map, **fields)(folder, marker)
        tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    return spoil


# what no door may accept; `from_pretrained` raises the errors of transformers where a stock field or the JSON is wrong
SPOILT = {
    "cut-short": with_bytes(lambda data: data[: len(data) // 2]),
    "cut-in-the-header": with_bytes(lambda data: data[:200]),
    "empty": with_bytes(lambda data: b""),
    "absurd-header-length": with_bytes(lambda data: header_of(2**62, data[8:])),
    "header-is-not-json": with_bytes(lambda data: header_of(16, b"x" * 64)),
    "header-is-a-bomb": with_bytes(lambda data: header_of(200_000, b"[" * 200_000)),
    "wrong-shape": with_weights(lambda tensors: tensors | {QUERY: torch.zeros(3, 5)}),
    "pickle-named-safetensors": lambda folder, marker: (folder / WEIGHTS).write_bytes(pickle.dumps(Trap(marker))),
    "pickle-alone": pickle_alone,
    "torch-pickle-alone": torch_pickle_alone,
    "index-to-a-pickle": index_to_a_pickle,
    "index-of-another-kind": lambda folder, marker: (folder / WEIGHTS).rename(folder / INDEX).write_text("[]"),
    "no-weights": lambda folder, marker: (folder / WEIGHTS).unlink(),
    "no-config": lambda folder, marker: (folder / CONFIG).unlink(),
    "config-is-not-json": with_config("{"),
    "config-is-empty": with_config(""),
    "config-is-a-list": with_config("[1, 2]"),
    "config-is-null": with_config("null"),
    "config-is-binary": lambda folder, marker: (folder / CONFIG).write_bytes(bytes(range(256))),
    "config-is-a-bomb": with_config('{"a":' * 100_000 + "1" + "}" * 100_000),
    "unknown-family": with_fields(model_type="no_such_family"),
    "family-is-a-list": with_fields(model_type=["bert"]),
    "no-heads": with_fields(num_attention_heads=0),
    "negative-width": with_fields(hidden_size=-16),
    "width-is-a-word": with_fields(hidden_size="wide"),
    "unknown-activation": with_fields(hidden_act="no_such_act"),
    "foreign-code-of-a-foreign-family": foreign_code("no_such_family"),
}  # fmt: skip
STOCK_ERRORS = {
    *("wrong-shape", "config-is-a-list", "config-is-null", "config-is-a-bomb", "width-is-a-word"),
    "unknown-activation",
}
# what `from_pretrained` accepts as stock does, and the commands refuse: their answers would be noise
ODD = {
    "nan": with_weights(lambda tensors: tensors | {QUERY: torch.full_like(tensors[QUERY], torch.nan)}),
    "inf": with_weights(lambda tensors: tensors | {QUERY: torch.full_like(tensors[QUERY], torch.inf)}),
    "missing-layer": with_weights(lambda tensors: cut_out(tensors, "layer.1.attention.self")),
    "nothing-known": with_weights(lambda tensors: {f"other.{name}": tensor for name, tensor in tensors.items()}),
    "no-layers": with_fields(num_hidden_layers=0),
    "integers": with_weights(lambda tensors: tensors | {QUERY: torch.ones(16, 16, dtype=torch.int64)}),
}
# what is harmless and loads everywhere
SOUND = {
    "as-it-is": lambda folder, marker: None,
    "extra-keys": with_weights(lambda tensors: tensors | {"stowaway": torch.ones(3)}),
    "extra-fields": with_fields(stowaway={"a": [1]}, architectures=["NoSuchModel"]),
    "architecture-that-is-no-model": with_fields(architectures=["Trainer"]),
    "architecture-of-another-family": with_fields(architectures=["GPT2Model"]),
    "foreign-code-of-a-known-family": foreign_code("bert"),
    "foreign-tokenizer": foreign_code("bert", architectures=["BertModel"]),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory, minilm):
    return tiny_checkpoint(tmp_path_factory.mktemp("sound") / "tiny", minilm)


@pytest.fixture
def spoilt(sound, tmp_path):
    """A function that gives a copy of the checkpoint, spoilt, beside nothing else."""

    def make(spoil) -> Path:
        folder = tmp_path / "spoilt"
        shutil.copytree(sound, folder)
        spoil(folder, tmp_path / "sprung")
        return folder

    yield make
    assert not (tmp_path / "sprung").exists(), "code of the checkpoint was run"


def doors(folder: Path, out: Path) -> dict[str, list[str]]:
    quick = ["--examples", "2", "--length", "8", "--batch-size", "2", "--metrics", "cheap", "--random-inputs"]
    return {
        "measure": ["measure", str(folder), "--out", str(out), *quick],
        "convert": ["convert", str(folder), "--qk-rank", "3", "--out", str(out)],
        "stream": ["convert", str(folder), "--qk-rank", "3", "--stream", "--out", str(out)],
    }


# a streamed conversion copies what it does not convert byte by byte, and keeps all names; a prefix names the base of a task model
NOT_SEEN_IN_PASSING = {"unknown-activation", "nothing-known"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SPOILT, *ODD, *SOUND])
@pytest.mark.parametrize("door", ["measure", "convert", "stream"])
def test_commands_refuse_what_is_spoilt_and_run_nothing_foreign(door, name, spoilt, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")  # whoever asks is told to go on
    ended = run_here(capsys, doors(spoilt({**SPOILT, **ODD, **SOUND}[name]), tmp_path / "out")[door])
    if ended.code == 0 and door == "stream" and name in NOT_SEEN_IN_PASSING:
        return
    if name not in SOUND:
        refused_in_one_line(ended)
        assert {path.name for path in tmp_path.iterdir()} == {"spoilt"}
        return
    assert ended.code == 0, ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"spoilt", "out"}
    if door != "measure":
        assert RankBertModel.from_pretrained(tmp_path / "out").config.qk_rank == 3


class TestFromPretrained:
    @pytest.mark.parametrize("name", SPOILT)
    def test_refuses_what_is_spoilt(self, name, spoilt):
        with pytest.raises(Exception) as caught:
            RankBertModel.from_pretrained(spoilt(SPOILT[name]))
        if name not in STOCK_ERRORS:
            assert isinstance(caught.value, ValueError | OSError) and 20 < len(str(caught.value)) < 3000

    @pytest.mark.parametrize("name", ODD)
    def test_does_as_stock_does(self, name, spoilt):
        model = RankBertModel.from_pretrained(spoilt(ODD[name]))
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}

    @pytest.mark.parametrize("name", SOUND)
    def test_runs_nothing_foreign(self, name, spoilt, sound, monkeypatch):
        monkeypatch.setattr("builtins.input", lambda *prompt: "y")
        loaded, original = RankBertModel.from_pretrained(spoilt(SOUND[name])), RankBertModel.from_pretrained(sound)
        assert torch.equal(loaded.get_parameter(QUERY), original.get_parameter(QUERY))


def test_a_file_in_place_of_a_folder_is_not_unpickled(sound, tmp_path, capsys):
    file = tmp_path / "model.bin"
    file.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises((ValueError, OSError), match="file"):
        RankBertModel.from_pretrained(file, config=RankBertConfig.from_pretrained(sound))
    for command in doors(file, tmp_path / "out").values():
        refused_in_one_line(run_here(capsys, command))
    assert {path.name for path in tmp_path.iterdir()} == {"model.bin"}
