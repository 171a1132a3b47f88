"""Occupancy laws, rank rules and path counts of `hf_rankattn.theory`, against enumeration, simulation and random weights."""

import itertools
import math

import numpy as np
import pytest
from transformers import DeepseekV3Config

from hf_rankattn import theory
from hf_rankattn.probe.weights import rank_limit


class TestOccupancy:
    """Simulated with numpy's own draws, 40 maps each."""

    @staticmethod
    def measured(n, d, unit=False, count=40):
        rng, hit = np.random.default_rng(0), []
        for _ in range(count):
            queries, keys = rng.standard_normal((n, d)), rng.standard_normal((n, d))
            if unit:
                keys /= np.linalg.norm(keys, axis=1, keepdims=True)
            hit.append(len(np.unique((queries @ keys.T).argmax(1))) / n)
        return np.mean(hit)

    def test_free_choice(self):
        for n, mean, deviation in ((64, 40.64, 2.50), (128, 81.10, 3.53), (256, 162.0, 4.99), (512, 323.8, 7.06)):
            assert theory.distinct_columns(n) == pytest.approx(mean, abs=0.06)
            # the published deviations were simulated
            assert theory.distinct_columns_deviation(n) == pytest.approx(deviation, rel=0.03)
        assert theory.distinct_columns(256, 64) == pytest.approx(56.7, abs=0.05)
        assert theory.distinct_columns(64, 256) == pytest.approx(62.9, abs=0.05)

    @pytest.mark.parametrize("n, m", [(3, 3), (3, 2), (2, 5), (4, 4)])
    def test_free_choice_equals_enumeration(self, n, m):
        hits = [len(set(np.unravel_index(place, [n] * m))) for place in range(n**m)]
        assert theory.distinct_columns(n, m) == pytest.approx(np.mean(hits))
        assert theory.distinct_columns_deviation(n, m) == pytest.approx(np.std(hits))

    @pytest.mark.parametrize("n, window", [(5, 1), (5, 2), (5, 3), (5, 5), (5, 9)])
    def test_windows_equal_enumeration(self, n, window):
        options = [range(max(0, i - window + 1), i + 1) for i in range(n)]
        choices = np.stack(np.meshgrid(*options, indexing="ij"), -1).reshape(-1, n)
        mean = np.mean([len(set(row)) for row in choices.tolist()])
        assert theory.windowed_columns(n, window) == pytest.approx(mean)
        if window >= n:
            assert theory.causal_columns(n) == pytest.approx(mean)

    def test_causal_choice(self):
        rng, n = np.random.default_rng(0), 256
        scores = rng.standard_normal((40, n, n))
        scores[:, np.triu(np.ones((n, n), dtype=bool), 1)] = -np.inf
        hit = np.mean([len(np.unique(row)) for row in scores.argmax(-1)]) / n
        assert hit == pytest.approx(0.502, abs=0.015)
        assert hit == pytest.approx(theory.causal_columns(n) / n, abs=0.015)
        assert theory.windowed_columns(512, 32) / 512 == pytest.approx(0.627, abs=0.003)
        assert theory.windowed_columns(512, 128) / 512 == pytest.approx(0.596, abs=0.003)

    def test_the_limits_are_those_of_a_large_random_map(self):
        counts = np.bincount(np.random.default_rng(0).integers(0, 200_000, 200_000), minlength=200_000)
        singular = np.sqrt(counts[counts > 0])
        share = singular / singular.sum()
        limits = theory.hardmax_limits()
        assert limits["rank"] == pytest.approx(len(singular) / 200_000, abs=3e-3)
        assert limits["effective_rank"] == pytest.approx(np.exp(-(share * np.log(share)).sum()) / 200_000, abs=3e-3)
        assert limits["participation_ratio"] == pytest.approx(200_000 / (counts.astype(float) ** 2).sum(), abs=5e-3)

    def test_gaussian_keys(self):
        for d, published in ((8, 0.356), (32, 0.541), (128, 0.608)):
            seen = self.measured(128, d)
            assert seen == pytest.approx(published, abs=0.02)
            assert theory.coverage(128, d) == pytest.approx(seen, abs=0.02)
            # the law for wide heads errs on the low side, by up to 0.03
            assert -0.005 < seen - theory.coverage(128, d, law="log_normal") < 0.035

    def test_unit_keys(self):
        for n, d, published in ((128, 2, 0.556), (128, 8, 0.621), (512, 8, 0.620)):
            seen = self.measured(n, d, unit=True)
            assert seen == pytest.approx(published, abs=0.02)
            assert theory.coverage(n, d, "unit") == pytest.approx(seen, abs=0.012)
        assert theory.coverage(512, 2, "unit") == pytest.approx(5 / 9)
        assert theory.saturation_width(512, 0.95, "unit") < 6

    def test_cells_of_a_random_mosaic(self):
        """Variances of plane and spatial cells known since Gilbert (1962), and of the line by simulation."""
        assert 1 / theory.cell_shape(2) == pytest.approx(0.28018, abs=1e-5)
        assert 1 / theory.cell_shape(3) == pytest.approx(0.17903, abs=2e-4)
        gaps = np.diff(np.sort(np.random.default_rng(0).random(200_000)))
        cells = (gaps[1:] + gaps[:-1]) / 2
        assert cells.var() / cells.mean() ** 2 == pytest.approx(1 / theory.cell_shape(1), abs=0.01)

    def test_the_expected_maximum(self):
        for n, published in ((32, 2.070), (512, 3.044), (4096, 3.626)):
            assert theory.expected_maximum(n) == pytest.approx(published, abs=6e-4)
        assert theory.expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-12)

    def test_saturation_follows_the_square_of_the_logarithm(self):
        published = {64: (4.6, 11.1, 30.9), 512: (12.0, 31.9, 94.9), 4096: (24.4, 65.0, 196)}
        for n, widths in published.items():
            for reached, width in zip((0.5, 0.75, 0.9), widths, strict=True):
                assert theory.saturation_width(n, reached) == pytest.approx(width, rel=0.16 if n == 64 else 0.05)
        few, many = (theory.saturation_width(n, 0.5, law="log_normal") for n in (64, 512))
        assert 2.35 < many / few < 2.9


