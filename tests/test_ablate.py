"""Parts taken away for a while: against surgery by hand, in any order, and put back to the last bit."""

import importlib
from contextlib import ExitStack

import pytest
import torch
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, XLNET, float_tensors, tiny_inputs
from testing_probe import hook_counts

from hf_rankattn import ablate, measure_collapse
from hf_rankattn.families import stream
from hf_rankattn.families.architectures import family_of, layers_of
from hf_rankattn.families.projections import submodule
from hf_rankattn.papers.rank_collapse._subjects import FAMILIES as EVERY_FAMILY
from hf_rankattn.papers.rank_collapse._subjects import fresh_model, inputs_of


ablation = importlib.import_module("hf_rankattn.probe.ablate")  # the package has a function of that name
IDS = torch.arange(1, 9)[None]


class TestAblate:
    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_restored_to_the_last_bit_also_after_an_exception_and_nested(self, family):
        model = family.rank("Model")(family.rank_config(qk_rank=3)).eval()
        batch = tiny_inputs(family, "Model")
        before = float_tensors(model(**batch))
        hooks = hook_counts(model)
        with pytest.raises(RuntimeError, match="on purpose"), ablate(model, attention_skip=True):
            outer = float_tensors(model(**batch))
            with ablate(model, mlp=True):
                inner = float_tensors(model(**batch))
            assert all(torch.equal(a, b) for a, b in zip(outer, float_tensors(model(**batch)), strict=True))
            raise RuntimeError("on purpose")
        assert not torch.equal(inner[0], outer[0]) and not torch.equal(outer[0], before[0])
        assert all(torch.equal(a, b) for a, b in zip(before, float_tensors(model(**batch)), strict=True))
        assert hooks == hook_counts(model)

    def test_bert_against_surgery_by_hand(self):
        model = BERT.stock("Model")(BERT.stock_config(num_hidden_layers=1)).eval()
        layer = model.encoder.layer[0]
        states = model.embeddings(IDS)
        attended = layer.attention.output.dense(layer.attention.self(states)[0])
        norms = layer.attention.output.LayerNorm, layer.output.LayerNorm
        self.check(model, self.by_hand(states, attended, lambda x: layer.output.dense(layer.intermediate(x)), *norms))

    def test_albert_against_surgery_by_hand(self):
        model = ALBERT.stock("Model")(ALBERT.stock_config(num_hidden_layers=1, num_hidden_groups=1)).eval()
        layer = model.encoder.albert_layer_groups[0].albert_layers[0]
        states = model.encoder.embedding_hidden_mapping_in(model.embeddings(IDS))
        caught = []
        handle = layer.attention.dense.register_forward_hook(lambda m, a, o: caught.append(o))
        model(IDS)
        handle.remove()
        norm, last_norm, attended = layer.attention.LayerNorm, layer.full_layer_layer_norm, caught[0]
        after = norm(attended + states)
        expected = self.by_hand(states, attended, layer.ff_chunk, norm, last_norm) | {
            ("identity_trick",): last_norm(layer.activation(after) + after),
            ("identity_trick", "mlp_skip"): last_norm(layer.activation(after)),
            ("identity_trick", "norm"): layer.activation(attended + states) + attended + states,
        }
        self.check(model, expected)

    @staticmethod
    def by_hand(states, attended, mlp, norm, last_norm):
        """The output of one layer with parts removed, from the output of its attention and its modules."""
        after = norm(attended + states)
        return {
            ("attention_skip", "mlp"): norm(attended),
            ("mlp",): after,
            ("mlp", "norm"): attended + states,
            ("mlp_skip",): last_norm(mlp(after)),
            ("attention_skip",): last_norm(mlp(norm(attended)) + norm(attended)),
        }

    @staticmethod
    def check(model, expected):
        for names, states in expected.items():
            switches = dict.fromkeys(names, True)
            if switches.pop("identity_trick", False):
                switches["mlp"] = "identity_trick"
            with ablate(model, **switches):
                torch.testing.assert_close(model(IDS).last_hidden_state, states, msg=str(names))

    def test_xlnet_against_its_own_switch(self):
        model = XLNET.stock("Model")(XLNET.stock_config(n_layer=2)).eval()
        batch = {"input_ids": torch.arange(1, 9)[None]}
        with ablate(model, attention_skip=True):
            ours = model(**batch).last_hidden_state
        for layer in model.layer:
            inner = layer.rel_attn.post_attention
            layer.rel_attn.post_attention = lambda h, vector, residual=True, inner=inner: inner(
                h, vector, residual=False
            )
        assert torch.equal(ours, model(**batch).last_hidden_state)

    def test_chosen_layers_of_shared_weights(self):
        model = ALBERT.stock("Model")(ALBERT.stock_config(num_hidden_groups=1)).eval()
        assert len(layers_of(model)) == 4 and len(set(layers_of(model))) == 1
        batch = tiny_inputs(ALBERT, "Model")
        whole = model(**batch, output_hidden_states=True).hidden_states
        with ablate(model, attention_skip=True, layers=[2]):
            cut = model(**batch, output_hidden_states=True).hidden_states
        assert torch.equal(cut[2], whole[2]) and not torch.equal(cut[3], whole[3])
        assert set(measure_collapse(model, batch, ["san"]).layer) == set(range(5))

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_what_is_gone_as_a_whole_is_gone_in_any_order(self, family):
        model = family.stock("Model")(family.stock_config()).eval()
        batch = tiny_inputs(family, "Model")

        def output(*blocks):
            with ExitStack() as stack, torch.no_grad():
                for block in blocks:
                    stack.enter_context(ablate(model, **block))
                return model(**batch).last_hidden_state

        mlp = output({"mlp": True})
        assert torch.equal(mlp, output({"mlp": True, "mlp_skip": True})) and bool(mlp.abs().sum() > 0)
        assert torch.equal(mlp, output({"mlp_skip": True}, {"mlp": True}))
        both = output({"mlp": True, "norm": True})
        assert torch.equal(both, output({"mlp": True}, {"norm": True}))
        assert torch.equal(both, output({"norm": True}, {"mlp": True}))
        parts = [{"mlp": True, "layers": [layer]} for layer in range(model.config.num_hidden_layers)]
        assert torch.equal(mlp, output(*parts))

    def test_compiled_layers_are_run_as_written(self):
        model = BERT.stock("Model")(BERT.stock_config()).eval()
        batch = tiny_inputs(BERT, "Model")
        expected = measure_collapse(model, batch, ["san"])
        for layer in model.encoder.layer:
            layer.compile(backend="eager")
        with torch.no_grad():
            model(**batch)
        seen = measure_collapse(model, batch, ["san"])
        assert (expected.value == seen.value).all() and model.encoder.layer[0]._compiled_call_impl is not None
        with pytest.raises(ValueError, match="compiled code does not see new hooks"):
            with ablate(torch.compile(model, backend="eager"), mlp=True):
                pass

    @pytest.mark.parametrize("part", ["attention_skip", "mlp"])
    def test_gradient_checkpointing_recomputes_what_was_run(self, part):
        model = BERT.stock("Model")(
            BERT.stock_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ).train()
        batch = tiny_inputs(BERT, "Model")

        def gradient():
            model.zero_grad()
            with ablate(model, **{part: True}, layers=[0, 2]):
                model(**batch).last_hidden_state.square().sum().backward()
            return model.encoder.layer[0].attention.self.value.weight.grad.clone()

        plain = gradient()
        model.gradient_checkpointing_enable()
        torch.testing.assert_close(gradient(), plain)

    @pytest.mark.parametrize("name", EVERY_FAMILY)
    def test_a_removed_mlp_runs_on_one_token_and_nothing_else_changes(self, name, monkeypatch):
        experts = {"first_k_dense_replace": 0} if name == "deepseek_v3" else {}
        model = fresh_model(name, "smoke", 0, **experts)
        (batch,) = inputs_of(model.config, "ids", 2, 12, 0)
        family, layer = family_of(model), layers_of(model)[0]
        sizes = []
        update = submodule(layer, family.updated)
        update.register_forward_hook(lambda m, args, output: sizes.append(output.shape[family.batch_first]))

        def run(**switches):
            sizes.clear()
            with ablate(model, **switches), torch.no_grad():
                return model(**batch).last_hidden_state, set(sizes)

        removed = [{"mlp": True}, {"mlp": True, "norm": True}, {"mlp": True, "layers": [0]}]
        removed.append({"mlp": True, "attention_skip": True})
        found = [run(**switches) for switches in removed]
        whole, tokens = run()
        monkeypatch.setattr(stream, "mlps_of", lambda layer: ())
        for switches, (states, idle) in zip(removed, found, strict=True):
            expected, all_of_them = run(**switches)
            assert all_of_them == tokens and torch.equal(states, expected) and not torch.equal(states, whole)
            # one module runs again and again in ALBERT, and only its first run is idle if only layer 0 is named
            assert idle == ({1} if "layers" not in switches or name != "albert" else {1} | tokens)
