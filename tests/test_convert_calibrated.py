"""Conversion with calibration texts against brute force over all their logits, padded batches included."""

import pytest
import torch
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, XLNET, tiny_inputs
from testing_convert import difference, entries, plain_inputs, trained_like

from hf_rankattn import convert_rank


def pooled_error(family, model, converted, batch, rank):
    """The objective by brute force in the first layer: lost energy of every head, and its Eckart-Young bound.

    All real queries stand against all keys, each row of keys centred on itself; nothing here uses moments.
    """
    caught = []
    attention, old = entries(model)
    _, new = entries(converted)
    handle = attention.register_forward_pre_hook(
        lambda m, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
    )
    model(**batch)
    handle.remove()
    states = caught[0][0][0] if caught[0][0] else caught[0][1]["hidden_states"]
    mask = batch["attention_mask"].bool()
    errors, bounds = [], []
    for head in range(4):
        queries, keys = {"old": [], "new": []}, {"old": [], "new": []}
        for name, tensors, width in (("old", old, 8), ("new", new, rank)):
            for example in range(len(mask)):
                if family is XLNET:
                    x, r = states[:, example][mask[example]], caught[0][0][4][:, example].double()
                    n, places = len(mask[0]), mask[example].nonzero()[:, 0]
                    q = x @ tensors["q"][:, head]
                    rows = []
                    for i in places:
                        content, offset = x @ tensors["k"][:, head], r[n - i + places] @ tensors["r"][:, head]
                        bias = content @ tensors["r_w_bias"][head] + offset @ tensors["r_r_bias"][head]
                        block = torch.cat([content + offset, bias[:, None]], dim=1)
                        rows.append((block - block.mean(0)) / len(places) ** 0.5)
                    queries[name].append(torch.cat([q, torch.ones(len(q), 1)], dim=1))
                    keys[name].append(torch.cat(rows))
                else:
                    x = states[example][mask[example]]
                    rows = slice(head * width, (head + 1) * width)
                    q, k = (x @ tensors[f"{n}.weight"][rows].T + tensors[f"{n}.bias"][rows] for n in ("query", "key"))
                    queries[name].append(q)
                    keys[name].append(k - k.mean(0))
        logits = {name: torch.cat(queries[name]) @ torch.cat(keys[name]).T for name in queries}
        errors.append((logits["old"] - logits["new"]).square().sum())
        bounds.append(torch.linalg.svdvals(logits["old"])[rank:].square().sum())
    return torch.stack(errors), torch.stack(bounds)


class TestCalibrated:
    @pytest.mark.parametrize("family", [BERT, XLNET], ids=["Bert", "XLNet"])
    def test_reaches_eckart_young_on_padded_batches(self, family):
        model, batch = trained_like(family), plain_inputs(family)
        converted = convert_rank(model, 3, calibration=batch)
        errors, bounds = pooled_error(family, model, converted, batch, 3)
        torch.testing.assert_close(errors, bounds, rtol=1e-6, atol=0)
        worse, _ = pooled_error(family, model, convert_rank(model, 3), batch, 3)
        assert bool((worse > errors).all())

    def test_albert_sums_over_the_applications_of_a_group(self):
        model, batch = trained_like(ALBERT, num_hidden_groups=1, num_hidden_layers=3), plain_inputs(ALBERT)
        converted = convert_rank(model, 3, calibration=batch)
        caught = []
        attention, old = entries(model)
        handle = attention.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
        model(**batch)
        handle.remove()
        assert len(caught) == 3
        _, new = entries(converted)
        mask = batch["attention_mask"].bool()
        for head in range(4):
            logits = []
            for tensors, width in ((old, 8), (new, 3)):
                rows = slice(head * width, (head + 1) * width)
                q, k = [], []
                for states in caught:
                    for x in (states[i][mask[i]] for i in range(len(mask))):
                        q.append(x @ tensors["query.weight"][rows].T + tensors["query.bias"][rows])
                        k.append((x - x.mean(0)) @ tensors["key.weight"][rows].T)
                logits.append(torch.cat(q) @ torch.cat(k).T)
            tail = torch.linalg.svdvals(logits[0])[3:].square().sum()
            torch.testing.assert_close((logits[0] - logits[1]).square().sum(), tail, rtol=1e-6, atol=0)

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

    def test_each_layer_is_calibrated_on_the_model_converted_so_far(self):
        model, batch = trained_like(BERT), plain_inputs(BERT)
        together = convert_rank(model, 3, calibration=batch)
        step = model
        for layer in range(3):
            ranks = [3] * (layer + 1) + [8] * (2 - layer)
            step = convert_rank(step, ranks, calibration=batch)
        assert difference(step, together, batch) < 1e-6

    def test_segments_count_in_xlnet_when_the_texts_have_them(self):
        model, batch = trained_like(XLNET), tiny_inputs(XLNET, "Model")
        with_types = convert_rank(model, 3, calibration=batch)
        without = convert_rank(model, 3, calibration=plain_inputs(XLNET))
        errors = [
            (m(**batch).last_hidden_state - model(**batch).last_hidden_state).square().sum()
            for m in (with_types, without)
        ]
        assert difference(with_types, without, batch) > 1e-3 and errors[0] < errors[1]

    def test_causal_rows_are_centred_on_what_they_see(self):
        model = trained_like(BERT, "LMHeadModel", is_decoder=True, num_hidden_layers=1)
        batch = {"input_ids": plain_inputs(BERT)["input_ids"]}
        converted = convert_rank(model, 3, calibration=batch)
        _, old = entries(model)
        _, new = entries(converted)
        states = model.bert.embeddings(batch["input_ids"])
        n = states.shape[1]
        for head in range(4):
            logits = []
            for tensors, width in ((old, 8), (new, 3)):
                rows = slice(head * width, (head + 1) * width)
                q = states.flatten(0, 1) @ tensors["query.weight"][rows].T + tensors["query.bias"][rows]
                k = states @ tensors["key.weight"][rows].T
                seen = [(x[: i + 1] - x[: i + 1].mean(0)) / (i + 1) ** 0.5 for x in k for i in range(n)]
                logits.append(q @ torch.cat(seen).T)
            tail = torch.linalg.svdvals(logits[0])[3:].square().sum()
            torch.testing.assert_close((logits[0] - logits[1]).square().sum(), tail, rtol=1e-6, atol=0)

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
