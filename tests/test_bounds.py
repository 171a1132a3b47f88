"""The bounds of rank collapse: never violated where they hold, and never given where they do not."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from testing_common import BERT, XLNET, tiny_inputs
from testing_probe import small
from transformers import BertConfig, BertModel
from transformers.activations import ACT2FN

from hf_rankattn import RankEncoderConfig, RankEncoderModel, ablate, composite_norm, layer_bounds, measure_collapse
from hf_rankattn.families.row import MLP
from hf_rankattn.measure import residual_lower_bound
from hf_rankattn.probe.bounds import SPREAD_LIMIT, kappa, lipschitz, steepest


def random_network(seed, use_mlp=False, use_skip=False):
    """Three layers of attention without norms, of random geometry and size, and points for it."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    hidden, heads = int(random.integers(3, 12)), int(random.integers(1, 5))
    sizes = {"input_dim": hidden, "num_hidden_layers": 3, "num_attention_heads": heads, "intermediate_size": 7}
    sizes |= {name: int(random.integers(1, hidden + 1)) for name in ("qk_rank", "v_head_dim")}
    activation = str(random.choice(["gelu", "relu", "silu", "tanh"]))
    parts = {"norm": "none", "use_skip": use_skip, "use_mlp": use_mlp, "hidden_act": activation}
    model = RankEncoderModel(RankEncoderConfig(**sizes, **parts)).double().eval()
    size = float(random.choice([0.1, 0.2, 0.3, 0.5, 1.0, 3.0]))
    with torch.no_grad():
        for weight in model.layers.parameters():
            weight.copy_(size * torch.randn_like(weight))
    points = float(random.choice([0.3, 1.0, 3.0])) * torch.randn(3, int(random.integers(2, 20)), hidden)
    return model, {"points": points.double()}


def wide(table):
    return table.pivot(index=["layer", "example"], columns="metric", values="value")


def beyond_rounding(table):
    """The layers whose tokens have not become equal up to the precision of the model."""
    equal = table[table.note.str.startswith("rounding")].set_index(["layer", "example"]).index
    rows = wide(table)
    return rows[~rows.index.isin(equal)]


