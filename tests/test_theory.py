"""The closed forms of `hf_rankattn.theory`, against quadrature, simulation, exact arithmetic and the published values."""

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.special
import scipy.stats

import hf_rankattn
from hf_rankattn import theory
from hf_rankattn.theory import agreement
from hf_rankattn.theory.upper_bounds import mean_square_arcsine


def sphere(rng, count, d):
    rows = rng.standard_normal((count, d))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def coordinate_mean(d, function):
    """E f(u) of a coordinate u on the sphere, by scipy."""

    def integrand(angle):
        return function(math.sin(angle)) * math.cos(angle) ** (d - 2)

    ends, points = (-math.pi / 2, math.pi / 2), (-0.3, -0.02, 0, 0.02, 0.3)
    whole = scipy.integrate.quad(integrand, *ends, points=points, epsabs=1e-13, limit=400)[0]
    return whole / scipy.special.beta(0.5, (d - 1) / 2)


class TestHarmonics:
    def test_dimensions(self):
        assert [theory.harmonic_dimension(8, degree) for degree in (1, 3, 5, 7)] == [8, 112, 672, 2640]
        assert [theory.harmonic_dimension(64, degree) for degree in (3, 5)] == [45696, 10378368]
        assert [theory.harmonic_dimension(2, degree) for degree in (0, 1, 9)] == [1, 2, 2]

    @pytest.mark.parametrize("d", [3, 4, 8, 20])
    def test_legendre_polynomials_are_orthogonal_with_these_dimensions(self, d):
        for degree in (1, 4, 5):
            square = coordinate_mean(d, lambda u, n=degree: theory.legendre(d, n, u)[n] ** 2)
            assert square == pytest.approx(1 / theory.harmonic_dimension(d, degree), rel=1e-9)
            mixed = coordinate_mean(d, lambda u, n=degree: np.prod(theory.legendre(d, n + 2, u)[[n, n + 2]]))
            assert abs(mixed) < 1e-12

    @pytest.mark.parametrize("d", [2, 3, 5, 8, 20])
    def test_sign_coefficients_equal_quadrature(self, d):
        for degree in (1, 2, 3, 7):
            size = math.sqrt(theory.harmonic_dimension(d, degree))
            integral = coordinate_mean(d, lambda u, n=degree: np.sign(u) * theory.legendre(d, n, u)[n])
            assert theory.sign_coefficient(d, degree) == pytest.approx(size * integral, abs=1e-8)

    def test_published_values(self):
        assert theory.sign_coefficient(3, 1) == pytest.approx(math.sqrt(3) / 2, abs=1e-12)
        assert theory.sign_coefficient(3, 3) == pytest.approx(-0.330719, abs=1e-6)
        assert theory.sign_coefficient(64, 1) ** 2 == pytest.approx(0.64161, abs=1e-5)
        assert theory.sign_energies(8, 1001).sum() == pytest.approx(0.9994, abs=2e-4)
        for d, floor in ((4, 0.13975), (8, 0.16122), (16, 0.17159), (64, 0.17919)):
            assert theory.degree_floor(d, 1) == pytest.approx(floor, abs=1e-5)
        assert theory.degree_floor(64, 0) == 0.5

    def test_energies_are_the_squares_of_the_coefficients(self):
        for d in (2, 3, 64, 1000):
            squares = [theory.sign_coefficient(d, 2 * k + 1) ** 2 for k in range(300)]
            assert np.allclose(theory.sign_energies(d, 300), squares, rtol=1e-9)

    def test_energies_of_dimension_three_leave_an_exact_rest(self):
        k = 5000
        rest = Fraction(math.comb(2 * k, k), 4**k) ** 2
        assert 1 - theory.sign_energies(3, k).sum() == pytest.approx(float(rest), rel=1e-8)

    def test_the_weight_of_a_continuum_of_heads(self):
        """E[u(q.k) sign(q.y) sign(k.w)] is the sign of w.y, up to the degree at which u ends."""
        rng, d, count = np.random.default_rng(0), 5, 400_000
        queries, keys = sphere(rng, count, d), sphere(rng, count, d)
        axis = np.eye(d)[0]
        signs = np.sign(queries @ axis) * np.sign(keys @ axis)
        for degree in (1, 3):
            only = theory.continuous_weight(d, degree, (queries * keys).sum(1))
            if degree > 1:
                only = only - theory.continuous_weight(d, degree - 2, (queries * keys).sum(1))
            expected = theory.sign_coefficient(d, degree) * math.sqrt(theory.harmonic_dimension(d, degree))
            values = only * signs
            assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(count), degree
        for d, peak in ((4, 2.65e6), (6, 8.33e9), (8, 7.78e12)):
            assert abs(theory.continuous_weight(d, 49, 1.0)) == pytest.approx(peak, rel=2e-3)


