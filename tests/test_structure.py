"""Models without a row in the table: their layers, skips and maps are read while they run, against layers written by hand."""

from contextlib import contextmanager

import pandas as pd
import pytest
import torch
from small_families import livened, small_and_running
from testing_probe import hook_counts
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformers import AutoConfig, AutoModel

from hf_rankattn import ablate, measure_attention, measure_collapse, measure_logits, measure_weights, relative_residual
from hf_rankattn.families.architectures import attending_layers, base_of, layers_of
from hf_rankattn.families.structure import choosing_tower, towers_of
from hf_rankattn.measure import spectral_metrics
from hf_rankattn.probe.batches import take_tower
from hf_rankattn.probe.interface import implementation


IDS = {"input_ids": torch.arange(3, 27).view(2, 12)}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
}
VARIANTS = {
    "san": {"attention_skip": True, "mlp": True},
    "san+mlp": {"attention_skip": True},
    "san+skip": {"mlp": True},
    "mlp_skip": {"mlp_skip": True},
    "transformer": {},
}
# the lists of layers of a type, after its name where there are several
ARRANGEMENTS = (
    "llama olmo2 gemma2 cohere phi opt mixtral dinov2 jamba qwen3_next gpt_neox falcon bloom roberta-prelayernorm doge "
    "t5:encoder t5:decoder bart:encoder bart:decoder whisper:encoder whisper:decoder clip:text clip:vision"
).split()
ONLY_MAPS = ("falcon", "bloom", "t5")
OWN_SIZES = {
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48},
}


def float64(model_type):
    sizes = OWN_SIZES.get(model_type, SIZES) | {"vocab_size": 99, "pad_token_id": 0}
    return livened(AutoModel.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float64).eval())


def arguments_of(model, batch, module):
    """The arguments besides the states that a layer gives to its attention."""
    seen = {}
    handle = module.register_forward_pre_hook(lambda m, args, kwargs: seen.update(kwargs), with_kwargs=True)
    model(**batch)
    handle.remove()
    return {name: value for name, value in seen.items() if name != "hidden_states"}


# by model type: the list of layers, then attention, the norms before and after it, the MLP, the norms before and after it
BY_HAND = {
    "llama": "layers self_attn input_layernorm - mlp post_attention_layernorm -",
    "gpt2": "h attn ln_1 - mlp ln_2 -",
    "gpt_neox": "layers attention input_layernorm - mlp post_attention_layernorm -",
    "gemma2": "layers self_attn input_layernorm post_attention_layernorm "
    "mlp pre_feedforward_layernorm post_feedforward_layernorm",
    "t5": "decoder.block layer.0.SelfAttention layer.0.layer_norm - layer.2.DenseReluDense layer.2.layer_norm -",
}


