"""Every legal geometry of heads has the rank, the maps and the values it says it has."""

import functools

import pytest
import torch
from testing_common import (
    ALBERT,
    BATCH,
    BERT,
    FAMILIES,
    FAMILY_IDS,
    LENGTH,
    TASK_IDS,
    TASKS,
    XLNET,
    attention_modules,
    bilinear_forms,
    projections,
    tiny_inputs,
)

from hf_rankattn.families.architectures import family_of, layers_of
from hf_rankattn.families.projections import submodule


ORACLES = [family for family in FAMILIES if family is not XLNET]  # its attention has terms of its own
GEOMETRIES = {
    "stock": {},
    "rank-1": {"qk_rank": 1},
    "rank-3-of-8": {"qk_rank": 3},
    "wider-than-stock": {"qk_rank": 20},
    "wider-than-hidden": {"qk_rank": 40},
    "values-narrower": {"qk_rank": 8, "v_head_dim": 3},
    "values-wider": {"qk_rank": 2, "v_head_dim": 11},
    "five-heads-of-32": {"num_attention_heads": 5, "qk_rank": 4, "v_head_dim": 7},
    "more-heads-than-hidden": {"num_attention_heads": 33, "qk_rank": 2, "v_head_dim": 1},
    "unit-norm": {"qk_rank": 3, "qk_norm": True},
    "unit-norm-values-wider": {"num_attention_heads": 3, "qk_rank": 2, "v_head_dim": 9, "qk_norm": True},
    "own-scale": {"qk_rank": 3, "qk_scale": 0.7},
}


def build(family, suffix="Model", **fields):
    return family.rank(suffix)(family.rank_config(attn_implementation="eager", **fields)).eval()


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
@pytest.mark.parametrize("fields", GEOMETRIES.values(), ids=GEOMETRIES.keys())
class TestEveryGeometry:
    def test_bilinear_forms_have_exactly_the_rank_asked_for(self, family, fields):
        model = build(family, **fields)
        expected = min(fields.get("qk_rank", 8), 32)
        for attention in attention_modules(model):
            forms = bilinear_forms(attention)
            assert len(forms) == fields.get("num_attention_heads", 4)
            assert (torch.linalg.matrix_rank(forms) == expected).all()

    def test_maps_have_all_heads_and_sum_to_one(self, family, fields):
        """Stock BERT infers the head count by a reshape: a narrower query gives one head instead of four, silently."""
        output = build(family, **fields)(**tiny_inputs(family, "Model"), output_attentions=True)
        heads = fields.get("num_attention_heads", 4)
        assert len(output.attentions) == family.rank_config().num_hidden_layers
        for maps in output.attentions:
            assert maps.shape == (BATCH, heads, LENGTH, LENGTH)
            torch.testing.assert_close(maps.sum(-1), torch.ones(BATCH, heads, LENGTH))

    def test_eager_and_sdpa_agree(self, family, fields):
        if "sdpa" not in family.implementations:
            with pytest.raises(ValueError, match="scaled_dot_product_attention"):
                build(family, **fields).set_attn_implementation("sdpa")
            return
        model = build(family, **fields)
        batch = tiny_inputs(family, "Model")
        results = []
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            states = model(**batch).last_hidden_state * batch["attention_mask"][..., None]
            states.square().sum().backward()
            results.append((states, [p.grad for p in model.parameters() if p.grad is not None]))
        torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(results[0][1], results[1][1], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)

    def test_padding_does_not_reach_real_tokens(self, family, fields):
        model = build(family, **fields)
        batch = tiny_inputs(family, "Model")
        real = batch["attention_mask"][2].bool()
        padded = model(**batch).last_hidden_state[2, real]
        alone = {name: value[2:, real] for name, value in batch.items()}
        torch.testing.assert_close(padded, model(**alone).last_hidden_state[0], atol=1e-5, rtol=1e-5)


