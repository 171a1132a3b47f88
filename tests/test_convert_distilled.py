"""Distillation after conversion, and the texts that it reads."""

from functools import partial
from itertools import islice

import pytest
import torch
from testing_common import BERT, FAMILIES, FAMILY_IDS
from testing_convert import plain_inputs, trained_like

from hf_rankattn import convert_rank
from hf_rankattn.convert.calibration import in_pieces
from hf_rankattn.convert.distil import distil, endless, state_loss
from hf_rankattn.files.batches import EndlessBatches
from hf_rankattn.files.texts import without_overlap


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
        names = ("query.weight", "key.weight", ".q", ".k", ".r", "bias", "seg_embed", "q_lin.weight", "k_lin.weight")
        assert changed and all(n.endswith((*names, "c_attn.weight")) and "att" in n for n in changed)
        assert not any(n.endswith(("value.bias", "dense.bias")) for n in changed)
        assert all(weight.requires_grad and weight.grad is None for weight in distilled.parameters())

    def test_values_are_trained_where_they_were_cut_and_nothing_is_where_nothing_was(self):
        """The layers of the second model have narrow queries, narrow values, and neither."""
        teacher = BERT.rank("Model")(BERT.rank_config())
        layers = {
            0: {"qk_rank": 3, "v_head_dim": 8},
            1: {"qk_rank": 8, "v_head_dim": 3},
            2: {"qk_rank": 8, "v_head_dim": 8},
        }
        student = BERT.rank("Model")(BERT.rank_config(per_layer_config=layers))
        before = {name: weight.clone() for name, weight in student.named_parameters()}
        distil(student, teacher, plain_inputs(BERT), 2)
        changed = {name for name, weight in student.named_parameters() if not torch.equal(weight, before[name])}
        sides = {f"self.{side}.{kind}" for side in ("query", "key") for kind in ("weight", "bias")}
        values = {"self.value.weight", "self.value.bias", "output.dense.weight"}
        parts = [f"encoder.layer.0.attention.{name}" for name in sides]
        assert changed == {*parts, *(f"encoder.layer.1.attention.{name}" for name in values)}

    def test_the_loss_is_the_error_of_tokens_and_of_the_means_of_texts(self):
        """Held against loops over the real tokens; states of padding, here large, do not count."""
        generator = torch.Generator().manual_seed(0)
        ours, theirs = (torch.randn(3, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        lengths = [5, 2, 3]
        real = torch.arange(5) < torch.tensor(lengths)[:, None]
        pairs = [(a[:n], b[:n]) for a, b, n in zip(ours, theirs, lengths, strict=True)]
        tokens = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
        means = [(a.mean(0), b.mean(0)) for a, b in pairs]
        texts = sum((a - b).square().sum() for a, b in means) / sum(b.square().sum() for _, b in means)
        ours[~real], theirs[~real] = 1e3, -1e3
        assert float(state_loss(ours, theirs, real)) == pytest.approx(float(tokens + texts), rel=1e-5)

    def test_the_seed_chooses_the_texts_and_nothing_else_does(self):
        model, batch = trained_like(BERT).float(), plain_inputs(BERT)
        texts = [{name: value[place : place + 1] for name, value in batch.items()} for place in range(3)]
        weights = []
        for seed in (4, 4, 5):
            state = torch.get_rng_state()
            new = convert_rank(model, 3, calibration=texts, distil_steps=4, seed=seed)
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


class TestTexts:
    def test_a_list_is_read_in_another_order_on_each_pass_and_every_batch_once(self):
        model = BERT.stock("Model")(BERT.stock_config())
        batches = [{"input_ids": torch.full((1, 2), place)} for place in range(9)]

        def passes(seed):
            read = [int(batch["input_ids"][0, 0]) for batch in islice(endless(model, batches, seed), 27)]
            return [read[start : start + 9] for start in (0, 9, 18)]

        assert all(sorted(each) == list(range(9)) for each in passes(1))
        assert len({tuple(each) for each in passes(1)}) == 3 and passes(1) == passes(1) != passes(2)

    def test_the_batches_of_distillation_are_those_given_and_not_the_calibration(self):
        model, batch = trained_like(BERT).float(), plain_inputs(BERT)
        other = {**batch, "input_ids": batch["input_ids"].flip(0)}
        cut = partial(convert_rank, model, 3, calibration=batch, distil_steps=3)
        given, single = cut(distil_batches=[other]), cut(distil_batches=iter([other] * 3))
        assert torch.equal(given(**batch).last_hidden_state, single(**batch).last_hidden_state)
        assert not torch.equal(given(**batch).last_hidden_state, cut()(**batch).last_hidden_state)
        with pytest.raises(ValueError, match="ended before the last step"):
            cut(distil_batches=iter([other] * 2))
        with pytest.raises(ValueError, match="give `distil_steps` as well"):
            convert_rank(model, 3, calibration=batch, distil_batches=[other])

    def test_texts_are_tokenised_when_they_are_read(self):
        """Two of a hundred thousand texts, so that memory does not grow with the file."""
        asked = []

        def tokenizer(texts, **options):
            asked.extend(texts)
            return {"input_ids": torch.tensor([[int(text)] for text in texts])}

        stream = EndlessBatches(tokenizer, [str(place) for place in range(100_000)], 128, seed=0, size=2)
        first = next(iter(stream))["input_ids"]
        assert len(asked) == 2 and torch.equal(next(iter(stream))["input_ids"], first), "each reading begins anew"
        few = EndlessBatches(tokenizer, ["1", "2", "3"], 128, seed=0, size=2)
        read = torch.cat([batch["input_ids"][:, 0] for batch in islice(few, 3)]).tolist()
        assert sorted(read[:3]) == sorted(read[3:]) == [1, 2, 3], "batches go on into the next pass"

    def test_judging_texts_and_parts_of_them_are_not_trained_on(self):
        judged = ["one two three four five six seven eight nine ten", "a short one"]
        texts = [
            "so he said: two Three four five  six seven eight nine!",
            "two three four five",
            "A short one",
            "other",
        ]
        assert without_overlap(texts, judged, words=7) == ["two three four five", "other"]


def test_pieces_of_a_batch_share_what_its_texts_share():
    batch = {"input_ids": torch.arange(15).view(5, 3), "position_ids": torch.arange(3)[None]}
    pieces = list(in_pieces(batch, 2))
    assert [len(piece["input_ids"]) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), batch["input_ids"])
    assert all(piece["position_ids"].shape == (1, 3) for piece in pieces)
    assert list(in_pieces(batch, None)) == [batch]