def states_by_hand(model_type, model, batch, removed, states):
    """The states after each layer without some parts, from the modules of the layers."""
    path, *names = BY_HAND[model_type].split()
    for layer in model.get_submodule(path):
        parts = [nn.Identity() if name == "-" else layer.get_submodule(name) for name in names]
        attention, before, after, mlp, mlp_before, mlp_after = parts
        read, added = states, after(attention(before(states), **arguments_of(model, batch, attention))[0])
        states = added if "attention_skip" in removed else states + added
        if model_type == "t5":
            cross = layer.layer[1]
            given = arguments_of(model, batch, cross.EncDecAttention)
            states = states + cross.EncDecAttention(cross.layer_norm(states), **given)[0]
        if "mlp" not in removed:
            update = mlp_after(mlp(mlp_before(read if model_type == "gpt_neox" else states)))
            states = update if "mlp_skip" in removed else states + update
        yield states


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_type", BY_HAND)
def test_variants_against_layers_written_by_hand(model_type, variant):
    model, removed, seen = float64(model_type), VARIANTS[variant], []
    batch = IDS | {"use_cache": False}
    if model_type == "t5":
        batch["decoder_input_ids"] = IDS["input_ids"][:, :10]
    with torch.no_grad(), choosing_tower("decoder" if model_type == "t5" else None):
        if model_type == "gpt_neox" and variant == "mlp_skip":
            with pytest.raises(ValueError, match="share one skip connection"), ablate(model, **removed):
                model(**batch)
            return
        layers = layers_of(model)
        handles = [layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))]
        handles += [layer.register_forward_hook(lambda m, args, out: seen.append(first_of(out))) for layer in layers]
        with ablate(model, **removed):
            model(**batch)
        for handle in handles:
            handle.remove()
        expected = list(states_by_hand(model_type, model, batch, removed, seen[0]))
    assert len(expected) == 2
    for found, states in zip(seen[1:], expected, strict=True):
        torch.testing.assert_close(found, states, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def built():
    cache = {}

    def build(model_type):
        if model_type not in cache:
            model, batch, reason = small_and_running(model_type)
            assert batch is not None, reason
            cache[model_type] = model, batch
        return cache[model_type]

    return build


@pytest.mark.parametrize("model_type, tower", [name.partition(":")[::2] for name in ARRANGEMENTS], ids=ARRANGEMENTS)
class TestArrangements:
    def test_residuals_maps_and_logits(self, built, model_type, tower):
        model, batch = built(model_type)
        tower = tower or None
        table = measure_collapse(model, batch, tower=tower)
        assert table.value.notna().all() and set(table.variant) == set(VARIANTS) - {"mlp_skip"}
        end = table[(table.metric == "relative_residual") & (table.layer == table.layer.max()) & (table.example == 0)]
        assert end.value.nunique() == 4, "two variants are the same"
        with choosing_tower(tower):
            attending, depth = attending_layers(model), len(layers_of(model))
        assert set(table.layer) == set(range(depth + 1))
        assert set(measure_attention(model, batch, tower=tower).layer) == set(attending)
        if model_type in ONLY_MAPS:
            with pytest.raises(ValueError, match="logits cannot|queries and keys cannot"):
                measure_logits(model, batch, tower=tower)
        else:
            assert set(measure_logits(model, batch, tower=tower).layer) == set(attending)

    def test_restored_after_an_exception_and_single_layers(self, built, model_type, tower):
        model, batch = built(model_type)
        with choosing_tower(tower or None), torch.no_grad():
            before, hooks = first_of(model(**batch)), hook_counts(model)
            with (
                pytest.raises(RuntimeError, match="on purpose"),
                ablate(model, attention_skip=True, layers=attending_layers(model)),
            ):
                model(**batch)
                raise RuntimeError("on purpose")
            assert torch.equal(before, first_of(model(**batch))) and hooks == hook_counts(model)
            outputs = []
            layer, chosen = layers_of(model)[attending_layers(model)[0]], attending_layers(model)[0]
            handle = layer.register_forward_hook(lambda m, args, out: outputs.append(first_of(out)))
            others = attending_layers(model)
            for switches in ({}, {"mlp": True, "layers": [chosen]}, {"mlp": True, "layers": others}):
                with ablate(model, **switches):
                    model(**batch)
            handle.remove()
        assert not torch.equal(outputs[0], outputs[1])
        if chosen == 0:  # what comes before the first layer does not change
            assert torch.equal(outputs[1], outputs[2])


def first_of(output):
    if isinstance(output, torch.Tensor):
        return output
    return first_of(output.to_tuple()[0] if hasattr(output, "to_tuple") else output[0])


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gpt_neo", "gemma2", "opt"])
def test_maps_are_those_that_the_model_returns(built, model_type):
    model, batch = built(model_type)
    with implementation(model, "eager"), torch.no_grad():
        given = model(**batch, output_attentions=True).attentions
    table = measure_attention(model, batch, "full")
    for layer, maps in enumerate(given):
        rows = table[(table.layer == layer) & (table.metric == "stable_rank")].sort_values(["example", "head"])
        expected = spectral_metrics(maps)["stable_rank"].flatten()
        torch.testing.assert_close(torch.tensor(rows.value.to_numpy()).float(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt_neo", "megatron-bert", "opt", "phi", "bart"])
def test_weights_against_the_projections(built, model_type):
    """The query and key rows of a head, by the names that these models have for their linear modules."""
    model, batch = built(model_type)
    tower = "encoder" if model_type == "bart" else None
    table = measure_weights(model, inputs=batch, tower=tower)
    with choosing_tower(tower):
        layer = layers_of(model)[0]
    found = {
        name.rsplit(".", 1)[-1]: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)
    }
    query, key = (
        next(found[name] for name in names if name in found) for names in (("q_proj", "query"), ("k_proj", "key"))
    )
    width = query.weight.shape[0] // 4
    groups = key.weight.shape[0] // width
    for head in range(4):
        rows, keys = slice(head * width, head * width + width), head * groups // 4 * width
        singular = torch.linalg.svdvals((query.weight[rows].T @ key.weight[keys : keys + width]).detach().double())
        expected = float(singular.square().sum() / singular[0].square())
        of_head = table[(table.layer == 0) & (table["head"] == head) & (table.metric == "stable_rank")]
        assert of_head.value.item() == pytest.approx(expected, rel=1e-4)


class Quantised(nn.Linear):
    """A linear map as quantised models have it: its weight is stored in eight or in twice four bits, with a scale beside it."""

    def __init__(self, linear, bits):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, dtype=linear.weight.dtype)
        weight, self.bits, self.bias = linear.weight.detach(), bits, linear.bias
        self.scale = weight.abs().max() / (7 if bits == 4 else 400)
        stored = (weight / self.scale).to(torch.float8_e4m3fn)
        if bits == 4:
            whole = (weight / self.scale).round().to(torch.int16) + 8
            stored = (whole[:, ::2] * 16 + whole[:, 1::2]).to(torch.uint8)
        self.weight = nn.Parameter(stored, requires_grad=False)

    def forward(self, states):
        weight = self.weight
        if self.bits == 4:
            weight = torch.stack([weight >> 4, weight & 15], -1).flatten(1).to(states.dtype) - 8
        return nn.functional.linear(states, weight.to(states.dtype) * self.scale, self.bias)


@contextmanager
def refused(model, message, batch=IDS):
    """The block raises a `ValueError`, and then the model has its hooks and returns what it returned, to the last bit."""

    def now():
        with torch.no_grad():
            return model(**batch, output_hidden_states=True, use_cache=False).hidden_states

    before, hooks = now(), hook_counts(model)
    with pytest.raises(ValueError, match=message):
        yield
    assert hook_counts(model) == hooks and not model.training
    assert all(map(torch.equal, before, now()))


class TestRefusals:
    def test_custom_forward_that_breaks_the_sum(self):
        model = float64("gemma2")
        layer = model.layers[0]
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: torch.sin(forward(*args, **kwargs))
        with refused(model, "is not the sum of its input"):
            measure_collapse(model, IDS, ["san"])
        assert isinstance(measure_collapse(model, IDS, ["transformer"]), pd.DataFrame)

    def test_layers_called_twice(self):
        model = float64("gemma2")
        forward = model.layers[0].forward
        model.layers[1].forward = lambda states, **kwargs: forward(model.layers[0](states, **kwargs), **kwargs)
        with refused(model, "layers of|adds no softmax|expected"):
            measure_collapse(model, IDS)
        for probe in (measure_attention, measure_logits):
            with refused(model, "runs another layer inside"):
                probe(model, IDS)

    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize("model_type", ["phi", "llama"])
    def test_quantised_weights(self, model_type, bits):
        model = float64(model_type)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, Quantised(child, bits))
        stored = [weight.clone() for weight in model.parameters()]
        with refused(model, "are quantised, and packed numbers have no spectrum"):
            measure_weights(model, inputs=IDS)
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(stored, model.parameters(), strict=True)
        )
        residuals = measure_collapse(model, IDS)
        rows = residuals[(residuals.variant == "transformer") & (residuals.metric == "relative_residual")]
        with torch.no_grad():
            states = model(**IDS, output_hidden_states=True).hidden_states[1]
        assert rows[rows.layer == 1].value.tolist() == pytest.approx(relative_residual(states).tolist())

    @pytest.mark.parametrize("probe", [measure_collapse, measure_attention, measure_logits])
    def test_one_token(self, probe):
        model = float64("gemma2")
        with refused(model, "one token has no others"):
            probe(model, {"input_ids": torch.tensor([[5]])})

    def test_a_list_without_input(self, built):
        model, batch = built("clip")
        with pytest.raises(ValueError, match="give one as `tower`"):
            measure_collapse(model, batch)
        for model, batch in (built("clip"), built("llava")):
            name = next(tower.name for tower in towers_of(base_of(model)) if "vis" in tower.name)
            with pytest.raises(ValueError, match="reads images, and the batch has only input_ids: add `pixel_values`"):
                measure_collapse(model, {"input_ids": batch["input_ids"]}, tower=name)

    def test_weights_of_a_batch_that_is_no_dict(self):
        with pytest.raises(ValueError, match="a batch must be a dict"):
            measure_weights(float64("gemma2"), inputs=IDS["input_ids"])

    @pytest.mark.parametrize("model_type, reason", [("fsmt", "tokens by examples"), ("levit", "adds no MLP")])
    def test_arrangements_without_an_answer(self, built, model_type, reason):
        model, batch = built(model_type)
        with pytest.raises(ValueError, match=reason):
            measure_collapse(model, batch, tower="encoder" if model_type == "fsmt" else None)