class TestHeads:
    def test_published_accuracies(self):
        for d, accuracy in ((2, 0.75), (4, 0.648679), (8, 0.596892), (64, 0.532039)):
            assert theory.head_accuracy(d, 1.0) == pytest.approx(accuracy, abs=1e-6)
            assert theory.head_accuracy(d, -1.0) == pytest.approx(1 - accuracy, abs=1e-6)

    @pytest.mark.parametrize("d", [2, 3, 4, 7, 64, 1001])
    def test_the_series_equals_the_finite_sum_for_equal_query_and_key(self, d):
        assert theory.head_accuracy(d, 1.0) == pytest.approx(theory.matched_accuracy(d), abs=1e-11)

    @pytest.mark.parametrize("d", [2, 3, 5, 9])
    def test_accuracy_and_agreement_equal_simulation(self, d):
        rng, count = np.random.default_rng(d), 200_000
        queries, keys = theory.random_heads(d, 4, seed=1)
        w, y = sphere(rng, count, d), sphere(rng, count, d)
        choice = np.sign(y @ queries.T) * np.sign(w @ keys.T)
        right = (choice == np.sign((w * y).sum(1))[:, None]).mean(0)
        assert np.abs(right - theory.head_accuracy(d, (queries * keys).sum(1))).max() < 5e-3
        agree = (choice[:, :, None] == choice[:, None, :]).mean(0)
        assert np.abs(agree - theory.head_agreement(queries, keys)).max() < 5e-3

    def test_agreement_of_equal_and_of_orthogonal_heads(self):
        rng = np.random.default_rng(0)
        frame = np.linalg.qr(rng.standard_normal((8, 8)))[0]
        keys = sphere(rng, 8, 8)
        kernel = theory.head_agreement(frame, keys)
        assert np.array_equal(np.diag(kernel), np.ones(8))
        assert np.allclose(kernel[~np.eye(8, dtype=bool)], 0.5, atol=1e-12)
        assert np.allclose(theory.head_agreement(frame, keys, -frame, -keys)[0, 0], 1, atol=1e-7)

    @pytest.mark.parametrize("d, count", [(6, 1), (6, 255), (6, 256), (6, 257), (6, 700), (3, 300), (40, 700)])
    @pytest.mark.parametrize("memory", [0, 2**20, 2**30], ids=["nothing_kept", "some_kept", "all_kept"])
    def test_solvers_equal_scipy(self, d, count, memory):
        """Sizes around a multiple of the tiles; whatever is kept, the weights are those of a dense solve in float64."""
        queries, keys = theory.random_heads(d, count, seed=0)
        angles = [np.arcsin(np.clip(side @ side.T, -1, 1)) for side in (queries, keys)]
        kernel = 0.5 + 2 / np.pi**2 * angles[0] * angles[1]
        np.fill_diagonal(kernel, 1)
        target = theory.head_accuracy(d, (queries * keys).sum(1))
        oracle = scipy.linalg.solve(kernel, target)
        direct = theory.optimal_weights(queries, keys, method="cholesky")
        steps = theory.optimal_weights(queries, keys, method="conjugate_gradients", memory=memory)
        assert np.allclose(direct, oracle, atol=1e-10)
        assert np.linalg.norm(kernel @ steps - target) < 1.1e-10 * np.linalg.norm(target)
        assert np.allclose(theory.head_agreement(queries, keys), kernel, atol=1e-12)

    def test_conjugate_gradients_hold_no_more_than_they_may(self):
        product = agreement.AgreementProduct(*theory.random_heads(4, 1000, seed=0), memory=2**20)
        product(np.ones(1000))
        assert 0 < sum(tile.nbytes for tile in product.kept.values()) <= 2**20

    @pytest.mark.parametrize("d, most, size", [(3, 200, 200), (8, 65, 65), (8, 2000, 1985), (5, 25, 1)])
    def test_the_approximate_inverse_equals_a_dense_solve(self, d, most, size):
        """Of the constant and the first terms of the series of the arcsines, with a remainder on the diagonal."""
        queries, keys = theory.random_heads(d, 1100, seed=0)
        inverse = agreement.Polynomials(queries, keys, most)
        series = {1: 1.0, 3: 1 / 6, 5: 3 / 40}
        kernel = np.full((1100, 1100), 0.5)
        for i, j in inverse.degrees:
            kernel += 2 / np.pi**2 * series[i] * series[j] * (queries @ queries.T) ** i * (keys @ keys.T) ** j
        kernel[np.diag_indices(1100)] = 1
        vector = np.random.default_rng(0).standard_normal(1100)
        assert np.allclose(inverse(vector), scipy.linalg.solve(kernel, vector), rtol=1e-8, atol=1e-8)
        assert len(inverse.inverse) <= most and (len(inverse.inverse) == size or d == 3)

    def test_the_approximate_inverse_saves_most_of_the_steps(self):
        queries, keys = theory.random_heads(8, 1000, 0, "uniform_cosine")
        target = theory.head_accuracy(8, (queries * keys).sum(1))
        product = agreement.AgreementProduct(queries, keys, memory=2**30)
        goal = 1e-10 * np.linalg.norm(target)
        inverse = agreement.Polynomials(queries, keys, 360)
        plain, steps = agreement.conjugate_gradients(product, np.copy, target, goal, 1000)
        fast, fewer = agreement.conjugate_gradients(product, inverse, target, goal, 1000)
        assert fewer < steps / 2 and np.allclose(plain, fast, atol=1e-7)

    @pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-6])
    def test_heads_that_coincide_or_nearly_so(self, distance):
        """Closer than float32 can tell apart: whatever the weights of a pair, the error is that of the dense optimum."""
        queries, keys = theory.random_heads(6, 300, seed=0)
        near = queries + distance * theory.random_heads(6, 300, seed=1)[0]
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        both = np.concatenate([queries, near]), np.concatenate([keys, keys])
        kernel, target = theory.head_agreement(*both), theory.head_accuracy(6, (both[0] * both[1]).sum(1))
        optimum = 1 - target @ np.linalg.lstsq(kernel, target, rcond=1e-12)[0]
        weights = theory.optimal_weights(*both, method="conjugate_gradients", memory=0, tolerance=1e-8)
        assert theory.expected_error(*both, weights) == pytest.approx(optimum, abs=1e-7)

    def test_the_optimum_is_one(self):
        queries, keys = theory.random_heads(8, 64, seed=0)
        best = theory.optimal_weights(queries, keys)
        least = theory.expected_error(queries, keys)
        assert theory.expected_error(queries, keys, best) == pytest.approx(least, abs=1e-12)
        for seed in range(5):
            other = best + 0.01 * np.random.default_rng(seed).standard_normal(64)
            assert theory.expected_error(queries, keys, other) > least

    def test_memory_that_was_used_before_does_not_matter(self, monkeypatch):
        empty = np.empty
        monkeypatch.setattr("hf_rankattn.theory.agreement.TILE", 4)
        monkeypatch.setattr(np, "empty", lambda *args, **kwargs: empty(*args, **kwargs) * np.nan)
        assert np.isfinite(theory.optimal_weights(*theory.random_heads(4, 16, 0))).all()

    def test_uniform_heads_reach_the_published_errors(self):
        errors = [theory.expected_error(*theory.random_heads(8, 512, seed)) for seed in range(4)]
        assert np.mean(errors) == pytest.approx(0.2095, abs=0.006)
        assert theory.expected_error(*theory.random_heads(16, 256, 0)) == pytest.approx(0.393, abs=0.006)
        assert theory.expected_error(*theory.random_heads(64, 256, 0)) == pytest.approx(0.494, abs=0.006)

    def test_keys_equal_to_queries_stall_and_antipodes_repair_it(self):
        queries, keys = theory.random_heads(8, 1024, 0, "equal")
        assert theory.expected_error(queries, keys) == pytest.approx(0.327, abs=0.004)
        half = queries[:512]
        both = np.concatenate([half, half]), np.concatenate([half, -half])
        assert theory.expected_error(*both, method="conjugate_gradients") == pytest.approx(0.179, abs=0.004)

    def test_uniform_cosines_are_uniform(self):
        queries, keys = theory.random_heads(8, 20_000, 0, "uniform_cosine")
        assert scipy.stats.kstest((queries * keys).sum(1), scipy.stats.uniform(-1, 2).cdf).pvalue > 1e-3


