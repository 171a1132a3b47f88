"""RankEncoder: the papers' encoder, its parts switched on and off, and what its geometries cost."""

import pytest
import torch
from testing_common import ALBERT, BERT
from torch import nn
from transformers import AutoModel, BertConfig, BertModel

from hf_rankattn import (
    RankEncoderConfig,
    RankEncoderForPointRegression,
    RankEncoderForTokenClassification,
    RankEncoderModel,
    equal_budget_grid,
    parameter_counts,
)


def sphere(*shape: int) -> torch.Tensor:
    return nn.functional.normalize(torch.randn(*shape), dim=-1)


def naive_layer(layer, states, mask=None):
    """One post-norm layer of the papers, head by head, in float64."""
    attention = layer.attention
    update = torch.zeros_like(states)
    for h in range(attention.num_attention_heads):
        qk, vo = (slice(h * w, (h + 1) * w) for w in (attention.qk_rank, attention.v_head_dim))
        query = states @ attention.query.weight[qk].T + attention.query.bias[qk]
        key = states @ attention.key.weight[qk].T + attention.key.bias[qk]
        value = states @ attention.value.weight[vo].T + attention.value.bias[vo]
        logits = query @ key.transpose(1, 2) * attention.qk_rank**-0.5
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None].bool(), -torch.inf)
        update = update + torch.softmax(logits, -1) @ value @ attention.output.weight[:, vo].T
    update = update * attention.output_scale + attention.output.bias
    states = states + update
    states = states / states.norm(dim=-1, keepdim=True) * layer.attention_norm.scale
    hidden = torch.relu(states @ layer.mlp.up.weight.T + layer.mlp.up.bias)
    states = states + hidden @ layer.mlp.down.weight.T + layer.mlp.down.bias
    return states / states.norm(dim=-1, keepdim=True) * layer.mlp_norm.scale


@pytest.mark.parametrize("heads, rank, width", [(1, 8, 8), (4, 2, 2), (64, 1, 1), (5, 3, 7), (33, 2, 1), (130, 1, 2)])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_forward_and_gradients_equal_the_naive_oracle(heads, rank, width, masked, dtype):
    geometry = {"num_attention_heads": heads, "qk_rank": rank, "v_head_dim": width}
    config = RankEncoderConfig(input_dim=8, num_hidden_layers=2, intermediate_size=16, **geometry)
    model = RankEncoderModel(config).to(dtype)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    points = torch.randn(3, 7, 8, dtype=dtype, requires_grad=True)
    mask = torch.ones(3, 7)
    mask[1, 4:] = 0
    mask = mask if masked else None
    probe = torch.randn(3, 7, 8, dtype=dtype)

    oracle_model = RankEncoderModel(config).double()
    oracle_model.load_state_dict(model.state_dict())
    oracle_points = points.detach().double().requires_grad_()
    states = oracle_points if mask is None else oracle_points * mask[..., None]
    for layer in oracle_model.layers:
        states = naive_layer(layer, states, mask)
    (states * probe.double()).sum().backward()

    tolerance = {"atol": 1e-10, "rtol": 1e-8} if dtype == torch.float64 else {"atol": 2e-4, "rtol": 1e-3}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        points.grad = None
        output = model(points=points, attention_mask=mask).last_hidden_state
        (output * probe).sum().backward()
        torch.testing.assert_close(output.double(), states, **tolerance)
        torch.testing.assert_close(points.grad.double(), oracle_points.grad, **tolerance)
        for ours, oracle in zip(model.parameters(), oracle_model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.double(), oracle.grad, **tolerance)


def test_many_heads_are_the_mean_of_ordinary_layers():
    """What the original did with a loop over a width multiplier: the average of independent attention modules."""
    blocks = [nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(3)]
    config = RankEncoderConfig(
        input_dim=16, num_attention_heads=12, qk_rank=4, v_head_dim=4, use_mlp=False, use_skip=False, norm="none"
    )
    model = RankEncoderModel(config)
    attention = model.layers[0].attention
    with torch.no_grad():
        for name, start in (("query", 0), ("key", 16), ("value", 32)):
            rows = [block.in_proj_weight[start : start + 16] for block in blocks]
            getattr(attention, name).weight.copy_(torch.cat(rows))
        attention.output.weight.copy_(torch.cat([block.out_proj.weight for block in blocks], dim=1))
    points = nn.functional.normalize(torch.randn(5, 6, 16), dim=-1)
    looped = sum(block(points, points, points, need_weights=False)[0] for block in blocks) / 3
    assert (model(points=points).last_hidden_state - looped).abs().max() < 1e-7


