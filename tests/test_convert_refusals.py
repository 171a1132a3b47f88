"""What conversion refuses, and what it says then."""

import logging

import pytest
import torch
from testing_common import BERT, FAMILIES, FAMILY_IDS, XLNET
from testing_convert import plain_inputs, trained_like
from transformers import BertModel, DistilBertConfig, DistilBertModel

from hf_rankattn import RankEncoderConfig, RankEncoderModel, convert_rank


class TestBadInput:
    def test_widening_is_said(self, caplog):
        logging.getLogger("transformers").propagate = True
        logger = logging.getLogger("hf_rankattn.models.convert.conversion")
        logger.addHandler(caplog.handler)
        convert_rank(BERT.stock("Model")(BERT.stock_config()), 9)
        logger.removeHandler(caplog.handler)
        assert "qk_rank=9 is above the rank 8 that the heads have" in caplog.text

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
        with torch.no_grad():
            model.get_input_embeddings().weight[batch["input_ids"][0, 0]] = float("nan")
        with pytest.raises(ValueError, match="hold NaN or Inf on the calibration"):
            convert_rank(model, 3, calibration=batch)
        with torch.no_grad():
            next(weight for name, weight in model.named_parameters() if name.endswith(("key.weight", ".k")))[0] = (
                float("inf")
            )
        with pytest.raises(ValueError, match="holds NaN or Inf"):
            convert_rank(model, 3)

    def test_unsupported_models_name_the_supported_ones(self):
        for model in (
            DistilBertModel(DistilBertConfig(vocab_size=10, dim=8, n_heads=2, n_layers=1, hidden_dim=8)),
            RankEncoderModel(RankEncoderConfig(input_dim=4)),
        ):
            with pytest.raises(ValueError, match="bert, rank_bert, albert, rank_albert, xlnet, rank_xlnet"):
                convert_rank(model, 3)
        with pytest.raises(ValueError, match="transformers model, got a Linear"):
            convert_rank(torch.nn.Linear(2, 2), 3)

        class MyBert(BertModel):
            pass

        with pytest.raises(ValueError, match="class of its own"):
            convert_rank(MyBert(BERT.stock_config()), 3)

    def test_qk_norm_is_refused_with_the_reason(self):
        with pytest.raises(ValueError, match="not a bilinear form"):
            convert_rank(BERT.rank("Model")(BERT.rank_config(qk_norm=True)), 3)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"qk_rank": 0}, "at least 1"),
            ({"qk_rank": 2.5}, "at least 1"),
            ({"qk_rank": [3, 3]}, "2 entries, the model has 3"),
            ({"qk_rank": 3, "energy": 0.9}, "choose ranks for qk_rank='auto'"),
            ({"qk_rank": "auto", "energy": 0.9, "mean_rank": 3}, "two budgets"),
            ({"qk_rank": "auto", "energy": 1.5}, r"\(0, 1\]"),
            ({"qk_rank": "auto", "mean_rank": 0.5}, "at least 1"),
            ({"qk_rank": "auto", "mean_rank": 99}, "more than the heads have"),
            ({"qk_rank": 3, "objective": "attention"}, "need texts"),
            ({"qk_rank": 3, "objective": "loss"}, "'logits' or 'attention'"),
            ({"qk_rank": 3, "distil_steps": -1}, "at least 0"),
            ({"qk_rank": 3, "calibration": iter([{}])}, "walked through only once"),
            ({"qk_rank": 3, "calibration": ["a text"]}, "dict of tensors"),
        ],
    )
    def test_requests_that_make_no_sense(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            convert_rank(BERT.stock("Model")(BERT.stock_config()), **arguments)

    def test_what_xlnet_cannot_be_calibrated_on(self):
        model, batch = XLNET.stock("Model")(XLNET.stock_config()), plain_inputs(XLNET)
        with pytest.raises(ValueError, match="for BERT and ALBERT"):
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
