"""What is saved comes back: the same outputs, the same sharing, through every door."""

import json
import pickle
from copy import deepcopy

import pytest
import torch
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, TASK_IDS, TASKS, XLNET, float_tensors, tiny_inputs
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForTokenClassification, AutoTokenizer

from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression, RankEncoderForTokenClassification


SMALL = {"qk_rank": 3, "v_head_dim": 5, "qk_norm": True, "qk_scale": 0.4}


def sharing(model: torch.nn.Module) -> set[frozenset[str]]:
    """Groups of state-dict names that live in one storage."""
    groups: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def assert_same(ours, theirs, batch):
    assert type(ours) is type(theirs)
    assert sharing(ours) == sharing(theirs)
    ours_state, theirs_state = ours.state_dict(), theirs.state_dict()
    assert list(ours_state) == list(theirs_state)
    assert all(torch.equal(ours_state[name], theirs_state[name]) for name in ours_state)
    for a, b in zip(float_tensors(ours.eval()(**batch)), float_tensors(theirs.eval()(**batch)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family, suffix", TASKS, ids=TASK_IDS)
def test_save_and_load(family, suffix, tmp_path):
    model = family.rank(suffix)(family.rank_config(**SMALL))
    model.save_pretrained(tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert "model.safetensors" in written and not any(name.endswith((".py", ".bin")) for name in written)
    assert_same(family.rank(suffix).from_pretrained(tmp_path), model, tiny_inputs(family, suffix))
    assert sharing(model) or (family, suffix) != (XLNET, "LMHeadModel"), "its head is tied"


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_sharded_and_per_layer_through_the_auto_class(family, tmp_path):
    ranks = [2, 5] if family is ALBERT else [2, 5, 3]
    model = family.rank("Model")(family.rank_config(qk_rank=ranks))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert_same(AutoModel.from_pretrained(tmp_path), model, tiny_inputs(family, "Model"))


@pytest.mark.parametrize("family", [BERT, ALBERT], ids=["Bert", "Albert"])
def test_tied_embeddings_stay_tied(family, tmp_path):
    model = family.rank("ForMaskedLM")(family.rank_config(**SMALL))
    assert len(sharing(model)) == 2, "word embeddings with the decoder, and the decoder's bias"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert sharing(loaded) == sharing(model)
    with torch.no_grad():
        loaded.get_input_embeddings().weight[0] += 1.0
    assert torch.equal(loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_copies_and_pickles(family):
    model = family.rank("Model")(family.rank_config(**SMALL))
    batch = tiny_inputs(family, "Model")
    assert_same(deepcopy(model), model, batch)
    assert_same(pickle.loads(pickle.dumps(model)), model, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_the_saved_dtype_comes_back(dtype, tmp_path):
    model = BERT.rank("Model")(BERT.rank_config(**SMALL)).to(dtype)
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path, dtype="auto").dtype == dtype


def test_the_encoder_round_trips(tmp_path):
    points = torch.randn(2, 6, 8)
    fields = {"input_dim": 8, "num_attention_heads": 3, "qk_rank": [2, 4], "v_head_dim": 5, "num_hidden_layers": 2}
    for i, extra in enumerate(
        [{}, {"position": "concatenated", "norm": "layer"}, {"input_map": "mlp", "hidden_size": 12, "norm": "rms"}]
    ):
        model = RankEncoderForPointRegression(RankEncoderConfig(**fields, **extra))
        model.save_pretrained(tmp_path / str(i))
        loaded = RankEncoderForPointRegression.from_pretrained(tmp_path / str(i))
        assert_same(loaded, model, {"points": points})
    words = RankEncoderForTokenClassification(RankEncoderConfig(vocab_size=9, hidden_size=8, num_labels=4))
    words.save_pretrained(tmp_path / "words")
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "words")
    assert_same(loaded, words, {"input_ids": torch.randint(9, (2, 5))})


def test_a_folder_without_a_tokenizer_class_gets_that_of_the_stock_family(tmp_path):
    BERT.rank("Model")(BERT.rank_config()).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "rank"]))
    assert AutoTokenizer.from_pretrained(tmp_path)("rank")["input_ids"] == [2, 5, 3]
