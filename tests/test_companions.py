"""Files beside the weights: a converted model keeps those that do not describe the old weights."""

import json
import os
from pathlib import Path

import pytest
import torch
from hub_stand_in import HubStandIn
from huggingface_hub import ModelCard
from testing_common import run_code
from testing_folders import tiny_checkpoint

from hf_rankattn.convert.checkpoint import convert_checkpoint
from hf_rankattn.files.companions import companions, copy_companions, pooling_of, repository_of
from hf_rankattn.files.texts import package_text


KEPT = {
    "modules.json": '[{"path": "", "type": "sentence_transformers.models.Transformer"}, '
    '{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}, '
    '{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]',
    "1_Pooling/config.json": '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}',
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "weights of another module",
    "config_sentence_transformers.json": "{}",
    "sentence_bert_config.json": '{"max_seq_length": 32}',
    "LICENSE": "do as you like\r\n",
    "notes/bread.txt": "rye",
}
LEFT_OUT = """
pytorch_model.bin tf_model.h5 flax_model.msgpack model.onnx model.Q4.gguf pytorch_model.bin.index.json onnx/model.onnx
onnx/config.json openvino/openvino_model.xml checkpoint-500/model.safetensors checkpoint-500/vocab.txt
checkpoint-500/deeper/notes.txt optimizer.pt trainer_state.json training_args.bin eval_results.json modeling_evil.py
.gitattributes .git/config .eval_results/cais--hle.yaml
""".split()


@pytest.fixture
def checkpoint(tmp_path, minilm):
    folder = tiny_checkpoint(tmp_path / "source", minilm)
    for name, text in {**KEPT, **dict.fromkeys(LEFT_OUT, "{}")}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, newline="")
    (folder / "README.md").write_text("# The old card")
    return folder


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_file_that_does_not_describe_the_old_weights_is_kept(stream, checkpoint, tmp_path):
    out = tmp_path / "narrow"
    convert_checkpoint(str(checkpoint), out, qk_rank=4, calibration="none", stream=stream)
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    weights = {"model.safetensors"}
    if stream:
        weights = {"model.safetensors.index.json", *(f"model-0000{layer}-of-00003.safetensors" for layer in (1, 2, 3))}
    assert names_in(out) == {*KEPT, *tokenizer, *weights, "config.json", "README.md"}
    for name in (*KEPT, *tokenizer):
        assert (out / name).read_bytes() == (checkpoint / name).read_bytes(), name
    assert "The old card" not in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["model_type"] == "rank_bert"


def test_what_lies_outside_is_not_copied(checkpoint, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("key")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "vocab.txt").write_text("key")
    (checkpoint / "vocab.txt").unlink(missing_ok=True)
    (checkpoint / "vocab.txt").symlink_to(secret)
    (checkpoint / "link").symlink_to(tmp_path / "home", target_is_directory=True)
    (checkpoint / "COPYING").symlink_to("LICENSE")
    (checkpoint / "loop.txt").symlink_to("loop.txt")
    os.mkfifo(checkpoint / "pipe.txt")
    target = tmp_path / "target"
    copy_companions(checkpoint, target)
    assert names_in(target) & {"vocab.txt", "link/vocab.txt", "pipe.txt", "loop.txt", "COPYING"} == {"COPYING"}
    assert not any(b"key" == path.read_bytes() for path in target.rglob("*") if path.is_file())


def test_links_of_the_hub_cache_are_followed_inside_the_repository_only(tmp_path):
    repository = tmp_path / "models--user--narrow"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("rye")
    (tmp_path / "secret").write_text("key")
    (snapshot / "LICENSE").symlink_to("../../blobs/123")
    (snapshot / "vocab.txt").symlink_to(tmp_path / "secret")
    assert copy_companions(snapshot, tmp_path / "target") == ["LICENSE"]
    copy = tmp_path / "target" / "LICENSE"
    assert copy.read_text() == "rye" and not copy.is_symlink()
    assert repository_of(str(snapshot)) == "user/narrow"
    assert repository_of(str(tmp_path)) is None and repository_of("user/other") == "user/other"