def naive_attention(attention, states, mask):
    """One head and one query at a time, in float64: the oracle of every family but XLNet."""
    heads, rank, width = attention.num_attention_heads, attention.qk_rank, attention.v_head_dim
    query, key, value = (states @ weight.T + bias for weight, bias in projections(attention))
    joined = torch.zeros(*states.shape[:2], heads * width, dtype=torch.float64)
    for b in range(len(states)):
        for h in range(heads):
            q, keys = (x[b, :, h * rank : (h + 1) * rank] for x in (query, key))
            values = value[b, :, h * width : (h + 1) * width]
            for i in range(states.shape[1]):
                seen = mask[b].bool()
                if attention.is_causal:
                    seen = seen & (torch.arange(len(seen)) <= i)
                k, v = keys[seen], values[seen]
                logits = k @ q[i]
                if attention.log_temperature is not None:
                    logits = logits / (q[i].norm() * k.norm(dim=-1)) * attention.log_temperature[h].exp().item()
                weights = torch.softmax(logits * attention.scaling, dim=0)
                joined[b, i, h * width : (h + 1) * width] = weights @ v
    return joined


@pytest.mark.parametrize("family", ORACLES, ids=[family.name for family in ORACLES])
@pytest.mark.parametrize("fields", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_attention_equals_the_naive_oracle(family, fields):
    model = build(family, **fields).double()
    batch = tiny_inputs(family, "Model")
    attention = attention_modules(model)[0]
    if attention.log_temperature is not None:
        torch.nn.init.normal_(attention.log_temperature)
    joined, states = [], []
    output = submodule(layers_of(model)[0], family_of(model).projections.output)
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    output.register_forward_pre_hook(lambda module, args: joined.append(args[0]))
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        joined.clear(), states.clear()
        model(**batch)
        oracle = naive_attention(attention, states[0], batch["attention_mask"])
        torch.testing.assert_close(joined[0], oracle, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("fields", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_xlnet_attention_equals_the_naive_oracle(fields):
    """Content, position and segment terms written out, in float64, for tokens that see all others."""
    model = build(XLNET, **fields).double()
    attention = model.layer[0].rel_attn
    if attention.log_temperature is not None:
        torch.nn.init.normal_(attention.log_temperature)
    ids, types = torch.randint(47, (1, 6)), torch.tensor([[0, 0, 1, 1, 0, 1]])
    attended = []
    inner = attention.post_attention
    attention.post_attention = lambda h, vector, residual=True: attended.append(vector) or inner(h, vector, residual)
    model(ids, token_type_ids=types)

    states = model.word_embedding(ids)[0]
    position = model.relative_positional_encoding(6, 6).double()[:, 0]
    unit = attention.log_temperature is not None
    for h in range(attention.n_head):
        q, k, v = states @ attention.q[:, h], states @ attention.k[:, h], states @ attention.v[:, h]
        r = position @ attention.r[:, h]
        if unit:
            q, k, r = (x / x.norm(dim=-1, keepdim=True) for x in (q, k, r))
        logits = torch.zeros(6, 6, dtype=torch.float64)
        for i in range(6):
            for j in range(6):
                segment = attention.seg_embed[int(types[0, i] != types[0, j]), h]
                logits[i, j] = (
                    (q[i] + attention.r_w_bias[h]) @ k[j]
                    + (q[i] + attention.r_r_bias[h]) @ r[6 - i + j]  # row 0 is distance 6, row 6 is distance 0
                    + (q[i] + attention.r_s_bias[h]) @ segment
                )
        scale = attention.scaling * (attention.log_temperature[h].exp().item() if unit else 1.0)
        oracle = torch.softmax(logits * scale, dim=-1) @ v
        torch.testing.assert_close(attended[0][:, 0, h], oracle, atol=1e-6, rtol=1e-6)


class TestXLNet:
    def test_everything_that_meets_the_query_shrinks_with_it(self):
        attention = build(XLNET, qk_rank=3, v_head_dim=5).layer[0].rel_attn
        for name in ("q", "k", "r"):
            assert getattr(attention, name).shape == (32, 4, 3)
        for name in ("r_r_bias", "r_s_bias", "r_w_bias"):
            assert getattr(attention, name).shape == (4, 3)
        assert attention.seg_embed.shape == (2, 4, 3)
        assert attention.v.shape == attention.o.shape == (32, 4, 5)

    @pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "unit-norm"])
    def test_two_streams(self, qk_norm):
        model = build(XLNET, "LMHeadModel", qk_rank=3, v_head_dim=5, qk_norm=qk_norm)
        ids = torch.randint(47, (2, 6))
        perm_mask = torch.zeros(2, 6, 6)
        perm_mask[:, :, -1] = 1.0
        target_mapping = torch.zeros(2, 1, 6)
        target_mapping[:, 0, -1] = 1.0
        streams = {"perm_mask": perm_mask, "target_mapping": target_mapping}
        output = model(ids, **streams, output_attentions=True, output_hidden_states=True)
        assert output.logits.shape == (2, 1, 47)
        assert len(output.hidden_states) == 2 * 4
        assert all(h.shape == (2, 4, 6, 6) and g.shape == (2, 4, 6, 6) for h, g in output.attentions)
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 47
        again = model(changed, **streams)
        assert torch.equal(again.logits, output.logits), "the query stream must not see its own token"

    @pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "unit-norm"])
    def test_memory_continues_a_sequence(self, qk_norm):
        model = build(XLNET, qk_rank=3, v_head_dim=5, qk_norm=qk_norm, attn_type="uni", mem_len=6)
        ids = torch.randint(47, (2, 8))
        whole = model(ids).last_hidden_state
        first = model(ids[:, :5], use_mems=True)
        second = model(ids[:, 5:], mems=first.mems, use_mems=True)
        assert [memory.shape for memory in first.mems] == [(5, 2, 32)] * 3
        torch.testing.assert_close(second.last_hidden_state, whole[:, 5:], atol=1e-5, rtol=1e-5)

    def test_one_dtype_under_another_default(self, float64_default):
        model = build(XLNET, "LMHeadModel", qk_rank=3)
        assert {weight.dtype for weight in model.parameters()} == {torch.float64} == {model.dtype}
        assert model(**tiny_inputs(XLNET, "Model")).logits.dtype == torch.float64

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
    def test_one_dtype_when_loaded_in_it(self, dtype, tmp_path):
        build(XLNET, qk_rank=3).save_pretrained(tmp_path)
        model = XLNET.rank("Model").from_pretrained(tmp_path, dtype=dtype)
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        assert model(**tiny_inputs(XLNET, "Model")).last_hidden_state.dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
    def test_generation(self, dtype):
        model = build(XLNET, "LMHeadModel", qk_rank=3, v_head_dim=5).to(dtype)
        generated = model.generate(torch.randint(6, 47, (1, 4)), max_new_tokens=5, do_sample=False)
        assert generated.shape[1] > 4


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_constructors_that_others_have_wrapped(family, monkeypatch):
    """DeepSpeed wraps the constructor of every module class while a model is built."""
    for name in ("Model", "ForTokenClassification"):
        stock = family.stock(name)
        wrapped = functools.wraps(stock.__init__)(lambda self, *a, init=stock.__init__, **k: init(self, *a, **k))
        monkeypatch.setattr(stock, "__init__", wrapped)
    model = family.rank("ForTokenClassification")(family.rank_config(qk_rank=2))
    assert {attention.qk_rank for attention in attention_modules(model)} == {2}


