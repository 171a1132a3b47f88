"""Checkpoints converted shard by shard, never held as a whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from testing_common import ALBERT, BERT, XLNET, run_code
from testing_convert import trained_like
from testing_folders import change_config
from transformers import BertConfig, BertModel

from hf_rankattn.convert import convert_model, convert_shards, shards


@pytest.fixture
def new(tmp_path):
    (tmp_path / "new").mkdir()
    return tmp_path / "new"


class TestShards:
    @pytest.mark.parametrize("family, suffix", [(BERT, "ForMaskedLM"), (ALBERT, "Model"), (XLNET, "LMHeadModel")])
    @pytest.mark.parametrize("request_", [{"qk_rank": 3}, {"qk_rank": 10}, {"qk_rank": "auto", "mean_rank": 4}])
    def test_equals_the_conversion_in_memory(self, family, suffix, request_, new, tmp_path):
        model = trained_like(family, suffix).float()
        model.save_pretrained(tmp_path / "old", max_shard_size="15KB")
        whole, reports = convert_model(model, **request_)
        whole.save_pretrained(tmp_path / "whole")
        _, streamed = convert_shards(tmp_path / "old", new, **request_)
        assert streamed == reports
        ours, theirs = (family.rank(suffix).from_pretrained(tmp_path / name).state_dict() for name in ("new", "whole"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("new", "whole")]
        assert configs[0] == configs[1]

    def test_damaged_files_are_refused(self, tmp_path):
        model = BERT.stock("Model")(BERT.stock_config())
        model.save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        whole = file.read_bytes()
        for damaged in (whole[:-100], b"", b"\xff" * 64, whole[:8] + b"{" * 100 + whole[108:]):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="model.safetensors"):
                convert_shards(tmp_path, tmp_path, 3)
        file.unlink()
        with pytest.raises(ValueError, match="no file model.safetensors"):
            convert_shards(tmp_path, tmp_path, 3)

    def test_a_single_file_is_preferred_to_an_index_as_in_transformers(self, tmp_path):
        BERT.stock("Model")(BERT.stock_config()).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"old": "old.safetensors"}}')
        assert [file.name for file in shards.shard_files(tmp_path)] == ["model.safetensors"]

    def test_weights_of_another_name_are_not_ignored(self, tmp_path):
        BERT.stock("Model")(BERT.stock_config()).save_pretrained(tmp_path)
        change_config(tmp_path, transformers_weights="other.safetensors")
        with pytest.raises(ValueError, match="other.safetensors.*convert without streaming"):
            convert_shards(tmp_path, tmp_path, 3)

    def test_a_file_that_shrinks_while_it_is_read_is_refused(self, tmp_path):
        file = tmp_path / "model.safetensors"
        file.write_bytes(bytes(100))
        with pytest.raises(ValueError, match="ends within w"):
            shards.Stored(file, "w", "F32", (50,), 0, 200).read()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_weights_that_are_not_finite_are_refused_wherever_they_are(self, bad, new, tmp_path):
        model = BERT.stock("Model")(BERT.stock_config())
        with torch.no_grad():
            model.encoder.layer[1].output.dense.weight[3, 4] = bad
        model.save_pretrained(tmp_path / "old")
        with pytest.raises(ValueError, match="layer.1.output.dense.weight of .* holds NaN or Inf"):
            convert_shards(tmp_path / "old", new, 3)

    def test_a_conversion_that_overflows_is_not_written(self, new, tmp_path):
        model = BERT.stock("Model")(BERT.stock_config()).half()
        with torch.no_grad():
            for side in ("query", "key"):
                model.encoder.layer[1].attention.self.get_submodule(side).weight.fill_(6e4)
        model.save_pretrained(tmp_path / "old")
        with pytest.raises(ValueError, match="layer.1.*weight of the converted model holds NaN or Inf"):
            convert_shards(tmp_path / "old", new, 3)

    def test_only_files_of_the_folder_are_read(self, tmp_path):
        folder, outside = tmp_path / "old", tmp_path / "outside.safetensors"
        BERT.stock("Model")(BERT.stock_config()).save_pretrained(folder)
        shutil.move(folder / "model.safetensors", outside)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": "../outside.safetensors"}}))
        with pytest.raises(ValueError, match="index.json names .* as weights"):
            convert_shards(folder, tmp_path, 3)
        index.write_text("[]")
        with pytest.raises(ValueError, match="not an index of weights"):
            convert_shards(folder, tmp_path, 3)
        index.unlink()
        (folder / "model.safetensors").symlink_to(outside)
        with pytest.raises(ValueError, match="leads out of the folder"):
            convert_shards(folder, tmp_path, 3)

    def test_one_shard_per_layer_from_shards_in_a_subfolder(self, new, tmp_path):
        folder = tmp_path / "old"
        model = BERT.stock("Model")(BERT.stock_config()).eval()
        model.save_pretrained(folder)
        (folder / "sub").mkdir()
        shutil.move(folder / "model.safetensors", folder / "sub" / "w.safetensors")
        index = {"weight_map": dict.fromkeys(model.state_dict(), "sub/w.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        convert_shards(folder, new, 3)
        written = {file.name: set(load_file(file)) for file in new.glob("*.safetensors")}
        assert len(written) == 4 and "pooler.dense.weight" in written["model-00001-of-00004.safetensors"]
        assert all(name.startswith("encoder.layer.2.") for name in written["model-00004-of-00004.safetensors"])
        narrow = BERT.rank("Model").from_pretrained(new)
        assert narrow.config.qk_rank == 3
        assert torch.equal(narrow.get_parameter("pooler.dense.weight"), model.get_parameter("pooler.dense.weight"))

    def test_links_of_the_hub_cache_are_followed(self, new, tmp_path):
        folder, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
        blobs.mkdir()
        BERT.stock("Model")(BERT.stock_config()).save_pretrained(folder)
        for file in list(folder.iterdir()):
            shutil.move(file, blobs / f"blob-{file.name}")
            file.symlink_to(blobs / f"blob-{file.name}")
        convert_shards(folder, new, 3)
        assert BERT.rank("Model").from_pretrained(new).config.qk_rank == 3

    def test_class_names_come_from_our_own_table(self, new, tmp_path):
        folder = tmp_path / "old"
        BERT.stock("ForMaskedLM")(BERT.stock_config()).save_pretrained(folder)
        hostile = "BertModel\nimport os; os.system('id')"
        for named, kept in (
            ([hostile], None),
            (["AlbertModel", 3, "PretrainedConfig"], None),
            ([hostile, "BertForMaskedLM"], ["RankBertForMaskedLM"]),
        ):
            change_config(folder, architectures=named)
            written, _ = convert_shards(folder, new, 3)
            assert written.architectures == kept

    @pytest.mark.slow
    def test_a_checkpoint_several_times_the_memory_limit(self, new, tmp_path):
        """All the process may hold, Python and torch included, is a third of the checkpoint at most."""
        code = """
