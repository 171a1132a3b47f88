"""`limit_rank`: models of many types within limits, against plain forwards and float64, and put back to the last bit."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from small_families import small_and_running
from testing_probe import small
from torch import nn
from transformers import AutoModel, LlamaForCausalLM, PreTrainedConfig

from hf_rankattn import (
    RankEncoderConfig,
    RankEncoderModel,
    RankLimit,
    ablate,
    limit_rank,
    measure_attention,
    measure_collapse,
    measure_logits,
    path_terms,
)
from hf_rankattn.limit.heads import HeadLimits
from hf_rankattn.probe.interface import LIMIT


# model types, with the tower of those that have several
KINDS = """
bert distilbert electra albert modernbert xlm-roberta t5:encoder t5:decoder bart:decoder gpt2 opt llama qwen3 mixtral phi3
cohere2 olmo2 gemma2 gemma3_text gpt_oss deepseek_v3 qwen3_next lfm2 falcon_h1 jetmoe vit dinov2 clip:text clip:vision siglip:vision
whisper:encoder wav2vec2
""".split()


def outputs(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [value for value in model(**batch).to_tuple() if torch.is_tensor(value)]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def marks(model: nn.Module) -> list[tuple]:
    """What a limit changes of modules: their configs, entries and hooks."""
    return [
        (id(getattr(module, "config", None)), LIMIT in module.__dict__, len(module._forward_pre_hooks))
        for module in model.modules()
    ]


def llama(**fields) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A decoder with two query heads for each key head, and two texts."""
    return small("llama", hidden=32, **fields), {"input_ids": torch.randint(47, (2, 14))}


def turned(widths) -> HeadLimits:
    """Limits of full width whose bases are rotations, which change nothing but rounding."""
    keys, values = (torch.linalg.qr(torch.randn(widths.groups, width, width)).Q for width in (widths.qk, widths.value))
    shared = widths.heads // widths.groups
    pairs = (keys.repeat_interleave(shared, 0), keys), (values, values.mT.repeat_interleave(shared, 0))
    ranks = [widths.qk] * widths.groups, [widths.value] * widths.groups
    return HeadLimits(widths, *ranks, *pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_limited_and_restored(kind):
    kind, _, tower = kind.partition(":")
    tower = tower or None
    model, batch, reason = small_and_running(kind)
    assert not reason
    whole, before = outputs(model, batch), marks(model)

    limit = limit_rank(model, 2, 3, calibration=batch, tower=tower)
    widths = [head.widths for head in limit.heads]
    limited = outputs(model, batch)
    assert not torch.equal(limited[0], whole[0]) and all(bool(torch.isfinite(part).all()) for part in limited)
    limit.remove()
    assert equal(outputs(model, batch), whole) and marks(model) == before

    full = {"qk_rank": [width.qk for width in widths], "v_head_dim": [width.value for width in widths]}
    with limit_rank(model, **full, calibration=batch, tower=tower):
        assert equal(outputs(model, batch), whole)
    with RankLimit(model, [turned(width) for width in widths], tower):
        for ours, theirs in zip(outputs(model, batch), whole, strict=True):
            assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())
    assert equal(outputs(model, batch), whole) and marks(model) == before