class TestRegressions:
    def test_each_tower_has_its_own_mask(self):
        model = float64("t5").float()
        ids, words = torch.randint(3, 99, (2, 12)), torch.randint(3, 99, (2, 9))
        mask, read = torch.ones(2, 12).long(), torch.ones(2, 9).long()
        mask[1, 4:], read[1, 5:] = 0, 0
        batch = {"input_ids": ids, "decoder_input_ids": words, "attention_mask": mask}
        whole = measure_collapse(model, batch, ["transformer"], tower="decoder")
        padded = measure_collapse(model, batch | {"decoder_attention_mask": read}, ["transformer"], tower="decoder")
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).decoder_hidden_states[1]
        first = whole[(whole.metric == "relative_residual") & (whole.layer == 1)].value.tolist()
        assert first == pytest.approx(relative_residual(states).tolist(), rel=1e-5)
        second = padded[(padded.metric == "relative_residual") & (padded.layer == 1)].value.tolist()
        assert second[1] == pytest.approx(relative_residual(states[1:, :5]).item(), rel=1e-4)

    def test_a_decoder_inside_a_language_model_has_its_own_name_and_mask(self, built):
        model, _ = built("florence2")
        assert [tower.name for tower in towers_of(model)] == ["encoder", "decoder"]
        mask = torch.ones(2, 12).long()
        mask[0, 6:] = 0
        batch = IDS | {"decoder_input_ids": IDS["input_ids"], "attention_mask": mask}
        table = measure_collapse(model, batch, ["transformer"], tower="decoder")
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).decoder_hidden_states[1]
        first = table[(table.metric == "relative_residual") & (table.layer == 1)].value.tolist()
        assert first == pytest.approx(relative_residual(states).tolist(), rel=1e-5)

    def test_the_rule_of_latent_attention_without_a_row(self, built):
        config = built("glm4_moe_lite")[0].config
        # queries of width 16 + 8 through a latent of 16, and keys through one of 8
        config = type(config)(**config.to_dict() | {"kv_lora_rank": 8})
        model = livened(AutoModel.from_config(config, dtype=torch.float32).eval())
        weights, logits = measure_weights(model), measure_logits(model, {"input_ids": torch.arange(3, 53)[None]})
        for table in (weights, logits):
            assert table[table.metric == "rank_limit"].value.unique().tolist() == [16]

    def test_clamped_states_of_half_precision(self):
        model = float64("t5")
        batch = IDS | {"decoder_input_ids": IDS["input_ids"]}
        whole, half = (
            measure_collapse(model.to(dtype), batch, ["san+skip"], tower="encoder").value
            for dtype in (torch.float32, torch.float16)
        )
        assert half.tolist() == pytest.approx(whole.tolist(), rel=1e-2, abs=1e-3)

    def test_an_interrupt_leaves_nothing_behind(self):
        model, batch = float64("gpt_neox"), IDS
        before = measure_collapse(model, batch, ["san+mlp"])

        def interrupt(*_):
            raise KeyboardInterrupt

        handle = model.layers[1].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            measure_collapse(model, batch, ["san"])
        handle.remove()
        assert not [
            mode for mode in _get_current_function_mode_stack() if type(mode).__module__.startswith("hf_rankattn")
        ]
        assert measure_collapse(model, batch, ["san+mlp"]).equals(before)

    def test_a_tower_in_stages_runs_in_the_whole_model(self, built):
        model, _ = built("groupvit")
        assert take_tower(model, "vision") == (model, "vision")
        assert type(take_tower(model, "text")[0]).__name__ == "GroupViTTextTransformer"

    def test_causal_maps_are_recognised_without_a_word_in_the_config(self):
        table = measure_attention(float64("bloom"), IDS, "full")
        assert "effective_rank_over_content_free" in set(table.metric)

    def test_a_gate_is_refused_at_any_width(self):
        sizes = SIZES | {
            "head_dim": 64,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention"] * 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
        model = AutoModel.from_config(AutoConfig.for_model("qwen3_next", **sizes)).eval()
        with pytest.raises(ValueError, match="such as those of a gate"):
            measure_weights(model, inputs=IDS)

    def test_a_tower_is_measured_on_its_own_inputs_and_ablated_by_name(self):
        model = float64("t5")
        both = IDS | {"decoder_input_ids": IDS["input_ids"]}
        table = measure_collapse(model, both, ["san"], tower="encoder")
        assert table.drop(columns="model").equals(measure_collapse(model.encoder, IDS, ["san"]).drop(columns="model"))
        with torch.no_grad(), ablate(model, attention_skip=True, mlp=True, tower="encoder"):
            states = model.encoder(**IDS, output_hidden_states=True).hidden_states[1]
        first = table[(table.metric == "relative_residual") & (table.layer == 1)].value.tolist()
        assert first == pytest.approx(relative_residual(states).tolist(), rel=1e-9)