class TestLowerBounds:
    @pytest.mark.parametrize(
        "d, r, count, bound",
        [(8, 1, 8, 0.157), (8, 1, 64, 0.125), (8, 1, 1024, 0.069), (8, 1, 16384, 0.042), (16, 1, 1024, 0.113)]
        + [(64, 1, 64, 0.1791), (64, 1, 65536, 0.125), (64, 8, 8, 0.178), (64, 8, 512, 0.124), (64, 32, 16, 0.107)],
    )
    def test_values(self, d, r, count, bound):
        assert theory.lower_bound(d, r, count) == pytest.approx(bound, abs=6e-4)

    def test_it_equals_the_sum_as_it_is_written(self):
        for d, r, count in ((5, 1, 3), (8, 3, 40), (8, 6, 2), (8, 7, 1), (64, 32, 16)):
            naive = 0.0
            for degree in range(1, 400, 2):
                seen = math.comb(degree + r - 1, r - 1)
                left = max(0, 1 - Fraction(count * seen, theory.harmonic_dimension(d, degree)))
                naive += 0.5 * theory.sign_coefficient(d, degree) ** 2 * float(left)
            unsummed = theory.degree_floor(d, 399)
            assert naive - 1e-12 <= theory.lower_bound(d, r, count) <= naive + unsummed + 1e-12

    def test_it_falls_with_heads_and_with_rank(self):
        for r in (1, 3, 6, 7):
            bounds = [theory.lower_bound(8, r, count) for count in (1, 2, 5, 30, 1000)]
            assert bounds == sorted(bounds, reverse=True)
        bounds = [theory.lower_bound(8, r, 3) for r in range(1, 9)]
        assert bounds == sorted(bounds, reverse=True) and bounds[-1] == 0

    @pytest.mark.parametrize("d, r, degree", [(6, 2, 3), (6, 3, 3), (5, 1, 3), (4, 3, 3), (5, 4, 3)])
    def test_functions_of_r_projections_span_so_many_harmonics(self, d, r, degree):
        """The count behind the bound, up to rank d - 1: polynomials in r coordinates, written in harmonics of all degrees."""
        rng = np.random.default_rng(0)
        points = sphere(rng, 1200, d)

        def harmonics(n):
            """A basis of one degree at the points: that many zonal functions around random axes."""
            return theory.legendre(d, n, points @ sphere(rng, theory.harmonic_dimension(d, n), d).T)[n]

        parts = [harmonics(n) for n in (degree, *(n for n in range(degree + 3) if n != degree))]
        powers = [p for p in np.ndindex(*[degree + 3] * r) if sum(p) <= degree + 2]
        polynomials = np.stack([np.prod(points[:, :r] ** np.array(p), axis=1) for p in powers], axis=1)
        written = np.linalg.lstsq(np.concatenate(parts, axis=1), polynomials, rcond=None)[0]
        assert np.abs(np.concatenate(parts, axis=1) @ written - polynomials).max() < 1e-8
        of_degree = parts[0] @ written[: parts[0].shape[1]]
        assert np.linalg.matrix_rank(of_degree, tol=1e-6) == math.comb(degree + r - 1, r - 1)

    def test_no_set_of_heads_falls_below(self):
        for d, count in ((3, 5), (4, 30), (8, 64), (8, 400), (16, 100)):
            for seed in range(3):
                error = theory.expected_error(*theory.random_heads(d, count, seed, "uniform_cosine"))
                assert error > theory.lower_bound(d, 1, count)
        for seed in range(3):
            assert theory.expected_error(*theory.random_heads(8, 1024, seed)) == pytest.approx(0.185, abs=0.002)

    @pytest.mark.parametrize(
        "d, r, error", [(8, 1, 0.15), (8, 1, 0.1), (16, 1, 0.1), (16, 4, 0.05), (8, 7, 0.01), (3, 1, 1e-5)]
    )
    def test_heads_needed_is_the_first_that_the_bound_allows(self, d, r, error):
        count = theory.heads_needed(d, r, error)
        assert theory.lower_bound(d, r, count) <= error < theory.lower_bound(d, r, count - 1)

    def test_heads_needed_near_the_published_counts(self):
        published = {8: (20, 113, 6.4e3), 16: (301, 8.2e3, 2e7), 32: (2.9e3, 3.2e5, 1.6e12), 64: (2.5e4, 2.3e7)}
        for d, counts in published.items():
            for error, count in zip((0.15, 0.10, 0.05), counts, strict=False):
                assert theory.heads_needed(d, 1, error) == pytest.approx(count, rel=0.08)
        assert theory.heads_needed(64, 1, 0.05) > 1e15