class TestParts:
    def test_hardmax_takes_the_best_key(self):
        config = RankEncoderConfig(input_dim=6, attention="hardmax", num_attention_heads=2, use_mlp=False, norm="none")
        model = RankEncoderModel(config)
        points = torch.randn(2, 5, 6)
        results = []
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            results.append(model(points=points).last_hidden_state)
        torch.testing.assert_close(*results)
        model.set_attn_implementation("eager")
        (maps,) = model(points=points, output_attentions=True).attentions
        assert set(maps.unique().tolist()) == {0.0, 1.0} and (maps.sum(-1) == 1).all()
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        (maps,) = model(points=points, attention_mask=mask, output_attentions=True).attentions
        assert maps[0, :, :, 3:].sum() == 0

    def test_skip_free_layers_have_no_path_around(self):
        config = RankEncoderConfig(input_dim=6, use_skip=False, use_mlp=False, norm="none", attention_bias=False)
        model = RankEncoderModel(config)
        nn.init.zeros_(model.layers[0].attention.value.weight)
        assert model(points=torch.randn(2, 5, 6)).last_hidden_state.abs().max() == 0

    @pytest.mark.parametrize("placement", ["post", "pre"])
    @pytest.mark.parametrize("norm", ["l2", "layer", "rms", "none"])
    def test_norms(self, norm, placement):
        config = RankEncoderConfig(input_dim=6, norm=norm, norm_placement=placement, num_hidden_layers=2)
        model = RankEncoderModel(config)
        states = model(points=torch.randn(2, 5, 6)).last_hidden_state
        expected = {"l2": 1.0, "layer": 6**0.5, "rms": 6**0.5}.get(norm)
        if expected:
            torch.testing.assert_close(states.norm(dim=-1), torch.full((2, 5), expected), atol=1e-3, rtol=1e-3)
        zero = model(points=torch.zeros(1, 3, 6))
        zero.last_hidden_state.sum().backward()
        assert torch.isfinite(zero.last_hidden_state).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    def test_positions_break_the_symmetry_of_tokens(self):
        points, swap = torch.randn(1, 4, 6), [1, 0, 2, 3]
        for position in ("none", "additive", "concatenated"):
            model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=6, position=position))
            assert model.config.hidden_size == (12 if position == "concatenated" else 6)
            out, swapped = model(points=points).logits, model(points=points[:, swap]).logits
            assert out.shape == (1, 4, 6)
            assert torch.allclose(out[:, swap], swapped, atol=1e-5) == (position == "none")

    def test_queries_read_points_and_are_read_by_nobody(self):
        model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=6, num_hidden_layers=2))
        points, queries = torch.randn(2, 5, 6), torch.randn(2, 3, 6)
        together = model(points=points, queries=queries).logits
        assert together.shape == (2, 3, 6)
        alone = model(points=points, queries=queries[:, 1:2]).logits
        torch.testing.assert_close(together[:, 1:2], alone)
        model.set_attn_implementation("eager")
        attentions = model(points=points, queries=queries, output_attentions=True).attentions
        assert len(attentions) == 2
        for maps in attentions:
            assert maps[..., 5:].abs().max() == 0, "no token attends to a query, not even the query itself"
        moved = model(points=points + 1.0, queries=queries).logits
        assert not torch.allclose(moved, together)

    def test_padding_counts_neither_in_the_maps_nor_in_the_loss_whatever_is_in_it(self):
        model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=6))
        points, labels, mask = torch.randn(2, 5, 6), torch.randn(2, 5, 6), torch.ones(2, 5)
        mask[0, 3:] = 0
        padded = model(points=points[:1], labels=labels[:1], attention_mask=mask[:1])
        torch.testing.assert_close(padded.loss, model(points=points[:1, :3], labels=labels[:1, :3]).loss)
        clean = model(points=points, labels=labels, attention_mask=mask)
        points[0, 3:], labels[0, 3:] = torch.nan, torch.inf
        spoilt = model(points=points, labels=labels, attention_mask=mask)
        assert torch.equal(clean.loss, spoilt.loss) and torch.equal(clean.logits[0, :3], spoilt.logits[0, :3])

    def test_points_come_in_any_precision(self):
        model = RankEncoderModel(RankEncoderConfig(input_dim=6))
        points = torch.randn(2, 5, 6)
        assert torch.equal(model(points=points.double()).last_hidden_state, model(points=points).last_hidden_state)

    def test_token_classification_on_words_and_on_points(self):
        words = RankEncoderForTokenClassification(
            RankEncoderConfig(vocab_size=11, hidden_size=8, position="additive", num_labels=4, pad_token_id=0)
        )
        labels = torch.tensor([[1, 2, -100]])
        output = words(input_ids=torch.tensor([[3, 4, 0]]), attention_mask=torch.tensor([[1, 1, 0]]), labels=labels)
        assert output.logits.shape == (1, 3, 4) and torch.isfinite(output.loss)
        hull = RankEncoderForTokenClassification(RankEncoderConfig(input_dim=2, hidden_size=12, input_map="mlp"))
        assert hull(points=torch.randn(2, 5, 2)).logits.shape == (2, 5, 2)

    def test_the_loss_of_a_float64_classifier_is_float64(self):
        model = RankEncoderForTokenClassification(RankEncoderConfig(input_dim=6)).double()
        output = model(points=sphere(2, 5, 6).double(), labels=torch.ones(2, 5, dtype=torch.long))
        expected = nn.functional.cross_entropy(output.logits.flatten(0, 1), torch.ones(10, dtype=torch.long))
        torch.testing.assert_close(output.loss, expected)

    def test_the_initialisation_is_that_of_the_papers_and_layers_start_different(self):
        geometry = {"num_attention_heads": 32, "qk_rank": 16, "v_head_dim": 16}
        model = RankEncoderModel(RankEncoderConfig(input_dim=64, num_hidden_layers=2, **geometry))
        attention, other = (layer.attention for layer in model.layers)
        assert not torch.equal(attention.query.weight, other.query.weight)
        bound = (6 / (4 * 64)) ** 0.5
        assert 0.98 * bound < attention.query.weight.abs().max() <= bound
        assert 0.98 / 8 < attention.output.weight.abs().max() <= 1 / 8
        assert attention.output_scale == pytest.approx(1 / 8)
        assert attention.query.bias.abs().max() == 0

    def test_half_precision_and_checkpointing(self):
        model = RankEncoderModel(RankEncoderConfig(input_dim=16, num_attention_heads=4, qk_norm=True)).float().train()
        points = sphere(2, 5, 16).float()
        exact = model(points=points).last_hidden_state
        half = model.to(torch.bfloat16)(points=points.bfloat16()).last_hidden_state
        torch.testing.assert_close(half.float(), exact, atol=3e-2, rtol=3e-2)
        gradients = []
        for switch in (model.float().gradient_checkpointing_disable, model.gradient_checkpointing_enable):
            switch()
            model.zero_grad()
            model(points=points).last_hidden_state.square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class TestAccounting:
    @pytest.mark.parametrize("blocks, live", [(1, 280_898), (8, 396_930), (64, 1_325_186)])
    def test_both_conventions(self, blocks, live):
        config = RankEncoderConfig(input_dim=64, num_attention_heads=4 * blocks, qk_rank=16, v_head_dim=16)
        counts = parameter_counts(config)
        assert counts.published == [64**2 * blocks] and counts.query_key == [2 * 64**2 * blocks]
        assert counts.live == live == sum(p.numel() for p in RankEncoderModel(config).parameters())

    def test_every_live_parameter_gets_a_gradient(self):
        config = RankEncoderConfig(input_dim=8, num_attention_heads=2, num_hidden_layers=2, qk_norm=True)
        model = RankEncoderModel(config)
        model(points=sphere(2, 5, 8)).last_hidden_state.square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_frozen_shared_and_cross_attention_parameters(self):
        model = AutoModel.from_config(ALBERT.rank_config(num_hidden_groups=1, qk_rank=2))
        before = parameter_counts(model)
        assert before.published == [2 * 32 * 4] * 4
        model.embeddings.requires_grad_(False)
        assert parameter_counts(model).live < before.live
        model = AutoModel.from_config(BERT.rank_config(qk_rank=2, is_decoder=True, add_cross_attention=True))
        weights = [w for name, w in model.named_parameters() if name.endswith(("query.weight", "key.weight"))]
        assert sum(w.numel() for w in weights) == sum(parameter_counts(model).query_key)

    def test_a_model_without_rank_fields_is_refused(self):
        with pytest.raises(ValueError, match="takes a rank model or its config, got a BertModel"):
            parameter_counts(BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)))

    def test_the_grid_spends_the_budget(self):
        for power, heads in ((2, 1), (2.5, 8), (3, 64)):
            grid = equal_budget_grid(int(64**power), 64)
            assert [g["qk_rank"] for g in grid] == [1, 2, 4, 8, 16, 32, 64]
            assert grid[-1]["num_attention_heads"] == heads
            for geometry in grid:
                counts = parameter_counts(RankEncoderConfig(input_dim=64, **geometry))
                assert counts.published == [int(64**power)]

    def test_a_grid_that_does_not_come_out_even_is_refused(self):
        for budget, ranks, message in (
            (64, [3], "rank 3 does not spend the budget"),
            (63, None, "no power of two gives a whole number of heads"),
            (0, None, "at least 1"),
            (64.0, None, "must be an integer"),
            (64, [], "`ranks` is empty"),
        ):
            with pytest.raises(ValueError, match=message):
                equal_budget_grid(budget, 8, ranks=ranks)


def test_tuples_in_place_of_outputs():
    """`return_dict=False` in a config reaches the encoder inside a head as well, which the head has to expect."""
    points = torch.randn(2, 5, 4)
    for head in (RankEncoderForPointRegression, RankEncoderForTokenClassification):
        model = head(RankEncoderConfig(input_dim=4)).eval()
        whole = model(points=points).logits
        model.config.return_dict = False
        (logits, *_) = model(points=points)
        assert torch.equal(logits, whole)