class TestRankRules:
    @staticmethod
    def rotate(x, base=100.0):
        """Rotary positions on the rows of (n, width)."""
        n, width = x.shape
        angle = np.arange(n)[:, None] * base ** (-np.arange(width // 2) / max(1, width // 2))
        first, second = x[:, : width // 2], x[:, width // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)

    @pytest.mark.parametrize("rotary", ["none", "half", "all"])
    @pytest.mark.parametrize("width", [8, 16, 32])
    def test_grouped_queries_with_rotary_positions(self, width, rotary):
        """Also where one head, or all keys side by side, are wider than the hidden size."""
        rotary_dim = {"none": 0, "half": width // 2, "all": width}[rotary]
        for n, hidden, groups in itertools.product((7, 40, 160), (2, 6, 24, 64), (1, 2, 4)):
            rng = np.random.default_rng([n, hidden, groups, width])
            x = rng.standard_normal((n, hidden))

            def heads(count, rng=rng, x=x):
                for _ in range(count):
                    features = x @ rng.standard_normal((x.shape[1], width))
                    turned = self.rotate(features[:, :rotary_dim], base=3.0)
                    yield np.concatenate([turned, features[:, rotary_dim:]], 1)

            keys = list(heads(groups))
            logits = [query @ keys[0].T for query in heads(4 // groups)]
            matrices = {"head": logits[0], "group": np.concatenate(logits), "keys": np.concatenate(keys, 1)}
            rule = theory.gqa_ranks(
                n, hidden_size=hidden, num_heads=4, num_key_value_heads=groups, head_dim=width, rotary_dim=rotary_dim
            )
            assert {name: np.linalg.matrix_rank(matrix) for name, matrix in matrices.items()} == rule, (n, hidden)

    @pytest.mark.parametrize(
        "nope, rope, kv, q", [(32, 16, 24, 64), (32, 16, 100, 200), (32, 16, 100, 20), (8, 16, 100, None)]
    )
    def test_latent_attention(self, nope, rope, kv, q):
        rng, n, hidden, num_heads = np.random.default_rng(0), 256, 300, 4
        x = rng.standard_normal((n, hidden))

        def random(*shape):
            return rng.standard_normal(shape) / shape[0] ** 0.5

        latent = x @ random(hidden, kv)
        contents = [latent @ random(kv, nope) for _ in range(num_heads)]
        shared = x @ random(hidden, rope)
        query = x @ random(hidden, nope + rope) if q is None else x @ random(hidden, q) @ random(q, nope + rope)
        rule = theory.mla_ranks(
            n, num_heads=num_heads, qk_nope_head_dim=nope, qk_rope_head_dim=rope, kv_lora_rank=kv, q_lora_rank=q
        )
        still = query @ np.concatenate([contents[0], shared], 1).T
        assert np.linalg.matrix_rank(still) == rule["form"]
        turned = np.concatenate([query[:, :nope], self.rotate(query[:, nope:])], 1)
        moved = turned @ np.concatenate([contents[0], self.rotate(shared)], 1).T
        assert np.linalg.matrix_rank(moved) == rule["head"]
        assert np.linalg.matrix_rank(np.concatenate([*contents, shared], 1)) == rule["keys"]

    def test_they_agree_with_what_measuring_reports(self):
        for q in (1536, 100, None):
            config = DeepseekV3Config(q_lora_rank=q)
            names = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank")
            rule = theory.mla_ranks(10**6, num_heads=128, **{name: getattr(config, name) for name in names})
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
            assert rule["form"] == rank_limit(config, width)
            assert rule["head"] == rank_limit(config, width, rotated=True)


class TestPathCounts:
    def test_published(self):
        bert, t5, gpt = (theory.path_counts(name) for name in ("bert-base", "t5-11b", "gpt3-175b"))
        assert bert.mean == pytest.approx(11.0769, abs=1e-4)
        assert bert.distribution()[11] == pytest.approx(0.3827, abs=1e-4) and bert.modes == (11, 12)
        assert bert.distribution()[11] == bert.distribution()[12]
        assert t5.distribution()[24] == pytest.approx(0.8296, abs=1e-4)
        assert gpt.log10_total == pytest.approx(190.73, abs=5e-3)
        assert math.log10(gpt.total) == pytest.approx(gpt.log10_total)

    @pytest.mark.parametrize("name", theory.ARCHITECTURES)
    def test_every_distribution_sums_to_one(self, name):
        counts = theory.path_counts(name)
        share, length = counts.distribution(), np.arange(counts.num_layers + 1)
        assert share.sum() == pytest.approx(1, abs=1e-12)
        assert (share * length).sum() == pytest.approx(counts.mean)
        assert math.sqrt((share * (length - counts.mean) ** 2).sum()) == pytest.approx(counts.standard_deviation)

    def test_counts_equal_enumeration(self):
        lengths = [sum(head > 0 for head in path) for path in itertools.product(range(4), repeat=5)]
        assert theory.path_counts(num_layers=5, num_heads=3).counts() == np.bincount(lengths).tolist()