def test_a_class_that_builds_otherwise_is_not_rebound_in_silence():
    class Other(BERT.stock("Model")):
        def __init__(self, config):
            super().__init__(config)

    class Mixed(BERT.rank("PreTrainedModel"), Other):
        pass

    with pytest.raises(RuntimeError, match="To extend a rank model, derive from it"):
        Mixed(BERT.rank_config())


def test_names_of_stock_attention_where_they_have_a_meaning():
    attention = attention_modules(build(BERT))[0]
    assert (attention.attention_head_size, attention.all_head_size) == (8, 32)
    assert not hasattr(attention_modules(build(BERT, qk_rank=3))[0], "attention_head_size")
    assert build(XLNET).layer[0].rel_attn.d_head == 8


@pytest.mark.parametrize("heads", [16, 4])
def test_xlnet_is_stock_in_float64_too(heads):
    stock = XLNET.stock("Model")(XLNET.stock_config(n_head=heads)).double().eval()
    rank = XLNET.rank("Model")(XLNET.rank_config(n_head=heads)).double().eval()
    rank.load_state_dict(stock.state_dict())
    batch = tiny_inputs(XLNET, "Model")
    assert torch.equal(rank(**batch).last_hidden_state, stock(**batch).last_hidden_state)


@pytest.mark.parametrize("family, suffix", TASKS, ids=TASK_IDS)
def test_every_task_class_trains_at_a_small_rank(family, suffix):
    model = build(family, suffix, qk_rank=2, v_head_dim=5, qk_norm=True).train()
    output = model(**tiny_inputs(family, suffix, labels=True))
    loss = output.loss if "loss" in output else output.last_hidden_state.square().mean()
    loss.backward()
    for attention in attention_modules(model):
        for name, weight in attention.named_parameters():
            assert weight.grad is not None and torch.isfinite(weight.grad).all(), name
        assert attention.log_temperature.grad.abs().sum() > 0


