"""Limits that would be wrong without an error: stale caches, other configs, attention sinks, padding, budgets that cannot be spent."""

import copy

import numpy as np
import pytest
import torch
from test_limit_budget import BATCH, IDS, decoder
from transformers import BertConfig, BertForQuestionAnswering, GptOssConfig, GptOssModel, LlamaConfig, LlamaForCausalLM

from hf_rankattn import RankCache, limit_rank, measure_need
from hf_rankattn.limit.attaching import entered
from hf_rankattn.limit.damage import add_slopes
from hf_rankattn.limit.fitting import Seen
from hf_rankattn.limit.limiting import slopings_of
from hf_rankattn.limit.quality import NextTokenPerplexity


class TestCache:
    def test_a_cache_from_before_training_is_refused(self):
        model = decoder()
        with limit_rank(model, 4, 4, calibration=BATCH) as limit:
            cache = RankCache(model)
            with torch.no_grad():
                model(IDS[:, :12], past_key_values=cache)
            limit.distil([{"input_ids": IDS}], 2)
            with torch.no_grad(), pytest.raises(ValueError, match="trained"):
                model(IDS[:, 12:], past_key_values=cache)

    def test_a_pause_keeps_the_cache_and_a_shallow_copy_has_room_of_its_own(self):
        model = decoder()
        with torch.no_grad(), limit_rank(model, 4, 4, calibration=BATCH) as limit:
            whole = model(IDS).logits
            cache = RankCache(model)
            model(IDS[:, :12], past_key_values=cache)
            with limit.paused():
                pass
            branch = copy.copy(cache)
            branch.layers = [copy.copy(layer) for layer in cache.layers]
            rows = model(IDS[:, 12:], past_key_values=cache).logits
            model(IDS[:, :4], past_key_values=branch)
            again = model(IDS[:, :1], past_key_values=cache).logits
            longer = model(torch.cat([IDS, IDS[:, :1]], dim=1)).logits[:, -1:]
        assert torch.allclose(rows, whole[:, 12:], atol=1e-4) and torch.allclose(again, longer, atol=1e-4)


class TestFits:
    def test_sinks_take_their_share_of_attention(self):
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        }
        config = GptOssConfig(**sizes, num_hidden_layers=1, vocab_size=50, num_local_experts=2, num_experts_per_tok=1)
        model = GptOssModel(config).eval()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model.layers[0].self_attn.sinks.fill_(3.0)
            maps = model(IDS, output_attentions=True).attentions[0]
        caught = []
        of_call = Seen.of_call
        try:
            Seen.of_call = classmethod(lambda cls, *call: caught.append(of_call(*call)) or caught[0])
            limit_rank(model, 4, calibration={"input_ids": IDS}).remove()
        finally:
            Seen.of_call = of_call
        for group in range(2):
            assert torch.allclose(caught[0].maps(0, group), maps[0, 2 * group : 2 * group + 2], atol=1e-5)
        assert float(maps.sum(-1).max()) < 0.9

    def test_every_width_of_wide_values_has_a_damage(self):
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)).eval()
        slopings = slopings_of(model, {"input_ids": IDS}, None)
        with entered(model, slopings):
            add_slopes(model, slopings, {"input_ids": IDS}, seed=0)
        curves = [head.curves()[1] for one in slopings for head in one.key_heads]
        assert all(len(curve) == 64 and np.isfinite(curve).all() for curve in curves)
        with limit_rank(model, v_head_dim="auto", mean_rank=4, calibration={"input_ids": IDS}) as limit:
            assert sum(width for head in limit.heads for width in head.value_widths) == 4 * 4

    def test_the_basis_of_the_keys_is_orthonormal(self):
        with limit_rank(decoder(), 4, calibration=BATCH) as limit:
            for head in limit.heads:
                assert torch.allclose(head.key.mT @ head.key, torch.eye(4).expand(2, -1, -1), atol=1e-5)

    def test_a_layer_that_stays_whole_does_not_stop_training(self):
        model = decoder()
        with limit_rank(model, [4, 8, 8], calibration=BATCH) as limit:
            limit.requires_grad_(True)
            model.train()
            model(**BATCH).logits.sum().backward()
            assert all(weight.grad is not None for weight in limit.parameters())


class TestRefused:
    def test_a_budget_above_the_heads(self):
        with pytest.raises(ValueError, match="the heads have the width 8"):
            limit_rank(decoder(), "auto", mean_rank=9, calibration=BATCH)

    def test_an_output_without_logits_or_states(self):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
        model = BertForQuestionAnswering(BertConfig(**sizes, vocab_size=50)).eval()
        with pytest.raises(ValueError, match="neither logits nor last hidden states"):
            limit_rank(model, "auto", mean_rank=4, calibration=BATCH)

    def test_nothing_to_train(self):
        with (
            limit_rank(decoder(), 8, 8, calibration=BATCH) as limit,
            pytest.raises(ValueError, match="nothing to train"),
        ):
            limit.distil([BATCH], 1)

    def test_training_that_is_stopped_leaves_the_projections(self):
        model = decoder()
        with limit_rank(model, 4, calibration=BATCH) as limit:
            before = [weight.clone() for weight in limit.parameters()]

            def stop(step, loss):
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                limit.distil([BATCH], 3, progress=stop)
            assert all(map(torch.equal, before, limit.parameters())) and "distil_steps" not in limit.facts


class TestNeed:
    def test_padding_on_the_left_changes_no_perplexity(self):
        model = decoder()
        ids, mask = IDS[:1], torch.ones_like(IDS[:1])
        pad = torch.zeros(1, 5, dtype=torch.long)
        left = {"input_ids": torch.cat([pad, ids], 1), "attention_mask": torch.cat([pad, mask], 1)}
        right = {"input_ids": torch.cat([ids, pad], 1), "attention_mask": torch.cat([mask, pad], 1)}
        found = []
        for batch in ({"input_ids": ids, "attention_mask": mask}, left, right):
            quality = NextTokenPerplexity(model, [batch])
            with torch.no_grad():
                found.append(float(quality.read(model(**batch), quality.batches[0]).mean()))
        assert np.allclose(found, found[0], rtol=1e-5)

    def test_another_config_does_not_use_old_cells(self, tmp_path):
        model = decoder()
        batch = {"input_ids": IDS}
        measure_need(model, batch, calibration=batch, widths=[4], folder=tmp_path / "need")
        model.config.rms_norm_eps = 1e-2
        with pytest.raises(ValueError, match="other settings .config"):
            measure_need(model, batch, calibration=batch, widths=[4], folder=tmp_path / "need")
