"""The constructions as models: what they measure on the tasks is what the formulas say, saved and loaded too."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hf_rankattn import RankEncoderForPointRegression, ablate, theory
from hf_rankattn.tasks import task_builder
from hf_rankattn.theory import constructions


def errors(model, task, rows, **parameters) -> np.ndarray:
    """Squared error of each row of the test split."""
    drawn = task_builder(task, **parameters).sample("test", rows)
    found = []
    with torch.no_grad():
        for start in range(0, rows, 500):
            batch = {name: torch.from_numpy(array[start : start + 500]) for name, array in drawn.items()}
            labels = batch.pop("labels")
            found.append((model(**batch).logits - labels).square().sum(-1).mean(-1))
    return torch.cat(found).double().numpy()


def nearest(model, d, rows=8000, **parameters) -> tuple[float, float]:
    """Mean error on two orthonormal points, and four times its standard error."""
    found = errors(model, "nearest_neighbor", rows, dim=d, num_points=2, **parameters)
    return found.mean(), 4 * found.std() / math.sqrt(rows)


class TestFullRank:
    @pytest.mark.parametrize("layers", [1, 3])
    def test_the_perfect_encoder(self, layers):
        model = constructions.perfect_encoder(64, layers)
        assert errors(model, "farthest_neighbor", 500, dim=64, num_points=16).mean() < 1e-8

    def test_a_hard_head_is_never_wrong(self):
        assert nearest(constructions.full_rank_head(16), 16)[0] == 0
        found = errors(constructions.full_rank_head(16, farthest=True), "farthest_neighbor", 500, dim=16, num_points=8)
        assert found.max() == 0

    @pytest.mark.parametrize("d, beta", [(16, 100), (64, 100), (64, 10), (8, 1)])
    def test_a_soft_head(self, d, beta):
        mean, tolerance = nearest(constructions.full_rank_head(d, beta), d, 20_000)
        assert mean == pytest.approx(theory.soft_error(d, beta), abs=tolerance)

    def test_self_attention_to_the_farthest(self):
        model = constructions.full_rank_head(64, 300, farthest=True)
        found = errors(model, "farthest_neighbor", 1000, dim=64, num_points=16)
        assert found.mean() == pytest.approx(0.018, abs=0.0015)


class TestRankOne:
    @pytest.mark.parametrize("d, count", [(2, 5), (3, 20), (8, 64), (16, 128)])
    @pytest.mark.parametrize("pairing", ["independent", "uniform_cosine"])
    def test_random_features(self, d, count, pairing):
        mean, tolerance = nearest(constructions.random_features(d, count, 0, pairing), d)
        expected = theory.expected_error(*theory.random_heads(d, count, 0, pairing))
        assert mean == pytest.approx(expected, abs=tolerance) and tolerance < 0.03
        if d > 2:
            assert mean > theory.lower_bound(d, 1, count)

    @pytest.mark.parametrize("best_scalar", [False, True])
    @pytest.mark.parametrize("count", [1, 2, 4, 9])
    def test_equal_spacing(self, count, best_scalar):
        mean, tolerance = nearest(constructions.spaced_layer(count, best_scalar), 2, 20_000)
        assert mean == pytest.approx(theory.spaced_error(count, best_scalar), abs=tolerance)


class TestMajority:
    def test_published(self):
        means = [nearest(constructions.majority_vote(16, 161, seed), 16, 1500)[0] for seed in range(2)]
        assert np.mean(means) == pytest.approx(0.280, rel=0.12)

    @pytest.mark.parametrize("d, count", [(3, 1), (6, 2), (8, 5), (8, 33)])
    def test_few_voters(self, d, count):
        """Fewer voters than dimensions too, where the second layer's heads are wider than one, and ties."""
        means = [nearest(constructions.majority_vote(d, count, seed), d, 500, seed=seed)[0] for seed in range(40)]
        spread = 4 * np.std(means) / math.sqrt(40)
        assert np.mean(means) == pytest.approx(theory.majority_error(d, count), abs=spread)

    def test_it_is_the_vote(self):
        """Against a vote counted by hand, with several queries a row."""
        model = constructions.majority_vote(8, 21, seed=3, num_queries=3)
        queries, keys = theory.random_heads(8, 21, 3, "equal")
        drawn = task_builder("nearest_neighbor", dim=8, num_points=2, num_queries=3).sample("test", 50)
        points, asked = drawn["points"], drawn["queries"]
        scores = np.einsum("rmh,rnh->rmhn", asked @ queries.T, points @ keys.T)
        elected = (scores.argmax(-1) == 1).sum(-1) > 10
        expected = np.take_along_axis(points, elected.astype(int)[..., None], axis=1)
        with torch.no_grad():
            found = model(points=torch.from_numpy(points), queries=torch.from_numpy(asked)).logits
        assert np.allclose(found, expected, atol=1e-6)

    def test_without_the_skip_there_is_no_vote(self):
        model = constructions.majority_vote(8, 101, seed=0)
        whole = nearest(model, 8, 500)[0]
        with ablate(model, attention_skip=True):
            assert nearest(model, 8, 500)[0] > whole + 0.3


MODELS = {
    "perfect": lambda: constructions.perfect_encoder(8, 2),
    "soft": lambda: constructions.full_rank_head(8, 10.0),
    "hard": lambda: constructions.full_rank_head(8),
    "features": lambda: constructions.random_features(8, 20, 0),
    "spaced": lambda: constructions.spaced_layer(3),
    "majority": lambda: constructions.majority_vote(8, 5, 0),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_they_are_saved_and_loaded_to_the_last_bit(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    loaded = RankEncoderForPointRegression.from_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    d = model.config.input_dim
    batch = {name: torch.randn(3, count, d, generator=generator) for name, count in (("points", 2), ("queries", 1))}
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
        assert AutoModel.from_pretrained(tmp_path)(**batch).last_hidden_state.isfinite().all()


BAD = {
    "no_layers": lambda: constructions.perfect_encoder(8, 0),
    "infinite_gain": lambda: constructions.perfect_encoder(8, gain=math.inf),
    "negative_beta": lambda: constructions.full_rank_head(8, -1.0),
    "heads_that_are_not_unit": lambda: constructions.rank_one_layer(2 * np.eye(3), np.eye(3)),
    "weights_that_are_not_finite": lambda: constructions.rank_one_layer(np.eye(3), np.eye(3), [1.0, np.nan, 1.0]),
    "no_voters": lambda: constructions.majority_vote(8, 0, 0),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
def test_bad_input_is_a_clear_error(make):
    with pytest.raises(ValueError, match=r"`\w+`"):
        make()