def test_a_subfolder_of_a_module_keeps_its_weights_and_no_other():
    names = ["2_Dense/pytorch_model.bin", "3_Dense/pytorch_model.bin", "3_Dense/config.json", "model.safetensors"]
    assert companions(names, ["2_Dense"]) == ["2_Dense/pytorch_model.bin"]


@pytest.mark.parametrize(
    "fields, pooling",
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({}, "mean"),
    ],
)
def test_pooling_is_read_from_both_formats(fields, pooling, checkpoint, tmp_path):
    (checkpoint / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    assert pooling_of(checkpoint) == pooling and pooling_of(tmp_path) == "mean"


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json"])
def test_a_named_pipe_is_refused_and_not_waited_for(name, checkpoint):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(ValueError, match="is not a regular file"):
        pooling_of(checkpoint)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_sentence_transformers_gives_the_same_embeddings_at_the_old_rank(pooling, tmp_path, minilm):
    """Normalisation, pooling and a dense layer are kept: a mean in the place of CLS would be far off."""
    package = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "initializer_range": 0.3}
    body = Transformer(str(tiny_checkpoint(tmp_path / "bert", minilm, **sizes)))
    modules = [body, Pooling(32, pooling), Dense(32, 8, activation_function=torch.nn.Identity()), Normalize()]
    original = package.SentenceTransformer(modules=modules, device="cpu")
    original.save(str(tmp_path / "source"))
    outcome = convert_checkpoint(str(tmp_path / "source"), tmp_path / "same", qk_rank=8)
    assert outcome.damage["nearest_text_agreement"] == 1 and "SentenceTransformer" in outcome.load
    card = ModelCard.load(tmp_path / "same" / "README.md")
    assert 'model = SentenceTransformer("same")' in card.text and "AutoModel" not in card.text
    assert card.data.pipeline_tag == card.data.eval_results[0].task_type == "sentence-similarity"
    converted = package.SentenceTransformer(str(tmp_path / "same"), device="cpu")
    texts = package_text()[:6]
    one, other = (torch.from_numpy(model.encode(texts)) for model in (original, converted))
    assert [type(module).__name__ for module in converted] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert torch.allclose(other.norm(dim=-1), torch.ones(6), atol=1e-5)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    narrow = convert_checkpoint(str(tmp_path / "source"), tmp_path / "narrow", qk_rank=2)
    cut = torch.from_numpy(package.SentenceTransformer(str(tmp_path / "narrow"), device="cpu").encode(texts))
    assert not torch.allclose(one, cut, atol=1e-3) and narrow.damage["embedding_cosine"] < 0.9999


def test_a_repository_of_the_hub_keeps_its_files_too(checkpoint, tmp_path):
    code = f"""
from huggingface_hub import HfApi
from hf_rankattn.convert.checkpoint import convert_checkpoint
api = HfApi()
api.create_repo("user/source")
api.upload_folder(repo_id="user/source", folder_path={str(checkpoint)!r})
outcome = convert_checkpoint("user/source", {str(tmp_path / "narrow")!r}, qk_rank=4, calibration="none")
print(outcome.base_model)
"""
    with HubStandIn() as hub:
        environment = hub.env()
        ended = run_code(code, **environment)
        asked = " ".join(path for _, path in hub.requests)
        look = "from hf_rankattn.files.companions import checkpoint_folder; checkpoint_folder('user/source')"
        offline = run_code(look, **environment | {"HF_HUB_OFFLINE": "1"})
        assert asked == " ".join(path for _, path in hub.requests)
    assert "files of user/source that are in the cache are kept" in offline.stderr
    assert ended.stdout.split()[-1] == "user/source"
    assert set(KEPT) <= names_in(tmp_path / "narrow") and not set(LEFT_OUT) & names_in(tmp_path / "narrow")
    assert "base_model: user/source" in (tmp_path / "narrow" / "README.md").read_text()
    assert "resolve" in asked and "tf_model.h5" not in asked, "weights of other formats are not downloaded"