class TestPerLayer:
    def test_widths_differ_by_layer(self):
        for family in (BERT, XLNET):
            layers = {1: {"qk_rank": 2, "v_head_dim": 5}, 2: {"qk_norm": True}}
            model = build(family, qk_rank=6, per_layer_config=layers)
            assert [(a.qk_rank, a.v_head_dim) for a in attention_modules(model)] == [(6, 8), (2, 5), (6, 8)]
            assert [a.log_temperature is not None for a in attention_modules(model)] == [False, False, True]
            output = model(**tiny_inputs(family, "Model"), output_attentions=True)
            assert len(output.attentions) == 3

    def test_a_list_is_one_value_per_layer(self):
        listed = BERT.rank_config(qk_rank=[1, 2, 3])
        written = BERT.rank_config(per_layer_config={i: {"qk_rank": i + 1} for i in range(3)})
        assert [listed.head_geometry(i) for i in range(3)] == [written.head_geometry(i) for i in range(3)]

    def test_albert_widths_differ_by_group(self):
        model = build(ALBERT, qk_rank=[2, 5])
        assert [a.qk_rank for a in attention_modules(model)] == [2, 5]
        output = model(**tiny_inputs(ALBERT, "Model"), output_attentions=True)
        assert len(output.attentions) == 4

    def test_switching_the_implementation_reaches_layers_of_their_own_width(self):
        model = build(BERT, per_layer_config={1: {"qk_rank": 2}})
        model.set_attn_implementation("sdpa")
        assert {a.config._attn_implementation for a in attention_modules(model)} == {"sdpa"}


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
class TestUnitNorm:
    def test_logits_are_bounded_by_the_temperature(self, family):
        """Blowing up the query weights cannot sharpen the maps: only the temperature can."""
        model = build(family, qk_rank=4, qk_norm=True)
        batch = tiny_inputs(family, "Model")
        with torch.no_grad():
            for attention in attention_modules(model):
                for name in ("r_w_bias", "r_r_bias", "r_s_bias"):
                    if hasattr(attention, name):
                        getattr(attention, name).zero_()
                        attention.seg_embed.zero_()
                if not hasattr(attention, "q"):
                    for _, bias in projections(attention)[:2]:
                        bias.zero_()
            before = model(**batch).last_hidden_state
            for attention in attention_modules(model):
                (attention.q if hasattr(attention, "q") else projections(attention)[0][0]).mul_(1000.0)
            torch.testing.assert_close(model(**batch).last_hidden_state, before, atol=1e-5, rtol=1e-5)

    def test_temperature_starts_at_unit_variance(self, family):
        model = build(family, qk_rank=4, qk_norm=True)
        for attention in attention_modules(model):
            assert torch.allclose(attention.log_temperature.exp() * attention.scaling, torch.tensor(2.0))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
    def test_zero_states_stay_finite_in_half_precision(self, family, dtype):
        model = build(family, qk_rank=4, qk_norm=True).to(dtype)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        assert torch.isfinite(model(**tiny_inputs(family, "Model")).last_hidden_state).all()


def test_a_head_of_the_users_own_is_built_the_usual_way():
    class Regressor(BERT.rank("PreTrainedModel")):
        def __init__(self, config):
            super().__init__(config)
            self.bert = BERT.rank("Model")(config)
            self.head = torch.nn.Linear(config.hidden_size, 1)
            self.post_init()

        def forward(self, input_ids):
            return self.head(self.bert(input_ids).pooler_output)

    model = Regressor(BERT.rank_config(qk_rank=2))
    assert model(torch.ones(2, 5, dtype=torch.long)).shape == (2, 1)