class TestNothingIsViolated:
    def test_attention_alone(self):
        found = []
        for seed in range(60):
            model, batch = random_network(seed)
            found.append(beyond_rounding(layer_bounds(model, batch)))
        rows = pd.concat(found)
        assert (rows.measured <= rows.sharp_bound).all()
        assert (rows.sharp_bound <= rows.repaired_bound * (1 + 1e-9)).all()
        within, first = rows[rows.D <= SPREAD_LIMIT], rows[rows.kappa <= 16]
        assert 150 <= len(within) < len(first) < len(rows)
        assert (within.measured <= within.published_bound).all()
        assert (first.measured <= first.published_bound_v1).all()

    def test_with_skips_and_behind_mlps(self):
        layers = 0
        for seed in range(20):
            model, batch = random_network(seed, use_skip=True)
            rows = wide(layer_bounds(model, batch))
            assert (rows.skip_measured <= rows.skip_bound * (1 + 1e-9)).all(), seed
            model, batch = random_network(seed, use_mlp=True)
            rows = beyond_rounding(layer_bounds(model, batch))
            curve = measure_collapse(model, batch, ["transformer"]).pivot(
                index=["layer", "example"], columns="metric", values="value"
            )
            for (layer, example), row in rows.iterrows():
                behind = curve.loc[(layer + 1, example)]
                if behind.relative_residual > 1e-12:  # from the mean, which is at most twice the smallest
                    layers += 1
                    assert behind.residual_norm / 2 <= row.lipschitz * row.sharp_bound, seed
        assert layers > 20

    def test_the_lipschitz_constant(self):
        for seed in range(60):
            torch.manual_seed(seed)
            up, down = torch.randn(9, 5, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
            name, skip = ["gelu", "relu", "silu", "gelu_new"][seed % 4], bool(seed % 2)
            activation = ACT2FN[name]
            x, y = torch.randn(2, 6, 5, dtype=torch.float64)
            images = [activation(z @ up.t()) @ down.t() + skip * z for z in (x, y)]
            allowed = lipschitz(MLP(up, down, activation), skip) * composite_norm(x - y)
            assert composite_norm(images[0] - images[1]) <= allowed


def counterexample(n):
    """A layer on which the first published constant, without gamma, fails for many tokens: explicit matrices.

    Token 0 is e_0, m tokens are zero, and m tokens are unit vectors of their own; a bias of the keys puts log n + 2.5 on
    token 0, and the form puts log n + 5 on each of the last m tokens itself.
    """
    m = (n - 1) // 2
    states = torch.zeros(n, m + 1, dtype=torch.float64)
    states[0, 0] = 1
    states[m + 1 :, 1:] = torch.eye(m, dtype=torch.float64)
    form = torch.full((m + 1,), math.log(n) + 5, dtype=torch.float64)
    form[0] = 0
    logits = (states * form) @ states.t()
    logits[:, 0] += math.log(n) + 2.5
    return logits.softmax(-1) @ states, form


def counterexample_lower_bound(n):
    """A lower bound of the residual behind the layer, from its three kinds of rows, for any n."""
    m, e = (n - 1) // 2, math.exp
    own, shared = e(5) * n, e(2.5) * n
    total_own, total_other = own + shared + n - 2, shared + n - 1
    # column 0 has m rows of one value and m + 1 of another: its median leaves m times their difference
    one = m * (shared / total_other - shared / total_own)
    half_distance = (own - 1) / total_own  # between two of the last tokens: each has its own, and the other's little
    return math.sqrt(one * half_distance)


class TestTheFirstConstant:
    def test_fails_without_a_condition_on_the_logits(self):
        outputs, form = counterexample(1025)
        bound = 4 * form.max().item()  # ||W_QK||_1 times the cube of a residual that is one
        explicit = residual_lower_bound(outputs).item()
        assert explicit == pytest.approx(19.98, abs=0.5) and bound == pytest.approx(47.7, abs=0.5)
        assert counterexample_lower_bound(1025) == pytest.approx(explicit, rel=1e-3)
        assert counterexample_lower_bound(16385) == pytest.approx(79.9, abs=0.5)
        assert 4 * (math.log(16385) + 5) == pytest.approx(58.8, abs=0.5)

    def test_kappa(self):
        spread = torch.tensor([1e-14, 0.7994, 1.9733, 800.0])
        assert kappa(spread).tolist() == pytest.approx([2, 4, 16, math.inf], rel=1e-3)
        assert math.exp(SPREAD_LIMIT) == pytest.approx(1 + 2 * SPREAD_LIMIT)

    def test_slopes(self):
        assert steepest(ACT2FN["gelu"]) == pytest.approx(1.12890, abs=1e-5)
        assert steepest(ACT2FN["relu"]) == pytest.approx(1, abs=1e-5)
        assert steepest(ACT2FN["relu2"]) == math.inf


class TestNumbers:
    @pytest.mark.parametrize("example, tokens, nearer", [(0, 7, "median"), (1, 5, "mean")])
    def test_against_plain_matrices(self, example, tokens, nearer):
        config = BertConfig(
            vocab_size=40, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16
        )
        # drawn in float32, so that it is the same model under any default dtype
        model = BertModel._from_config(config, add_pooling_layer=False, dtype=torch.float32).double().eval()
        ids = torch.randint(40, (2, 7))
        mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        rows = wide(layer_bounds(model, {"input_ids": ids, "attention_mask": mask})).loc[(1, example)]
        model.set_attn_implementation("eager")
        with torch.no_grad():
            output = model(ids, attention_mask=mask, output_hidden_states=True, output_attentions=True)
        states, maps = output.hidden_states[1][example, :tokens], output.attentions[1][example, :, :tokens, :tokens]
        left = states - states.mean(0)  # the mean row for the residual and the bounds
        one, inf = lambda x: x.abs().sum(0).max().item(), lambda x: x.abs().sum(1).max().item()
        attention = model.encoder.layer[1].attention
        betas, spreads, gammas, one_bound, inf_bound, sharp_one, sharp_inf = [], [], [], 0.0, 0.0, 0.0, 0.0
        size = math.sqrt(one(left) * inf(left))
        update = torch.zeros_like(states)
        for head, part in enumerate((slice(0, 4), slice(4, 8), slice(8, 12))):
            form = attention.self.query.weight[part].T @ attention.self.key.weight[part]
            merged = attention.self.value.weight[part].T @ attention.output.dense.weight[:, part].T
            update += maps[head] @ states @ merged
            betas.append(one(form) * math.sqrt(one(merged) * inf(merged)))
            scores = left @ form @ left.T / 2
            ranges = scores.max(1).values - scores.min(1).values
            spreads.append(ranges.max().item())
            gammas.append(math.sqrt(ranges.sum().item() * spreads[-1]) / (2 * one(scores)))
            d = spreads[-1]
            constant = (math.exp(d) - 1) / d + (math.exp(2 * d) - 1) / (2 * d)
            one_bound += constant * one(form) * one(merged) / 2 * size**2 * one(left)
            inf_bound += one(form) * inf(merged) / 2 * size**2 * inf(left)
            sharp_one += min(constant * one(scores), tokens) * one(merged) * one(left)
            sharp_inf += 2 * math.tanh(d / 4) * inf(merged) * inf(left)
        # the better of mean and median for what is measured: a bound holds for the smallest residual
        centred = {"mean": update - update.mean(0), "median": update - update.quantile(0.5, dim=0)}
        left_over = {name: math.sqrt(one(x) * inf(x)) for name, x in centred.items()}
        assert min(left_over, key=left_over.get) == nearer
        expected = {
            "residual": size,
            "measured": left_over[nearer],
            "beta": max(betas),
            "D": max(spreads),
            "gamma": max(gammas),
            "published_bound": 4 * max(gammas) * max(betas) * 3 / 2 * size**3,
            "repaired_bound": math.sqrt(one_bound * inf_bound),
            "sharp_bound": math.sqrt(sharp_one * sharp_inf),
        }
        for name, value in expected.items():
            assert rows[name] == pytest.approx(value, rel=1e-9), name
        mlp = model.encoder.layer[1]
        product = 1.1289042 * mlp.intermediate.dense.weight.T.abs() @ mlp.output.dense.weight.T.abs() + torch.eye(12)
        assert rows.lipschitz == pytest.approx(math.sqrt(one(product) * inf(product)), rel=1e-5)

    def test_bert_base_at_initialisation(self):
        """Vacuous from the first layer on, though pure attention collapses at once."""
        model = BertModel(BertConfig(num_hidden_layers=1), add_pooling_layer=False).eval()
        ids = torch.randint(30000, (1, 128), generator=torch.Generator().manual_seed(0))
        with ablate(model, attention_skip=True, mlp=True):
            table = layer_bounds(model, {"input_ids": ids})
        rows = wide(table).iloc[0]
        assert rows.beta == pytest.approx(7.05, rel=0.05) and rows.residual == pytest.approx(232, rel=0.05)
        assert 1.2 < rows.D < 2.5 and 0.2 < rows.gamma < 0.4 and rows.lipschitz == 1
        assert rows.measured < 0.02 * rows.residual
        notes = table.set_index("metric").note
        assert notes.repaired_bound.startswith("vacuous")
        assert notes.published_bound.startswith("does not apply: D is above 1.256")


class TestWhereTheySayNothing:
    @pytest.mark.parametrize(
        "make, reason",
        [
            (lambda: small("gpt2", layers=1), "a causal mask"),
            (lambda: small("llama", layers=1), "a causal mask"),
            (lambda: XLNET.stock("Model")(XLNET.stock_config()), "relative positions"),
            (lambda: small("rank_encoder", qk_norm=True), "unit-norm queries"),
            (lambda: small("rank_encoder", attention="hardmax"), "hardmax"),
        ],
        ids=["GPT-2", "Llama", "XLNet", "qk_norm", "hardmax"],
    )
    def test_and_why(self, make, reason):
        table = layer_bounds(make(), {"input_ids": torch.arange(1, 9)[None]})
        bounds = table[table.metric.isin(["published_bound", "repaired_bound", "sharp_bound", "D", "gamma"])]
        assert (
            len(bounds) and bounds.value.isna().all() and bounds.note.str.startswith("does not apply: " + reason).all()
        )
        measured = table[table.metric.isin(["measured", "beta", "residual"])]
        assert len(measured) and measured.value.notna().all() and (measured.note == "").all()

    def test_a_gated_mlp(self):
        table = layer_bounds(small("llama", layers=1), {"input_ids": torch.arange(1, 9)[None]})
        row = table[table.metric == "lipschitz"].iloc[0]
        assert math.isnan(row.value) and "gated MLP" in row.note

    def test_tokens_that_are_equal_are_said_to_be(self):
        model = RankEncoderModel(RankEncoderConfig(input_dim=6, norm="none", use_skip=False, use_mlp=False))
        table = layer_bounds(model.double(), {"points": torch.ones(1, 4, 6, dtype=torch.float64)})
        assert table[table.metric == "measured"].note.item().startswith("rounding")

    def test_an_adapter_that_the_bounds_do_not_see(self):
        model = BERT.stock("Model")(BERT.stock_config())
        value = model.encoder.layer[1].attention.self.value
        value.register_forward_hook(lambda module, args, output: 2 * output)
        with pytest.raises(ValueError, match="do not add up to its output"):
            layer_bounds(model, tiny_inputs(BERT, "Model"))
