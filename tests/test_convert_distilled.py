"""Distillation after conversion, and the texts it makes out of the calibration's."""

import pytest
import torch
from testing_common import BERT, FAMILIES, FAMILY_IDS
from testing_convert import plain_inputs, trained_like

from hf_rankattn import convert_rank
from hf_rankattn.convert.calibration import in_pieces
from hf_rankattn.convert.distil import REPLACED, varied


class TestDistillation:
    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_distilling_brings_the_states_nearer_and_trains_nothing_else(self, family):
        model, batch = trained_like(family).float(), plain_inputs(family)
        plain = convert_rank(model, 2, calibration=batch)
        distilled = convert_rank(model, 2, calibration=batch, distil_steps=30)
        mask = batch["attention_mask"].bool()
        target = model(**batch).last_hidden_state[mask]
        errors = [(m(**batch).last_hidden_state[mask] - target).square().sum() for m in (plain, distilled)]
        assert errors[1] < 0.8 * errors[0]
        changed = {n for n, w in distilled.named_parameters() if not torch.equal(w, plain.get_parameter(n))}
        names = ("query.weight", "query.bias", "key.weight", ".q", ".k", ".r", "bias", "seg_embed")
        assert changed and all(n.endswith(names) and ("attention" in n or "rel_attn" in n) for n in changed)
        assert all(weight.requires_grad and weight.grad is None for weight in distilled.parameters())

    def test_the_seed_chooses_the_texts_and_nothing_else_does(self):
        model, batch = trained_like(BERT).float(), plain_inputs(BERT)
        weights = []
        for seed in (4, 4, 5):
            state = torch.get_rng_state()
            new = convert_rank(model, 3, calibration=batch, distil_steps=4, seed=seed)
            assert torch.equal(torch.get_rng_state(), state)
            weights.append(new.encoder.layer[0].attention.self.query.weight)
            torch.randn(7)
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])

    @pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision_is_trained_in_float32_and_cast_back(self, kind):
        model, batch = trained_like(BERT).to(kind), plain_inputs(BERT)
        plain, distilled = (convert_rank(model, 2, calibration=batch, distil_steps=steps) for steps in (0, 30))
        assert {weight.dtype for weight in distilled.parameters()} == {kind}
        mask = batch["attention_mask"].bool()
        target = model(**batch).last_hidden_state[mask].float()
        errors = [(m(**batch).last_hidden_state[mask].float() - target).square().sum() for m in (plain, distilled)]
        assert errors[1] < 0.8 * errors[0]
        assert all(weight.requires_grad and weight.grad is None for weight in distilled.parameters())

    def test_ids_of_32_bits(self):
        model, batch = trained_like(BERT).float(), plain_inputs(BERT)
        narrow = {**batch, "input_ids": batch["input_ids"].int()}
        ours, theirs = (convert_rank(model, 3, calibration=b, distil_steps=4) for b in (narrow, batch))
        assert torch.equal(ours(**batch).last_hidden_state, theirs(**batch).last_hidden_state)


class TestVariation:
    def test_padding_and_ends_stay_and_few_words_are_new(self):
        """Words below 500 are the texts' own: all that is not new has only moved around its text."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.stack([torch.randperm(200, generator=generator)[:60] + 300 for _ in range(50)])
        real = torch.ones(50, 60, dtype=torch.bool)
        real[::2, :7] = False
        real[1::2, 50:] = False
        new = varied(ids, real, 10_000, generator)
        assert torch.equal(new[~real], ids[~real]) and int(new.min()) >= 300 and int(new.max()) < 10_000
        kept = []
        for before, after, mask in zip(ids, new, real, strict=True):
            before, after = before[mask], after[mask]
            assert before[0] == after[0] and torch.equal(before[-2:], after[-2:])
            inner = before[1:-2]
            rolls = torch.stack([inner.roll(shift) == after[1:-2] for shift in range(len(inner))]).double().mean(1)
            kept.append(float(rolls.max()))
        # shares are uniform in [0, REPLACED]
        assert min(kept) < 0.9 and sum(kept) / len(kept) == pytest.approx(1 - REPLACED / 2, abs=0.04)

    def test_frequent_words_are_drawn_more_often(self):
        generator = torch.Generator().manual_seed(1)
        ids = torch.full((20, 400), 1000)
        new = varied(ids, torch.ones_like(ids, dtype=torch.bool), 30_000, generator)
        drawn = new[new != 1000]
        assert int((drawn < 2000).sum()) > 0.4 * len(drawn) and int((drawn > 20_000).sum()) > 0

    def test_the_default_dtype_of_torch_does_not_choose_the_words(self, request):
        ids = torch.arange(100, 160)[None].repeat(4, 1)
        usual = varied(ids, ids > 0, 1000, torch.Generator().manual_seed(0))
        request.getfixturevalue("float64_default")
        assert torch.equal(varied(ids, ids > 0, 1000, torch.Generator().manual_seed(0)), usual)

    def test_texts_too_short_to_vary_are_left(self):
        ids = torch.tensor([[5, 6, 7, 8], [5, 0, 0, 0]])
        assert torch.equal(varied(ids, ids > 0, 100, torch.Generator()), ids)


def test_pieces_of_a_batch_share_what_its_texts_share():
    batch = {"input_ids": torch.arange(15).view(5, 3), "position_ids": torch.arange(3)[None]}
    pieces = list(in_pieces(batch, 2))
    assert [len(piece["input_ids"]) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), batch["input_ids"])
    assert all(piece["position_ids"].shape == (1, 3) for piece in pieces)
    assert list(in_pieces(batch, None)) == [batch]
