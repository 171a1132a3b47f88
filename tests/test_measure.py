"""Pure measurements: published values, invariances, padding, precision, and float64 oracles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hf_rankattn.measure import (
    cheap_metrics,
    collapse_rate,
    composite_norm,
    factor_spectrum,
    relative_residual,
    residual,
    residual_lower_bound,
    spectral_metrics,
    token_cosine,
)
from hf_rankattn.measure.rate import precision_floor
from hf_rankattn.measure.spectrum import states_effective_rank
from hf_rankattn.report.plots import published_residuals


def states_of(max_tokens=6, max_width=5):
    shapes = st.tuples(st.integers(2, max_tokens), st.integers(1, max_width))
    numbers = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))
    return shapes.flatmap(lambda shape: arrays(np.float64, shape, elements=numbers)).map(torch.from_numpy)


def maps_of(max_tokens=8):
    sizes = st.integers(1, max_tokens)
    logits = sizes.flatmap(lambda n: arrays(np.float64, (n, n), elements=st.floats(-20, 20)))
    return logits.map(lambda array: torch.softmax(torch.from_numpy(array), dim=-1))


class TestResidual:
    def test_the_composite_norm_of_the_papers_example(self):
        found = composite_norm(torch.tensor([[-2.0, -1, 0], [1, 2, 3]])).item()
        assert found == pytest.approx(math.sqrt(18), abs=1e-6)
        row, column = torch.zeros(3, 3), torch.zeros(3, 3)
        row[0], column[:, 0] = 1, 1
        separate = composite_norm(row) + composite_norm(column)
        assert separate.item() == pytest.approx(2 * math.sqrt(3)) and composite_norm(row + column).item() == 4

    @settings(max_examples=60, deadline=None)
    @given(states_of(), st.randoms())
    def test_invariances(self, x, random):
        rows, columns = random.sample(range(len(x)), len(x)), random.sample(range(x.shape[1]), x.shape[1])
        for center in ("mean", "median"):
            base = composite_norm(residual(x, center=center))
            assert torch.allclose(composite_norm(residual(x[rows], center=center)), base)
            assert torch.allclose(composite_norm(residual(x[:, columns], center=center)), base)
            assert torch.allclose(composite_norm(residual(-3 * x, center=center)), 3 * base, atol=1e-9)
            shifted = x + torch.arange(x.shape[1])
            assert torch.allclose(residual(shifted, center=center), residual(x, center=center), atol=1e-9)

    @settings(max_examples=60, deadline=None)
    @given(states_of(), states_of(2, 5))
    def test_the_lower_bound_holds_for_every_row_taken_away(self, x, rows):
        bound = residual_lower_bound(x)
        for center in ("mean", "median"):
            assert bound <= composite_norm(residual(x, center=center)) * (1 + 1e-9) + 1e-9
        anything = torch.zeros(x.shape[1], dtype=x.dtype)
        anything[: min(x.shape[1], rows.shape[1])] = rows[0, : x.shape[1]]
        assert bound <= composite_norm(x - anything) * (1 + 1e-9) + 1e-9

    def test_the_median_leaves_the_smallest_one_norm(self):
        x = torch.randn(9, 4, dtype=torch.float64) ** 3
        best = residual(x, center="median").abs().sum(0)
        for candidate in x:
            assert ((x - candidate).abs().sum(0) >= best - 1e-12).all()

    def test_rank_one_is_the_best_of_its_rank(self):
        x = torch.randn(7, 5, dtype=torch.float64)
        singular = torch.linalg.svdvals(x)
        left = residual(x, center="rank1")
        assert torch.allclose(left.square().sum(), singular[1:].square().sum())
        assert torch.linalg.matrix_rank(x - left) == 1

    @pytest.mark.parametrize("center", ["mean", "median", "rank1"])
    def test_padding_changes_nothing(self, center):
        x, mask = torch.randn(3, 9, 5), torch.ones(3, 9)
        mask[0, 6:], mask[1, 3:] = 0, 0
        x[0, 6:] = torch.nan
        for measure in (
            lambda x, mask=None: relative_residual(x, mask, center),
            residual_lower_bound,
            token_cosine,
            lambda x, mask=None: composite_norm(residual(x, mask, center)),
        ):
            together = measure(x, mask)
            alone = [measure(example[real.bool()]) for example, real in zip(x, mask, strict=True)]
            torch.testing.assert_close(together, torch.stack(alone), atol=1e-6, rtol=1e-5)

    def test_collapsed_tokens_sit_at_the_floor(self):
        row = torch.randn(64)
        for dtype, floor in ((torch.float32, 3e-7), (torch.float64, 6e-16)):
            same = row.to(dtype).expand(128, 64)
            assert relative_residual(same).item() < floor
            assert token_cosine(same).item() == pytest.approx(1, abs=1e-5)

    @pytest.mark.parametrize("size", [1e-25, 1e25])
    def test_large_and_small_states_stay_in_range(self, size):
        x = torch.randn(6, 4)
        torch.testing.assert_close(relative_residual(size * x), relative_residual(x), rtol=1e-4, atol=0)

    def test_half_precision_is_measured_in_float32(self):
        x = torch.randn(4, 8, 16).bfloat16()
        assert relative_residual(x).dtype == torch.float32
        assert torch.equal(relative_residual(x), relative_residual(x.float()))

    def test_nonsense_is_refused(self):
        x = torch.randn(2, 3, 4)
        assert torch.isnan(token_cosine(x[:, :1])).all()
        for mask, center, message in (
            (torch.ones(2, 4), "mean", "one entry per row"),
            (torch.tensor([[1, 1, 1], [0, 0, 0]]), "mean", "every row of an example as padding"),
            (None, "mode", "'mean', 'median' or 'rank1'"),
        ):
            with pytest.raises(ValueError, match=message):
                residual(x, mask, center)


RANKS = ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "energy_rank")


def uniform_map(n):
    return torch.full((n, n), 1 / n, dtype=torch.float64)


def sink_map(n, weight=1.0):
    """Every token puts this weight on the first token, and the rest on itself."""
    first = torch.zeros(n, n, dtype=torch.float64)
    first[:, 0] = 1
    return weight * first + (1 - weight) * torch.eye(n, dtype=torch.float64)


class TestSpectrum:
    @pytest.mark.parametrize("n", [2, 10, 64])
    def test_the_closed_forms_of_uniform_identity_and_sink(self, n):
        for maps, rank, gap, coverage, entropy, mass in (
            (uniform_map(n), 1, 0, 1, math.log(n), 1 / n),
            (torch.eye(n, dtype=torch.float64), n, 1, n, 0, 1 / n),
            (sink_map(n), 1, 0, 1, 0, 1),
        ):
            expected = dict.fromkeys(RANKS, rank) | {"argmax_coverage": coverage, "row_entropy": entropy}
            expected |= {"spectral_gap": gap, "sink_mass": mass, "sink_rate": float(mass > 0.3)}
            if rank == n:  # the fewest equal values that hold 90 %
                expected["energy_rank"] = math.ceil(0.9 * n)
            full, cheap = spectral_metrics(maps), cheap_metrics(maps)
            assert {name: value.item() for name, value in full.items()} == pytest.approx(expected, abs=1e-7)
            shared = set(expected) & set(cheap)
            assert {"sink_mass", "sink_rate", "participation_ratio"} <= shared
            for name in shared:
                assert cheap[name].item() == pytest.approx(expected[name], abs=1e-7), name

    @pytest.mark.parametrize("measure", [spectral_metrics, cheap_metrics])
    def test_a_sink_counts_above_three_tenths_on_the_first_token_that_is_no_padding(self, measure):
        n, padding = 10, 3
        for weight, rate in ((0.2, 0), (0.25, 1)):  # the first token keeps its own rest: the mass is w + (1 - w) / n
            metrics = measure(sink_map(n, weight))
            assert metrics["sink_mass"].item() == pytest.approx(weight + (1 - weight) / n)
            assert metrics["sink_rate"] == rate
            left = torch.full((1, n + padding, n + padding), torch.nan, dtype=torch.float64)
            left[:, padding:, padding:] = sink_map(n, weight)
            padded = measure(left, (torch.arange(n + padding) >= padding).long()[None])
            assert (
                padded["sink_mass"].item() == pytest.approx(metrics["sink_mass"].item())
                and padded["sink_rate"] == rate
            )

    def test_the_gap_is_that_of_a_sink_of_half_the_weight(self):
        # M M^T is 1/4 (I + 1 1^T + the first row and column): the ratio follows from its two eigenvalues that are not 1/4
        n = 6
        form = np.eye(n) + np.ones((n, n))
        form[0] += 1
        form[:, 0] += 1
        lowest, *_, second, largest = np.linalg.eigvalsh(form)
        assert second == pytest.approx(1)
        found = spectral_metrics(sink_map(n, 0.5))["spectral_gap"].item()
        assert found == pytest.approx(math.sqrt(second / largest))

    @pytest.mark.parametrize("tokens, width", [(12, 5), (5, 12), (8, 8)])
    def test_the_effective_rank_of_states(self, tokens, width):
        eye = torch.eye(tokens, width, dtype=torch.float64)
        sink = torch.zeros(tokens, width, dtype=torch.float64)
        sink[:, 0] = 1
        x = torch.randn(tokens, width, dtype=torch.float64)
        singular = np.linalg.svd(x.numpy(), compute_uv=False)
        share = singular / singular.sum()
        for states, expected in (
            (torch.ones(tokens, width), 1),
            (sink, 1),
            (eye, min(tokens, width)),
            (1e-20 * eye.float(), min(tokens, width)),
            (x, np.exp(-(share * np.log(share)).sum())),
        ):
            assert states_effective_rank(states).item() == pytest.approx(expected, rel=1e-7)

    def test_padding_and_equal_tokens_add_no_rank_to_states(self):
        x, mask = torch.randn(2, 9, 16), torch.ones(2, 9)
        mask[0, 6:], x[0, 6:] = 0, torch.nan
        together = states_effective_rank(x, mask)
        torch.testing.assert_close(
            together, torch.stack([states_effective_rank(x[0, :6]), states_effective_rank(x[1])])
        )
        same = torch.randn(16).expand(40, 16)
        assert states_effective_rank(same).item() == pytest.approx(1, abs=1e-6)
        assert states_effective_rank(torch.cat([x[1], x[1]])).item() == pytest.approx(together[1].item(), rel=1e-5)

    @settings(max_examples=60, deadline=None)
    @given(maps_of())
    def test_bounds_and_the_float64_oracle(self, maps):
        n = len(maps)
        metrics = spectral_metrics(maps)
        singular = np.linalg.svd(maps.numpy(), compute_uv=False)
        share = singular[singular > 0] / singular.sum()
        assert metrics["numerical_rank"] == (singular > 1e-2 * singular[0]).sum()
        assert metrics["effective_rank"].item() == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-9)
        assert metrics["stable_rank"].item() == pytest.approx((singular**2).sum() / singular[0] ** 2)
        assert metrics["participation_ratio"].item() == pytest.approx((singular**2).sum() ** 2 / (singular**4).sum())
        assert metrics["argmax_coverage"] == len(set(maps.argmax(-1).tolist()))
        kept = (singular**2).cumsum() / (singular**2).sum()
        assert metrics["energy_rank"] in (1 + (kept < 0.9 - 1e-12).sum(), 1 + (kept < 0.9 + 1e-12).sum())
        for name in RANKS:
            assert 1 - 1e-9 <= metrics[name] <= n + 1e-9, name
        assert metrics["effective_rank"] <= (singular > 0).sum() + 1e-9
        assert -1e-12 <= metrics["row_entropy"] <= math.log(n) + 1e-9

    @settings(max_examples=60, deadline=None)
    @given(maps_of())
    def test_the_cheap_set_agrees_within_its_stated_error(self, maps):
        full, cheap = spectral_metrics(maps), cheap_metrics(maps)
        for name in ("participation_ratio", "argmax_coverage", "row_entropy"):
            torch.testing.assert_close(cheap[name], full[name])
        error = (cheap["stable_rank"] / full["stable_rank"] - 1).abs()
        assert error <= cheap["stable_rank_error"] + 1e-12

    @pytest.mark.parametrize("measure", [spectral_metrics, cheap_metrics])
    def test_padding_rows_and_columns_are_dropped(self, measure):
        lengths = [9, 6, 2]
        maps, mask = torch.full((3, 4, 9, 9), torch.nan), torch.zeros(3, 9)
        for example, length in enumerate(lengths):
            maps[example, :, :length, :length] = torch.softmax(2 * torch.randn(4, length, length), -1)
            mask[example, :length] = 1
        together = measure(maps, mask)
        for example, length in enumerate(lengths):
            alone = measure(maps[example, :, :length, :length])
            for name, value in alone.items():
                torch.testing.assert_close(together[name][example], value, atol=1e-6, rtol=1e-5, msg=name)

    def test_the_cheap_set_survives_hard_maps(self):
        maps = torch.zeros(1000, 1000)
        maps[:, 0] = 1
        maps[5, 0], maps[5, 5] = 0, 1
        metrics = cheap_metrics(maps)
        assert all(bool(torch.isfinite(value)) for value in metrics.values())
        exact = spectral_metrics(maps)["stable_rank"]
        assert abs(metrics["stable_rank"] / exact - 1) <= metrics["stable_rank_error"] < 1e-3

    def test_half_precision_maps_have_the_rank_of_their_noise_below_a_thousandth(self):
        logits = torch.randn(8, 128, 2).float() @ torch.randn(8, 2, 128).float() / math.sqrt(2)
        maps = torch.softmax(logits, -1), torch.softmax(logits, -1).bfloat16()
        exact, half = (spectral_metrics(x, rtol=128 * torch.finfo(torch.float32).eps) for x in maps)
        assert 2.3 < (half["numerical_rank"] / exact["numerical_rank"]).mean() < 6
        exact, half = map(spectral_metrics, maps)
        torch.testing.assert_close(half["numerical_rank"], exact["numerical_rank"], atol=1, rtol=0)
        torch.testing.assert_close(half["stable_rank"], exact["stable_rank"], atol=0, rtol=5e-3)

    def test_content_free_maps(self):
        causal = torch.tril(torch.ones(128, 128, dtype=torch.float64)) / torch.arange(1, 129)[:, None]
        metrics = spectral_metrics(causal)
        assert metrics["stable_rank"].item() == pytest.approx(2.0049, abs=1e-3)
        assert metrics["effective_rank"].item() == pytest.approx(32.0, abs=0.1)
        assert torch.linalg.svdvals(causal)[0].item() == pytest.approx(1.6462, abs=1e-3)
        assert spectral_metrics(torch.full((128, 128), 1 / 128))["numerical_rank"] == 1

    def test_nonsense_is_refused(self):
        maps = torch.softmax(torch.randn(2, 4, 5, 5), -1)
        for subject, mask, options, message in (
            (maps, torch.ones(3, 5), {}, "does not fit maps"),
            (maps, torch.zeros(2, 5), {}, "every row"),
            (maps, None, {"rtol": 1.0}, "`rtol` must be in"),
            (maps[..., :3], torch.ones(2, 5), {}, "needs square maps"),
        ):
            with pytest.raises(ValueError, match=message):
                spectral_metrics(subject, mask, **options)


class TestFactors:
    @pytest.mark.parametrize("center_rows", [False, True])
    def test_the_spectrum_of_logits_from_their_factors(self, center_rows):
        query, key = torch.randn(3, 128, 32, dtype=torch.float64), torch.randn(3, 128, 32, dtype=torch.float64)
        logits = query @ key.transpose(1, 2)
        if center_rows:
            logits = logits - logits.mean(-1, keepdim=True)
        torch.testing.assert_close(
            factor_spectrum(query, key, center_rows), torch.linalg.svdvals(logits)[:, :32], rtol=1e-12, atol=1e-10
        )

    def test_unequal_widths_are_refused(self):
        with pytest.raises(ValueError, match="one width"):
            factor_spectrum(torch.randn(4, 3), torch.randn(4, 2))


class TestRate:
    def test_the_published_curves(self):
        bert = collapse_rate([0.5928, 0.0157, 3.7e-7, 4.4e-16, 4.1e-16])
        assert bert.kind == "doubly_exponential" and bert.exponent == pytest.approx(3, abs=0.1) and bert.used == 3
        xlnet = collapse_rate([0.9975, 0.0038, 1.3e-4, 5.4e-6, 2.2e-7, 1.1e-8, 4.4e-10, 1.9e-11, 7.6e-13, 3.8e-14])
        assert xlnet.kind == "geometric" and xlnet.exponent == pytest.approx(1, abs=0.1)
        assert collapse_rate([0.588, 0.558, 0.546, 0.505, 0.494, 0.489]).kind == "none"

    def test_a_floor_that_comes_early_is_recognised(self):
        bert = collapse_rate(torch.tensor([0.588, 0.0160, 4.3e-7, 1.9e-7, 2.0e-7], dtype=torch.float32))
        assert bert.kind == "doubly_exponential" and bert.used == 2 and bert.at_least
        xlnet = torch.tensor([0.996, 4.0e-3, 1.5e-4, 6.5e-6, 3.3e-7, 2e-7], dtype=torch.float32)
        assert collapse_rate(xlnet).kind == "geometric"

    # ALBERT's san+mlp rises to .88 at layer 2 before it falls: it has no one rate
    @pytest.mark.parametrize("family, variant", [("bert", "san"), ("bert", "san+mlp"), ("albert", "san")])
    def test_published_curves_of_trained_models_fall_faster_than_geometrically(self, family, variant):
        curves = published_residuals(family, random_init=False)
        values = curves[curves.variant == variant].value.tolist()
        rate = collapse_rate(values)
        assert rate.kind == "doubly_exponential" and 1.4 < rate.exponent < 3, rate

    def test_the_floor_is_never_fitted(self):
        rate = collapse_rate([0.588, 0.0160, 4.3e-7, *[1.9e-7, 2.0e-7] * 5])  # a list of float32 residuals
        assert rate.kind == "doubly_exponential" and rate.used == 2
        assert collapse_rate([0.5, 0.01]).kind == "unclear"
        series = [0.5, 0.1, 0.02, 0.004]
        clean, noisy = collapse_rate(series), collapse_rate([*series, 3e-16, 5e-16, 2e-16])
        assert noisy.exponent == clean.exponent and noisy.used == 4

    def test_half_precision_has_a_floor_of_its_own(self):
        assert 1e-3 < precision_floor(torch.bfloat16) < 3e-3 and precision_floor(torch.float32) < 3e-7
        assert collapse_rate(torch.tensor([0.9, 0.3, 4e-3, 3e-3], dtype=torch.bfloat16)).used == 2

    @settings(max_examples=40, deadline=None)
    @given(st.floats(0.05, 0.5), st.floats(0.02, 0.6))
    def test_exact_series_are_recovered(self, start, factor):
        geometric = collapse_rate(torch.tensor([start * factor**k for k in range(5)], dtype=torch.float64))
        assert geometric.kind == "geometric" and geometric.exponent == pytest.approx(1, abs=1e-6)
        assert geometric.factor == pytest.approx(factor)
        cubic = collapse_rate(torch.tensor([start ** (3**k) for k in range(3)], dtype=torch.float64))
        assert cubic.kind == "doubly_exponential" and cubic.exponent == pytest.approx(3, abs=1e-6)

    def test_nonsense_is_refused(self):
        with pytest.raises(ValueError, match="at least two layers"):
            collapse_rate([0.5])
        with pytest.raises(ValueError, match="finite and not negative"):
            collapse_rate([0.5, math.nan])
