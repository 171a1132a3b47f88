"""Safetensors only: what an index or a config may name, in a folder and on the Hub, through every loader."""

import json
import os
import shutil

import pytest
import torch
from hub_stand_in import HubStandIn
from safetensors.torch import load_file, save_file
from testing_common import run_code
from testing_folders import change_config
from transformers import BertConfig, BertModel

from hf_rankattn import RankBertModel
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.files.checkpoints import check_shard_names
from hf_rankattn.probe.survey import load_checkpoint, read_texts
from hf_rankattn.training.texts import TextArguments, stored_data


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "encoder.layer.0.attention.self.query.weight"
LOADERS = {
    "measure": lambda name: load_checkpoint(str(name)),
    "convert": lambda name: converting.load(str(name)),
    "from_pretrained": RankBertModel.from_pretrained,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sound")
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, intermediate_size=16, max_position_embeddings=16)).float().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "checkpoint")


def write_index(folder, shard, place=INDEX):
    """An index that says that all weights are in `shard`."""
    names = load_file(folder / WEIGHTS) if (folder / WEIGHTS).exists() else [QUERY]
    (folder / place).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, str(shard))}))


def pickled(folder, place):
    """An ordinary pickle of the weights, which transformers would open."""
    torch.save(load_file(folder / WEIGHTS), folder / place)