def rotated(states: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions of states (heads, n, w)."""
    half = states.shape[-1] // 2
    angles = np.arange(states.shape[-2])[:, None] * theta ** (-np.arange(half) / half)
    first, second = states[..., :half], states[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_layer_is_what_numpy_computes_in_float64(implementation):
    model, batch = llama(layers=1)
    model.set_attn_implementation(implementation)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[1, 9:] = 0
    limit = limit_rank(model, [[3, 2]], [[4, 6]], calibration={**batch, "attention_mask": mask})
    attention, caught = model.layers[0].self_attn, []
    attention.register_forward_hook(
        lambda module, args, kwargs, output: caught.append((kwargs["hidden_states"], output[0])), with_kwargs=True
    )
    outputs(model, {**batch, "attention_mask": mask})
    (states, found), (head,) = caught[0], limit.heads
    weights = {name: weight.detach().double().numpy() for name, weight in attention.named_parameters()}
    maps = {name: weight.double().numpy() for name, weight in head.named_parameters()}
    theta = model.config.rope_parameters["rope_theta"]
    for text, length in ((0, 14), (1, 9)):
        x = states[text, :length].double().numpy()
        q, k, v = ((x @ weights[f"{name}_proj.weight"].T).reshape(length, -1, 8).transpose(1, 0, 2) for name in "qkv")
        mixed = []
        for number, query in enumerate(rotated(q, theta)):
            group = number // 2
            r, s = (3, 2)[group], (4, 6)[group]
            assert not maps["key"][group][:, r:].any() and not maps["value"][group][:, s:].any()
            key = rotated(k, theta)[group] @ maps["key"][group][:, :r]
            logits = query @ maps["query"][number][:, :r] @ key.T / math.sqrt(8)
            logits[np.triu_indices(length, 1)] = -np.inf
            attended = np.exp(logits - logits.max(-1, keepdims=True))
            attended /= attended.sum(-1, keepdims=True)
            mixed.append(attended @ v[group] @ maps["value"][group][:, :s] @ maps["output"][number][:s])
        expected = np.concatenate(mixed, -1) @ weights["o_proj.weight"].T
        np.testing.assert_allclose(found[text, :length].double().numpy(), expected, atol=2e-6)


class TestRestored:
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_after_what_happens_in_the_block(self, error):
        model, batch = llama()
        whole, before = outputs(model, batch), marks(model)
        with pytest.raises(error), limit_rank(model, 2, calibration=batch):
            assert not equal(outputs(model, batch), whole)
            raise error
        assert equal(outputs(model, batch), whole) and marks(model) == before

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_after_what_happens_in_the_calibration(self, error):
        def stop(*_):
            raise error

        for kind in ("llama", "albert"):  # albert shares one module, which counts its layers with hooks
            model, batch = small(kind), {"input_ids": torch.randint(47, (2, 14))}
            whole, before = outputs(model, batch), marks(model)
            with pytest.raises(error):
                limit_rank(model, 2, calibration=batch, progress=stop)
            handle = model.register_forward_hook(stop)
            with pytest.raises(error):
                limit_rank(model, 2, calibration=batch)
            handle.remove()
            assert equal(outputs(model, batch), whole) and marks(model) == before

    def test_attached_again_paused_and_in_training_mode(self):
        model, batch = llama()
        model.train()
        limit = limit_rank(model, 2, calibration=batch)
        assert model.training
        model.eval()
        limited = outputs(model, batch)
        with limit.paused():
            whole = outputs(model, batch)
        assert equal(outputs(model, batch), limited) and not equal(limited, whole)
        limit.remove()
        limit.remove()
        assert equal(outputs(model, batch), whole)
        with limit:
            assert equal(outputs(model, batch), limited)
        assert equal(outputs(model, batch), whole)

    def test_the_weights_and_the_config_that_are_saved_are_those_of_the_model(self, tmp_path):
        model, batch = llama()
        whole, names = outputs(model, batch), set(model.state_dict())
        with limit_rank(model, 2, calibration=batch):
            assert set(model.state_dict()) == names
            model.save_pretrained(tmp_path)
        assert equal(outputs(AutoModel.from_pretrained(tmp_path).eval(), batch), whole)


class TestProbesSeeTheLimitedModel:
    def test_logits_have_at_most_the_limited_rank(self):
        model, batch = llama()
        limit = limit_rank(model, [3, 2, 8], calibration=batch)
        table = measure_logits(model, batch)
        ranks = table[table.metric == "numerical_rank"].groupby("layer").value.max()
        assert ranks[0] <= 3 and ranks[1] <= 2 and 3 < ranks[2] <= 8
        limit.remove()
        table = measure_logits(model, batch)
        assert (table[table.metric == "numerical_rank"].groupby("layer").value.max() > 3).all()

    def test_maps_and_states_are_those_of_the_limited_model(self):
        model, batch = llama()
        model.set_attn_implementation("eager")
        with limit_rank(model, 2, 3, calibration=batch):
            with torch.no_grad():
                output = model(**batch, output_attentions=True, output_hidden_states=True)
            maps = measure_attention(model, batch)
            states = measure_collapse(model, batch, ["transformer"])
            with ablate(model, mlp=True):
                cut = outputs(model, batch)
        own = maps[(maps.metric == "stable_rank") & (maps.layer == 1) & (maps["head"] == 2) & (maps.example == 1)]
        singular = torch.linalg.svdvals(output.attentions[1][1, 2].double())
        assert own.value.item() == pytest.approx(float(singular.square().sum() / singular[0] ** 2), rel=1e-4)
        x = output.hidden_states[2][1].double().numpy()
        rows = states[(states.metric == "relative_residual") & (states.layer == 2) & (states.example == 1)]
        norm = [np.sqrt(np.abs(y).sum(1).max() * np.abs(y).sum(0).max()) for y in (x - x.mean(0), x)]
        assert rows.value.item() == pytest.approx(norm[0] / norm[1], rel=1e-4)
        with ablate(model, mlp=True):
            assert not equal(outputs(model, batch), cut)

    def test_paths_that_are_made_of_whole_weights_are_refused(self):
        model, batch = llama()
        with limit_rank(model, 2, 3, calibration=batch), pytest.raises(ValueError, match="limit"):
            path_terms(model, batch)


class TestBadInput:
    @pytest.mark.parametrize(
        "options, reason",
        [
            ({}, "give `qk_rank`, `v_head_dim` or both"),
            ({"qk_rank": 0}, "`qk_rank` must be an integer of at least 1.*got 0"),
            ({"qk_rank": True}, "got True"),
            ({"qk_rank": np.array([2, 2, 2])}, "a list with one for each layer.*got array"),
            ({"qk_rank": 9}, "`qk_rank` is 9 in layer 0, whose heads have the width 8"),
            ({"v_head_dim": [2, 2, 9]}, "`v_head_dim` is 9 in layer 2"),
            ({"qk_rank": [2, 2]}, "one entry for each of the 3 layers with attention, got 2"),
            ({"qk_rank": [2, [2, 3, 4], 2]}, "3 widths for layer 1, which has 2 key heads"),
            ({"qk_rank": 2, "objective": "best"}, "`objective` must be one of"),
        ],
    )
    def test_widths(self, options, reason):
        model, batch = llama()
        before = marks(model)
        with pytest.raises(ValueError, match=reason):
            limit_rank(model, **options, calibration=batch)
        assert marks(model) == before

    def test_models_whose_attention_is_not_on_the_interface(self):
        hard = RankEncoderConfig(input_dim=8, hidden_size=8, num_attention_heads=2, attention="hardmax")
        encoder = RankEncoderModel(hard).eval()
        encoder.set_attn_implementation("eager")
        bloom, words, reason = small_and_running("bloom")
        assert not reason
        for model, batch in (
            (small("xlnet"), {"input_ids": torch.randint(47, (2, 14))}),
            (encoder, {"points": torch.randn(2, 5, 8)}),
            (bloom, words),
        ):
            before = marks(model)
            with pytest.raises(ValueError, match="transformers' attention interface"):
                limit_rank(model, 2, calibration=batch)
            assert marks(model) == before

    def test_a_limit_within_a_limit(self):
        model, batch = llama()
        with limit_rank(model, 2, calibration=batch):
            limited = outputs(model, batch)
            with pytest.raises(ValueError, match="limits do not nest"):
                limit_rank(model, 2, calibration=batch)
            assert equal(outputs(model, batch), limited)

    def test_calibration(self):
        model, batch = llama()
        for calibration, reason in (
            ([], "there is no batch"),
            ({**batch, "attention_mask": torch.zeros(2, 14, dtype=torch.long)}, "token|padding"),
            ([batch, {**batch, "attention_mask": torch.ones(2, 14, dtype=torch.long)}], "same entries"),
            ({"input_ids": torch.full((1, 3), 99)}, "0 to 46"),
        ):
            with pytest.raises(ValueError, match=reason):
                limit_rank(model, 2, calibration=calibration)
        with torch.no_grad():
            model.layers[1].self_attn.q_proj.weight[0, 0] = math.nan
        with pytest.raises(ValueError, match="NaN or Inf"):
            limit_rank(model, 2, calibration=batch)

    def test_a_limit_of_another_model(self):
        model, batch = llama()
        limit = limit_rank(model, 2, calibration=batch)
        other = small("llama", hidden=64)
        with RankLimit(other, limit.heads), pytest.raises(ValueError, match="made for another model"):
            outputs(other, batch)
        with pytest.raises(ValueError, match="for 3 layers with attention, and the model has 2"):
            RankLimit(small("llama", layers=2), limit.heads).attach()


class TestTraining:
    def test_only_when_it_is_asked_for(self):
        model, batch = llama()
        limit = limit_rank(model, 2, calibration=batch)
        model.train()
        with pytest.raises(ValueError, match="limit.distil.*requires_grad_"):
            model(**batch)
        limit.requires_grad_(True)
        model(**batch).last_hidden_state.square().sum().backward()
        assert all(bool(weight.grad.any()) for weight in limit.parameters() if weight.shape[-1] > 1)

    def test_gradients_under_checkpointing(self):
        model, batch = llama()
        limit = limit_rank(model, 2, 3, calibration=batch).requires_grad_(True)
        model.train()

        def gradients() -> list[torch.Tensor]:
            limit.zero_grad()
            model(**batch).last_hidden_state.square().mul(torch.arange(32.0)).sum().backward()
            return [weight.grad.clone() for weight in limit.parameters()]

        expected = gradients()
        model.gradient_checkpointing_enable()
        for ours, theirs in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_distil_brings_the_limited_model_nearer_and_changes_no_weight(self):
        model = LlamaForCausalLM(small("llama", hidden=32).config).eval()
        model.gradient_checkpointing_enable()
        with torch.no_grad():
            model.lm_head.weight *= 20
        batches = [{"input_ids": torch.randint(47, (4, 14))} for _ in range(4)]
        weights = copy.deepcopy(model.state_dict())
        limit, losses = limit_rank(model, 2, 3, calibration=batches[0]), []
        limit.distil(batches, steps=40, progress=lambda step, loss: losses.append(loss))
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
        assert all(weight.requires_grad for weight in model.parameters()) and not limit.heads[0].trainable


class TestElsewhere:
    def test_torch_compile(self):
        model, batch = llama()
        whole = outputs(model, batch)
        for compiled in (torch.compile(model, backend="eager"), torch.compile(model, backend="eager", fullgraph=True)):
            assert equal(outputs(compiled, batch), whole)
            with limit_rank(compiled, 2, 3, calibration=batch):
                assert equal(outputs(compiled, batch), outputs(model, batch))
                assert not equal(outputs(compiled, batch), whole)
            assert equal(outputs(compiled, batch), whole)
        torch.compiler.reset()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype):
        model, batch = llama()
        whole = limit_rank(model, 4, 6, calibration=batch)
        expected = outputs(model, batch)[0]
        whole.remove()
        model.to(dtype)
        with limit_rank(model, 4, 6, calibration=batch):
            found = outputs(model, batch)[0]
        assert found.dtype == dtype and nn.functional.cosine_similarity(found.float(), expected, dim=-1).mean() > 0.99

    @pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
    def test_offloaded_weights(self, offload, tmp_path):
        model, batch = llama()
        with limit_rank(model, 2, 3, calibration=batch) as limit:
            expected = outputs(model, batch)
            limit.save_pretrained(tmp_path / "limit")
        if offload is disk_offload:
            disk_offload(model, tmp_path / "weights", torch.device("cpu"))
        else:
            cpu_offload(model, torch.device("cpu"))
        with RankLimit.from_pretrained(model, tmp_path / "limit"):
            assert equal(outputs(model, batch), expected)
        with limit_rank(model, 2, 3, calibration=batch):
            assert equal(outputs(model, batch), expected)

    def test_a_copy_made_inside_keeps_the_limit(self):
        model, batch = llama()
        with limit_rank(model, 2, 3, calibration=batch):
            limited = outputs(model, batch)
            copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert not equal(outputs(model, batch), limited)
        assert all(equal(outputs(made, batch), limited) for made in copies)

    def test_configs_of_modules_are_shared_outside_of_the_block_only(self):
        model, batch = llama()
        config = model.layers[0].self_attn.config
        assert config is model.config
        with limit_rank(model, 2, calibration=batch):
            inner: PreTrainedConfig = model.layers[0].self_attn.config
            assert inner is not config and config._attn_implementation == "sdpa"
            model.set_attn_implementation("eager")
            eager = outputs(model, batch)
            model.set_attn_implementation("sdpa")
            torch.testing.assert_close(eager, outputs(model, batch))
        assert model.layers[0].self_attn.config is config


class TestRankEncoder:
    def test_an_eager_one_is_limited_and_measured(self):
        config = RankEncoderConfig(input_dim=16, hidden_size=16, num_attention_heads=2, num_hidden_layers=2)
        encoder, batch = RankEncoderModel(config).eval(), {"points": torch.randn(3, 12, 16)}
        with pytest.raises(ValueError, match="set_attn_implementation"):
            limit_rank(encoder, 2, calibration=batch)
        encoder.set_attn_implementation("eager")
        with torch.no_grad():
            whole = encoder(**batch).last_hidden_state
            with limit_rank(encoder, 8, 8, calibration=batch):
                assert torch.equal(encoder(**batch).last_hidden_state, whole)
            with limit_rank(encoder, 2, calibration=batch):
                table = measure_logits(encoder, batch)
        assert set(table[table.metric == "numerical_rank"].value) == {2.0}
