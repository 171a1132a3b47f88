"""Conversion with calibration texts: what enters, in which order, and where the optimum is known."""

import pytest
import torch
from testing_common import BERT, FAMILIES, FAMILY_IDS, XLNET
from testing_convert import (
    caught_inputs,
    difference,
    entries,
    own_text_error,
    plain_inputs,
    rows_of_head,
    trained_like,
)

from hf_rankattn import convert_rank
from hf_rankattn.convert import convert_model


class TestCalibrated:
    def test_one_text_reaches_eckart_young(self):
        """All rows of one text see the same keys, so the closed form is the optimum for its row-centred logits."""
        model = trained_like(BERT)
        batch = {name: value[1:2] for name, value in plain_inputs(BERT).items()}
        converted, reports = convert_model(model, 3, calibration=batch)
        caught = caught_inputs(model, batch)
        lost = total = 0.0
        for head in range(4):
            old, new = (rows_of_head(entries(m)[1], head, 4, caught, batch) for m in (model, converted))
            logits = torch.stack([y @ form.T @ x for x, y, form in old])
            energy = torch.linalg.svdvals(logits - logits.mean(-1, keepdim=True)).square() / logits.shape[1]
            assert own_text_error(old, new) == pytest.approx(float(energy[3:].sum()), rel=1e-6)
            lost, total = lost + float(energy[3:].sum()), total + float(energy.sum())
        assert reports[0].energy_kept == pytest.approx(1 - lost / total, abs=1e-9)

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_padding_never_enters(self, family):
        model, batch = trained_like(family), plain_inputs(family)
        alone = [
            {"input_ids": ids[None, mask.bool()]}
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        padded = convert_rank(model, 3, calibration=batch)
        if family is XLNET:
            # XLNet tells positions by distance only, so padding on the left or right moves nothing
            batch = {name: torch.cat([torch.zeros_like(value[:, :2]), value], dim=1) for name, value in batch.items()}
            assert difference(convert_rank(model, 3, calibration=batch), padded, alone[0]) < 1e-6
        assert difference(convert_rank(model, 3, calibration=alone), padded, alone[0]) < 1e-6

    def test_padding_changes_no_bit_of_what_xlnet_is_fitted_to(self):
        """One layer, whose inputs are the same to the last bit; the descent would amplify a difference in rounding."""
        model, batch = trained_like(XLNET, n_layer=1), plain_inputs(XLNET)
        padded = {name: torch.cat([torch.zeros_like(value[:, :2]), value], dim=1) for name, value in batch.items()}
        ours, theirs = (convert_rank(model, 3, calibration=inputs) for inputs in (batch, padded))
        assert difference(ours, theirs, batch) == 0

    def test_each_layer_is_calibrated_on_the_model_converted_so_far(self):
        model, batch = trained_like(BERT), plain_inputs(BERT)
        together = convert_rank(model, 3, calibration=batch)
        step = model
        for layer in range(3):
            ranks = [3] * (layer + 1) + [8] * (2 - layer)
            step = convert_rank(step, ranks, calibration=batch)
        assert difference(step, together, batch) < 1e-6

    def test_cross_attention_is_converted_with_what_it_reads(self):
        model = trained_like(BERT, "LMHeadModel", is_decoder=True, add_cross_attention=True)
        batch = {"input_ids": plain_inputs(BERT)["input_ids"], "encoder_hidden_states": torch.randn(3, 5, 32).double()}
        converted = convert_rank(model, 7, calibration=batch)
        assert converted.bert.encoder.layer[1].crossattention.self.qk_rank == 7
        assert difference(converted, model, batch) < difference(convert_rank(model, 7), model, batch)
        with pytest.raises(ValueError, match="encoder_hidden_states"):
            convert_rank(model, 3, calibration={"input_ids": batch["input_ids"]})

    def test_singular_moments(self):
        """Two tokens span less than the rank asked for: exact on them, and finite and useful elsewhere."""
        model = trained_like(BERT, num_hidden_layers=1)
        seen, other = {"input_ids": torch.tensor([[3, 4]])}, {"input_ids": torch.arange(9)[None]}
        converted = convert_rank(model, 4, calibration=seen)
        assert difference(converted, model, seen) < 1e-6
        assert torch.isfinite(converted(**other).last_hidden_state).all()
        query = converted.encoder.layer[0].attention.self.query.weight.view(4, 4, 32)
        assert bool((query.norm(dim=-1) > 0).all()), "directions that no token has are ranked by the weights"