@pytest.mark.parametrize("shard", ["w.bin", "../w.safetensors", "/w.safetensors", "C:\\w.safetensors", "a\\..\\..\\w.safetensors", 3, None, ["a"]])  # fmt: skip
def test_names_that_no_index_may_hold(shard, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": shard}}))
    with pytest.raises(ValueError, match=INDEX):
        check_shard_names(tmp_path / INDEX)


@pytest.mark.parametrize("loader", LOADERS)
class TestFolders:
    def test_an_index_that_names_a_pickle(self, loader, folder):
        pickled(folder, "w.bin")
        write_index(folder, "w.bin")
        (folder / WEIGHTS).unlink()
        with pytest.raises(ValueError, match="names 'w.bin' as weights. Only safetensors files inside the checkpoint"):
            LOADERS[loader](folder)
        with pytest.raises(ValueError, match="names 'w.bin' as weights"):
            RankBertModel.from_pretrained(folder.parent, subfolder=folder.name)

    @pytest.mark.parametrize("absolute", [False, True])
    def test_an_index_that_names_a_file_outside(self, loader, absolute, folder):
        write_index(folder, folder.parent / "w.safetensors" if absolute else "../w.safetensors")
        (folder / WEIGHTS).rename(folder.parent / "w.safetensors")
        with pytest.raises(ValueError, match="w.safetensors' as weights. Only safetensors files inside the"):
            LOADERS[loader](folder)

    def test_a_config_that_names_the_index_of_a_pickle(self, loader, folder):
        (folder / "sub").mkdir()
        pickled(folder, "sub/w.bin")
        write_index(folder, "sub/w.bin", f"sub/{INDEX}")
        change_config(folder, transformers_weights=f"sub/{INDEX}")
        with pytest.raises(ValueError, match="names 'sub/w.bin' as weights"):
            LOADERS[loader](folder)

    def test_a_config_that_names_a_pickle(self, loader, folder):
        """transformers allows one name that is not of safetensors."""
        pickled(folder, "adapter_model.bin")
        change_config(folder, transformers_weights="adapter_model.bin")
        with pytest.raises(ValueError, match="names 'adapter_model.bin' as weights"):
            LOADERS[loader](folder)

    def test_a_config_may_name_other_safetensors(self, loader, folder, sound):
        (folder / "sub").mkdir()
        write_index(folder, "sub/w.safetensors", f"sub/{INDEX}")
        (folder / WEIGHTS).rename(folder / "sub" / "w.safetensors")
        change_config(folder, transformers_weights=f"sub/{INDEX}")
        expected = load_file(sound / WEIGHTS)[QUERY]
        assert torch.equal(LOADERS[loader](folder).get_parameter(QUERY), expected)


@pytest.mark.parametrize("loader", ["measure", "convert"])
def test_an_adapter_is_neither_ignored_nor_read_from_a_pickle(loader, folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a PEFT adapter: merge it"):
        LOADERS[loader](folder)
    (folder / "config.json").unlink()  # as PEFT saves an adapter
    with pytest.raises(ValueError, match="holds a PEFT adapter: merge it"):
        LOADERS[loader](folder)


# loads every repository with every loader, and prints what came of it
LOAD = """
import json, sys
from hf_rankattn import RankBertModel
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.probe.survey import load_checkpoint
loaders = {"measure": load_checkpoint, "convert": converting.load, "from_pretrained": RankBertModel.from_pretrained}
ended = {}
for repo in sys.argv[1:]:
    for loader, load in loaders.items():
        try:
            load(repo)
            ended[f"{repo} {loader}"] = "loaded"
        except (OSError, ValueError) as error:
            ended[f"{repo} {loader}"] = str(error)
print(json.dumps(ended))
"""


def test_repositories_on_the_hub(folder, tmp_path):
    """Nothing but safetensors is downloaded, and no conversion service is asked for more."""
    config, weights = (folder / "config.json").read_bytes(), (folder / WEIGHTS).read_bytes()
    tensors = load_file(folder / WEIGHTS)
    pickled(folder, "w.bin")
    save_file({**tensors, QUERY: tensors[QUERY].to(torch.int32)}, tmp_path / "integers.safetensors")
    write_index(folder, "w.bin")
    to_a_pickle = (folder / INDEX).read_bytes()
    write_index(folder, "w.safetensors")
    to_safetensors = (folder / INDEX).read_bytes()
    pickle = (folder / "w.bin").read_bytes()
    change_config(folder, transformers_weights=f"sub/{INDEX}")
    names_sub = (folder / "config.json").read_bytes()
    with HubStandIn() as hub:
        repositories = {
            "user/sound": {"config.json": config, WEIGHTS: weights},
            "user/sharded": {"config.json": config, INDEX: to_safetensors, "w.safetensors": weights},
            "user/index": {"config.json": config, INDEX: to_a_pickle, "w.bin": pickle},
            "user/sub": {"config.json": names_sub, f"sub/{INDEX}": to_a_pickle, "w.bin": pickle},
            "user/pickle": {"config.json": config, "pytorch_model.bin": pickle},
            "user/integers": {"config.json": config, WEIGHTS: (tmp_path / "integers.safetensors").read_bytes()},
        }
        for repo_id, files in repositories.items():
            hub.add(repo_id, files)
        assert "DISABLE_SAFETENSORS_CONVERSION" not in os.environ | hub.env()
        ended = json.loads(run_code(LOAD, *repositories, **hub.env()).stdout.splitlines()[-1])
        for loader in LOADERS:
            assert ended[f"user/sound {loader}"] == ended[f"user/sharded {loader}"] == "loaded"
            for repo in ("user/index", "user/sub"):
                assert "names 'w.bin' as weights" in ended[f"{repo} {loader}"]
            assert "user/pickle has no safetensors" in ended[f"user/pickle {loader}"]
        for loader in ("measure", "convert"):
            assert f"user/integers holds {QUERY} as I32" in ended[f"user/integers {loader}"]
        asked = [path for _, path in hub.requests]
        assert not [path for path in asked if path.endswith(".bin")]
        assert not [path for path in asked if "/commits" in path or "/discussions" in path], "a conversion"


CONFIGS = "configs:\n- config_name: default\n  data_files:\n  - split: test\n    path: {path}\n"


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_data_on_another_machine_is_not_requested_in_offline_mode(file, tmp_path):
    with HubStandIn() as hub:
        for prefix in ("", "zip://x.csv::"):
            text = CONFIGS.format(path=f"{prefix}{hub.endpoint}/x.csv")
            # the comment and the byte order mark are skipped by datasets
            (tmp_path / file).write_text(f"\ufeff---\n{text}---\n" if file == "README.md" else f"# data\n---\n{text}")
            with pytest.raises(ValueError, match="names http://127.*/x.csv as data, and offline mode"):
                read_texts(dataset=str(tmp_path))
            with pytest.raises(ValueError, match="names http://127.*/x.csv as data, and offline mode"):
                stored_data(str(tmp_path), TextArguments(output_dir=str(tmp_path / "out")))
        assert hub.requests == []


def test_images_that_are_named_by_url_are_not_requested(tmp_path):
    columns = "dataset_info:\n  features:\n  - name: text\n    dtype: string\n  - name: image\n    dtype: image\n"
    (tmp_path / "README.md").write_text(f"---\n{columns}---\n")
    with HubStandIn() as hub:
        (tmp_path / "test.csv").write_text(f"text,image\nbread and water,{hub.endpoint}/x.png\n")
        assert read_texts(dataset=str(tmp_path))[0] == ["bread and water"]
        assert hub.requests == []


def test_data_that_break_off_are_an_error_of_the_dataset(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"text": "bread"}\n{"text": ')
    with pytest.raises(ValueError, match="dataset .* cannot be loaded"):
        read_texts(dataset=str(tmp_path))


def test_data_in_the_folder_is_read_in_offline_mode(tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{CONFIGS.format(path='x.json')}---\nMade from http://example.com/x.")
    (tmp_path / "x.json").write_text(json.dumps({"text": "bread and water"}))
    assert read_texts(dataset=str(tmp_path), column="text")[0] == ["bread and water"]
