"""What conversion refuses, and what it says then."""

import logging

import pytest
import torch
from accelerate import cpu_offload
from testing_common import BERT, FAMILIES, FAMILY_IDS, XLNET
from testing_convert import plain_inputs, trained_like
from transformers import BertModel, LlamaConfig, LlamaModel

from hf_rankattn import RankEncoderConfig, RankEncoderModel, convert_rank


def a_key(model):
    names = ("key.weight", ".k", "k_lin.weight", "c_attn.weight")
    return next(weight for name, weight in model.named_parameters() if name.endswith(names))


class TestBadInput:
    def test_widening_is_said(self, caplog):
        logging.getLogger("transformers").propagate = True
        logger = logging.getLogger("hf_rankattn.convert.conversion")
        logger.addHandler(caplog.handler)
        convert_rank(BERT.stock("Model")(BERT.stock_config()), 9, 10)
        logger.removeHandler(caplog.handler)
        assert "qk_rank=9 is above the rank 8 that the heads have" in caplog.text
        assert "v_head_dim=10 is above the width 8 that the values have" in caplog.text

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_calibration_without_a_real_token(self, family):
        model, batch = family.stock("Model")(family.stock_config()), plain_inputs(family)
        batch["attention_mask"] = torch.zeros_like(batch["attention_mask"])
        with pytest.raises(ValueError, match="no real token of the calibration reached (layer|group) 0"):
            convert_rank(model, 3, calibration=batch)
        with pytest.raises(ValueError, match="is empty"):
            convert_rank(model, 3, calibration=[])
        with pytest.raises(ValueError, match="more than one token"):
            convert_rank(model, 3, calibration={"input_ids": torch.tensor([[5]])})

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_nan_activations_and_weights(self, family):
        model, batch = family.stock("Model")(family.stock_config()), plain_inputs(family)
        embedded = torch.randn(3, 9, getattr(model.config, "embedding_size", 32))
        embedded[:, 2] = torch.nan
        with pytest.raises(ValueError, match="hold NaN or Inf on the calibration"):
            convert_rank(model, 3, calibration={"inputs_embeds": embedded})
        with torch.no_grad():
            model.get_input_embeddings().weight[-1] = float("nan")
        with pytest.raises(ValueError, match="(embedding|wte).* of the given .*Model holds NaN or Inf"):
            convert_rank(model, 3, calibration=batch)
        with torch.no_grad():
            a_key(model)[0] = torch.inf
        with pytest.raises(ValueError, match="holds NaN or Inf"):
            convert_rank(model, 3)

    def test_unsupported_models_name_the_supported_ones(self):
        llama = LlamaConfig(vocab_size=10, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        for model in (LlamaModel(llama), RankEncoderModel(RankEncoderConfig(input_dim=4))):
            with pytest.raises(ValueError, match="cannot be converted; these can: bert, rank_bert, .*t5.*gpt2"):
                convert_rank(model, 3)
        with pytest.raises(ValueError, match="transformers model, got a Linear"):
            convert_rank(torch.nn.Linear(2, 2), 3)

        class MyBert(BertModel):
            pass

        with pytest.raises(ValueError, match="class of its own"):
            convert_rank(MyBert(BERT.stock_config()), 3)

    def test_adapters_are_merged_first(self):
        peft = pytest.importorskip("peft")
        adapter = peft.LoraConfig(target_modules=["query"])
        wrapped = peft.get_peft_model(BERT.stock("Model")(BERT.stock_config()), adapter)
        inside = BERT.stock("Model")(BERT.stock_config())
        inside.add_adapter(adapter)
        for model in (wrapped, inside):
            with pytest.raises(ValueError, match="has an adapter: merge it first"):
                convert_rank(model, 3)
        assert convert_rank(wrapped.merge_and_unload(), 3).config.qk_rank == 3

    def test_qk_norm_is_refused_with_the_reason(self):
        with pytest.raises(ValueError, match="not a bilinear form"):
            convert_rank(BERT.rank("Model")(BERT.rank_config(qk_norm=True)), 3)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"qk_rank": 0}, "at least 1"),
            ({"qk_rank": 2.5}, "at least 1"),
            ({"qk_rank": [3, 3]}, "2 entries, the model has 3"),
            ({}, "give `qk_rank`, `v_head_dim` or both"),
            ({"qk_rank": 3, "energy": 0.9}, "choose widths for 'auto'"),
            ({"v_head_dim": 0}, "`v_head_dim` must be an integer of at least 1"),
            ({"v_head_dim": [3, 3]}, "`v_head_dim` has 2 entries, the model has 3"),
            ({"v_head_dim": "auto", "mean_rank": 3}, "give some as `calibration`"),
            ({"qk_rank": 4, "v_head_dim": "all"}, "or 'auto', got 'all'"),
            ({"qk_rank": "auto", "energy": 0.9, "mean_rank": 3}, "two budgets"),
            ({"qk_rank": "auto", "energy": 1.5}, r"\(0, 1\]"),
            ({"qk_rank": "auto", "mean_rank": 0.5}, "at least 1"),
            ({"qk_rank": "auto", "mean_rank": 99}, "more than the heads have"),
            ({"qk_rank": 3, "objective": "attention"}, "need texts"),
            ({"qk_rank": 3, "objective": "loss"}, "'logits' or 'attention'"),
            ({"qk_rank": 3, "distil_steps": -1}, "at least 0"),
            ({"qk_rank": 3, "calibration": iter([{}])}, "can be read only once"),
            ({"qk_rank": 3, "calibration": ["a text"]}, "dict of tensors"),
            ({"qk_rank": 3, "calibration": {"input_ids": torch.arange(4)}}, r"must be .batch, n.*got shape \(4,\)"),
            (
                {"qk_rank": 3, "calibration": {"input_ids": torch.ones(1, 999).long()}},
                "texts of 999 tokens, and the model",
            ),
            ({"qk_rank": 99, "seed": -1}, "`seed` must be a whole number of at least 0, got -1"),
        ],
    )
    def test_requests_that_make_no_sense(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            convert_rank(BERT.stock("Model")(BERT.stock_config()), **arguments)

    def test_what_xlnet_cannot_be_calibrated_on(self):
        model, batch = XLNET.stock("Model")(XLNET.stock_config()), plain_inputs(XLNET)
        with pytest.raises(ValueError, match="not for XLNet, which adds relative positions"):
            convert_rank(model, 3, calibration=batch, objective="attention")
        with pytest.raises(ValueError, match="plain texts: the batch has perm_mask"):
            convert_rank(model, 3, calibration={**batch, "perm_mask": torch.zeros(3, 9, 9)})

    def test_a_failure_leaves_the_model_as_it_was(self):
        model, batch = trained_like(BERT), plain_inputs(BERT)
        before = model(**batch).last_hidden_state
        with pytest.raises(ValueError):
            convert_rank(model, 3, calibration=[batch, ["not a batch"]])
        assert torch.equal(model(**batch).last_hidden_state, before)
        assert not any(module._forward_pre_hooks for module in model.modules())


def share(model, first, second):
    model.set_submodule(second, model.get_submodule(first))


def share_queries(model):
    first, second = (model.encoder.layer[i].attention.self for i in (0, 1))
    second.query.weight = first.query.weight


LAYER, ATTENTION = "encoder.layer", "encoder.layer.0.attention.self"


class TestOddModels:
    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda model: share(model, f"{LAYER}.0", f"{LAYER}.1"), "are the same module"),
            (
                lambda model: share(model, f"{ATTENTION}.query", f"{ATTENTION}.key"),
                "self.query.weight of layer 0 and self.key.weight of layer 0 are one parameter",
            ),
            (share_queries, "self.query.weight of layer 0 and self.query.weight of layer 1 are one parameter"),
            (
                lambda model: setattr(model.get_submodule(f"{ATTENTION}.query"), "bias", None),
                "layer 0 has no self.query.bias",
            ),
            (cpu_offload, "on the meta device"),
            (lambda model: model.set_submodule(LAYER, torch.nn.ModuleList()), "no attention layers"),
        ],
    )
    @pytest.mark.parametrize("calibrated", [False, True])
    def test_are_refused_with_the_reason(self, change, message, calibrated):
        model = BERT.stock("Model")(BERT.stock_config())
        change(model)
        with pytest.raises(ValueError, match=message):
            convert_rank(model, 3, calibration=plain_inputs(BERT) if calibrated else None)

    def test_a_hidden_size_of_one_stays_finite(self):
        sizes = {"hidden_size": 1, "num_attention_heads": 1, "intermediate_size": 2, "vocab_size": 47}
        model = BERT.stock("Model")(BERT.stock_config(**sizes)).eval()
        wide = convert_rank(model, 2)
        assert all(bool(torch.isfinite(weight).all()) for weight in wide.parameters())
        batch = plain_inputs(BERT)
        assert torch.equal(wide(**batch).last_hidden_state, model(**batch).last_hidden_state)

    def test_a_conversion_that_overflows_is_not_returned(self):
        """Eight equal dimensions become one that is longer, and beyond float16."""
        model = BERT.stock("Model")(BERT.stock_config()).half()
        with torch.no_grad():
            for side in (model.encoder.layer[0].attention.self.query, model.encoder.layer[0].attention.self.key):
                side.weight.fill_(6e4)
        with pytest.raises(ValueError, match="query.weight of the converted model holds NaN or Inf"):
            convert_rank(model, 3)


class TestInferenceMode:
    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    @pytest.mark.parametrize("options", [{}, {"distil_steps": 2}], ids=str)
    def test_the_converted_model_can_be_trained(self, family, options):
        with torch.inference_mode():
            model, batch = family.stock("Model")(family.stock_config()), plain_inputs(family)
            converted = convert_rank(model, 3, calibration=batch, **options)
        converted(input_ids=torch.arange(9)[None]).last_hidden_state.square().sum().backward()
        assert float(a_key(converted).grad.abs().sum()) > 0