import json, resource, sys
from pathlib import Path
import torch
from transformers import BertConfig
from hf_rankattn.convert import convert_shards
torch.set_num_threads(1)
source, target = Path(sys.argv[1]), Path(sys.argv[2])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = (int(status["VmData"].split()[0]) + 160_000) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.empty(limit // 4).fill_(1)
    sys.exit("the limit does not hold")
except RuntimeError:
    pass
convert_shards(source, target, 16)
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # ru_maxrss starts at the parent's peak
print(json.dumps({"limit": limit, "peak": peak * 1024}))
"""
        sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 1000}
        config = BertConfig(**sizes, num_hidden_layers=60, architectures=["BertModel"])
        (tmp_path / "old").mkdir()
        config.save_pretrained(tmp_path / "old")
        total = write_sparse_shards(tmp_path / "old", config)
        seen = json.loads(run_code(code, tmp_path / "old", tmp_path / "new").stdout)
        assert total > 3 * max(seen["limit"], seen["peak"]), (total, seen)
        index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total - 60 * 2 * 48 * 16 * (1024 + 1) * 4


def write_sparse_shards(folder: Path, config) -> int:
    """A BERT checkpoint of zeros, five layers a shard, as files with holes: written at once, however large."""
    import struct

    with torch.device("meta"):
        state = BertModel(config).state_dict()
    shards: dict[str, dict] = {}
    for name, tensor in state.items():
        parts = name.split(".")
        number = int(parts[2]) // 5 if name.startswith("encoder.layer.") else 0
        shards.setdefault(f"model-{number:05d}.safetensors", {})[name] = tensor
    total = 0
    for file, tensors in shards.items():
        header, end = {}, 0
        for name, tensor in tensors.items():
            begin, end = end, end + 4 * tensor.numel()
            header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
        total += end
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total