class TestUpperBounds:
    @pytest.mark.parametrize("d", [2, 3, 16, 64])
    @pytest.mark.parametrize("beta", [0.1, 1, 10, 1000])
    def test_soft_error_equals_quadrature(self, d, beta):
        def error(u):
            return 2 / (1 + math.exp(min(300, beta * math.sqrt(2) * abs(u)))) ** 2

        assert theory.soft_error(d, beta) == pytest.approx(coordinate_mean(d, error), abs=1e-9)

    def test_soft_error_published(self):
        published = {16: (0.3742, 0.0809, 0.00830, 0.00083), 64: (0.4334, 0.1552, 0.01721, 0.00172)}
        for d, errors in published.items():
            for beta, error in zip((1, 10, 100, 1000), errors, strict=True):
                assert theory.soft_error(d, beta) == pytest.approx(error, rel=5e-3)
            assert theory.soft_error(d, 1e6) == pytest.approx(theory.soft_error_limit(d, 1e6), rel=1e-6)

    def test_the_average_of_matched_heads(self):
        for d, error in ((8, 0.335), (16, 0.382), (64, 0.4395)):
            assert theory.average_error(d) == pytest.approx(error, abs=1e-3)
        for d in (2, 3, 8, 64):
            assert mean_square_arcsine(d) == pytest.approx(coordinate_mean(d, lambda u: math.asin(u) ** 2), abs=1e-10)
            # the mean over random heads of the exact error of each set
            sets = [theory.random_heads(d, 30, seed, "equal") for seed in range(40)]
            drawn = [theory.expected_error(*heads, np.full(30, 1 / 30)) for heads in sets]
            tolerance = 4 * np.std(drawn) / math.sqrt(40) + 1e-9
            assert np.mean(drawn) == pytest.approx(theory.average_error(d, 30), abs=tolerance)

    def test_equal_spacing(self):
        for count, error in ((1, 0.5), (2, 0.25), (4, 0.1875), (8, 0.17187)):
            assert theory.spaced_error(count) == pytest.approx(error, abs=1e-5)
        assert theory.spaced_error() == pytest.approx(1 / 6) and theory.spaced_error(best_scalar=True) == 5 / 32
        for count in (1, 2, 3, 4, 9):
            queries, keys = theory.spaced_heads(count)
            average = np.full(count, 1 / count)
            assert theory.expected_error(queries, keys, average) == pytest.approx(theory.spaced_error(count), abs=1e-7)
            # by symmetry the best weights are equal
            best = theory.expected_error(queries, keys)
            assert best == pytest.approx(theory.spaced_error(count, best_scalar=True), abs=1e-7)

    @pytest.mark.parametrize("d", [2, 3, 64])
    @pytest.mark.parametrize("count", [1, 2, 17, 1601])
    def test_majority_equals_the_integral_over_binomial_tails(self, d, count):
        def wrong(u):
            right = 0.5 + math.asin(abs(u)) / math.pi
            below = scipy.stats.binom.cdf((count - 1) // 2, count, right)
            tie = 0.0 if count % 2 else scipy.stats.binom.pmf(count // 2, count, right)
            return 2 * below + tie

        assert theory.majority_error(d, count) == pytest.approx(coordinate_mean(d, wrong), abs=1e-7)

    def test_majority_published(self):
        for d, errors in ((16, (0.6110, 0.2800, 0.0945)), (64, (0.6322, 0.2902, 0.0980))):
            for times, error in zip((1, 10, 100), errors, strict=True):
                assert theory.majority_error(d, times * d + 1) == pytest.approx(error, abs=1e-4)
        for count in (10**4, 10**6, 10**8):
            assert theory.majority_error(2000, count) == pytest.approx(theory.majority_limit(2000, count), rel=1e-3)


MANY, GROUPS = theory.random_heads(4, 100, 0), {"hidden_size": 8, "num_key_value_heads": 2, "head_dim": 4}
BAD = {
    "dimension_of_a_sphere": lambda: theory.sign_coefficient(1, 1),
    "bound_in_the_plane": lambda: theory.lower_bound(2, 1, 1),
    "rank_above_dimension": lambda: theory.lower_bound(8, 9, 1),
    "half_a_head": lambda: theory.lower_bound(8, 1, 1.5),
    "true_heads": lambda: theory.random_heads(8, True, 0),
    "too_many_heads_to_sum": lambda: theory.lower_bound(3, 1, 10**9),
    "error_of_zero": lambda: theory.heads_needed(8, 1, 0),
    "error_that_is_not_a_number": lambda: theory.heads_needed(8, 1, math.nan),
    "heads_that_are_not_unit": lambda: theory.head_agreement([[2.0, 0.0]], [[1.0, 0.0]]),
    "unequal_shapes": lambda: theory.expected_error(np.eye(3), np.eye(3)[:2]),
    "weights_of_another_number": lambda: theory.expected_error(np.eye(3), np.eye(3), [1.0]),
    "equal_heads": lambda: theory.optimal_weights(np.eye(3)[[0, 0]], np.eye(3)[[1, 1]]),
    "unknown_method": lambda: theory.optimal_weights(np.eye(3), np.eye(3), method="lu"),
    "too_few_steps": lambda: theory.optimal_weights(*MANY, method="conjugate_gradients", max_steps=2),
    "visible_rank_above_dimension": lambda: theory.visible_energy(8, 9),
    "cosine_above_one": lambda: theory.head_accuracy(8, 1.1),
    "unknown_pairing": lambda: theory.random_heads(8, 4, 0, "same"),
    "cold_beta": lambda: theory.soft_error(8, 0),
    "width_of_one": lambda: theory.coverage(8, 1),
    "unknown_keys": lambda: theory.coverage(8, 4, "cauchy"),
    "all_of_the_ceiling": lambda: theory.saturation_width(64, 1.0),
    "unknown_architecture": lambda: theory.path_counts("bert"),
    "architecture_and_layers": lambda: theory.path_counts("bert-base", num_layers=3),
    "no_layers": lambda: theory.path_counts(num_layers=0, num_heads=3),
    "groups_that_do_not_divide": lambda: theory.gqa_ranks(8, num_heads=3, **GROUPS),
    "rotary_wider_than_the_head": lambda: theory.gqa_ranks(8, num_heads=2, **GROUPS, rotary_dim=6),
    "no_latent": lambda: theory.mla_ranks(8, num_heads=1, qk_nope_head_dim=1, qk_rope_head_dim=1, kv_lora_rank=0),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_bad_input_is_a_clear_error(call):
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        call()


def test_it_is_an_attribute_of_the_package():
    assert hf_rankattn.theory is theory and "theory" in dir(hf_rankattn)


class TestVisibleEnergy:
    """What one head of rank r sees of a target, against the lower bound and against binned simulation."""

    @pytest.mark.parametrize("d, r", [(3, 1), (8, 1), (8, 6), (16, 15)])
    def test_the_plain_target_agrees_with_the_lower_bound(self, d, r):
        share, error = theory.visible_energy(d, r, draws=20_000)
        assert abs(share - (1 - 2 * theory.lower_bound(d, r, 1))) < 4 * error < 0.04

    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize("r", [1, 2])
    def test_the_conditional_mean_is_that_of_many_draws_of_what_is_hidden(self, r, biased):
        """The naive way: for each draw of what the head sees, draw the rest a few thousand times."""
        d, rng = 3, np.random.default_rng(1)
        squares = []
        for _ in range(1500):
            w, y = rng.standard_normal(d), rng.standard_normal(d) * np.sqrt(d)
            w *= np.sqrt(2) / np.linalg.norm(w)
            hidden = rng.standard_normal((2, 2000, d - r))
            hidden *= np.linalg.norm(w[r:]) / np.linalg.norm(hidden, axis=-1, keepdims=True)
            z = w[:r] @ y[:r] + hidden @ y[r:]
            wave = np.where(np.floor(z) % 2 == 0, 1.0, -1.0) if biased else np.sign(z)
            # two independent halves, as the square of one mean would be too large by its own noise
            squares.append(np.prod(wave.mean(axis=1)))
        share, error = theory.visible_energy(d, r, biased=biased, draws=20_000)
        assert abs(share - np.mean(squares)) < 4 * np.hypot(error, np.std(squares) / np.sqrt(len(squares)))

    def test_known_values_of_the_biased_target(self):
        shares = [theory.visible_energy(8, r, biased=True, draws=20_000)[0] for r in (1, 4, 6, 7)]
        assert shares[0] < 1e-4 and shares[1] < 0.005
        assert abs(shares[2] - 0.086) < 0.01 and abs(shares[3] - 0.542) < 0.02
        assert theory.visible_energy(8, 8, biased=True) == (1.0, 0.0)
