"""Errors weighted by the attention they meet: the packed quadratic and its descent."""

import pytest
import torch
from testing_common import ALBERT, BERT
from testing_convert import difference, plain_inputs, trained_like

from hf_rankattn import convert_rank
from hf_rankattn.convert.factors import best_factors
from hf_rankattn.convert.weighted import attention_weights, paired_moment, refine_factors, weighted_loss


class TestAttentionObjective:
    def test_the_packed_loss_is_the_weighted_variance(self):
        generator = torch.Generator().manual_seed(0)
        query, key = (torch.randn(1, n, 5, generator=generator, dtype=torch.float64) for n in (6, 7))
        weights = attention_weights(query, key, 0.5, torch.ones(6, 7, dtype=torch.bool))
        left, right = (torch.randn(5, 2, generator=generator, dtype=torch.float64) for _ in range(2))
        error = query[0] @ (torch.eye(5, dtype=torch.float64) - left @ right.T) @ key[0].T
        mean = (weights[0] * error).sum(-1, keepdim=True)
        naive = (weights[0] * (error - mean).square()).sum()
        torch.testing.assert_close(weighted_loss(paired_moment(query, key, weights)[0], left, right), naive)

    def test_refining_lowers_the_loss_to_a_point_where_its_gradient_is_small(self):
        generator = torch.Generator().manual_seed(1)
        query, key = (torch.randn(2, 40, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        visible = torch.ones(40, 40, dtype=torch.bool)
        pairs = paired_moment(query, key, attention_weights(query, key, 0.4, visible))
        roots = [torch.linalg.cholesky(x.mT @ x) for x in (query, key)]
        start = best_factors(*roots, torch.eye(6, dtype=torch.float64).expand(2, -1, -1), 2)
        refined = refine_factors(pairs, start.query, start.key)
        for head in range(2):
            before = weighted_loss(pairs[head], start.query[head], start.key[head])
            left = refined[0][head].clone().requires_grad_()
            after = weighted_loss(pairs[head], left, refined[1][head])
            after.backward()
            assert after < before
            assert left.grad.norm() * left.norm() < 1e-6 * after.abs()

    def test_attention_moves_less_than_with_the_plain_objective(self):
        model, batch = trained_like(BERT, num_hidden_layers=1), plain_inputs(BERT)
        model.set_attn_implementation("eager")
        mask = batch["attention_mask"].bool()

        def divergence(converted):
            converted.set_attn_implementation("eager")
            ours, theirs = (m(**batch, output_attentions=True).attentions[0] for m in (converted, model))
            rows = torch.special.xlogy(theirs, theirs / ours.clamp(min=1e-30)).sum(-1)
            return rows.transpose(1, 2)[mask].sum()

        plain, weighted = (
            divergence(convert_rank(model, 6, calibration=batch, objective=o)) for o in ("logits", "attention")
        )
        assert weighted < plain

    @pytest.mark.parametrize("tokens", [[3, 4], [3, 4, 3, 4], [5, 5, 5, 6]], ids=str)
    @pytest.mark.parametrize("rank", [4, 7])
    def test_texts_that_span_less_than_the_rank_are_kept_exactly(self, tokens, rank):
        """Their coefficients are singular, and of what rounding leaves there nothing is to be fitted."""
        model, batch = trained_like(BERT), {"input_ids": torch.tensor([tokens])}
        converted = convert_rank(model, rank, calibration=batch, objective="attention")
        assert difference(converted, model, batch) < 1e-6
        assert torch.isfinite(converted(input_ids=torch.arange(9)[None]).last_hidden_state).all()

    def test_examples_are_added_to_one_tensor(self):
        generator = torch.Generator().manual_seed(2)
        examples = [[torch.randn(2, n, 3, generator=generator) for _ in range(2)] for n in (4, 6)]
        total = torch.zeros(2, 6, 6)
        apart = []
        for query, key in examples:
            weights = attention_weights(query, key, 0.5, torch.ones(query.shape[1], key.shape[1], dtype=torch.bool))
            assert paired_moment(query, key, weights, total) is total
            apart.append(paired_moment(query, key, weights))
        torch.testing.assert_close(total, sum(apart))

    @pytest.mark.parametrize("family", [BERT, ALBERT], ids=["Bert", "Albert"])
    def test_the_default_dtype_of_torch_does_not_matter(self, family, request):
        model, batch = trained_like(family).float(), plain_inputs(family)
        usual = convert_rank(model, 3, calibration=batch, objective="attention")
        request.getfixturevalue("float64_default")
        other = convert_rank(model, 3, calibration=batch, objective="attention")
        assert {weight.dtype for weight in other.parameters()} == {torch.float32}
        assert difference(other, usual, batch) == 0
