"""Experiments on the rank of attention maps: every one at smoke scale, and the facts their tables must show."""

import functools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from testing_common import XLNET
from testing_folders import checkpoint_folder

from hf_rankattn import theory
from hf_rankattn.papers import reproduce
from hf_rankattn.papers.rank_barrier import families, head_dim_learning
from hf_rankattn.papers.rank_barrier._images import choose_images, load_images, patches
from hf_rankattn.papers.rank_barrier._random_maps import generator, hard_columns, map_metrics, random_heads, soft_map
from hf_rankattn.papers.sweep.runner import find_experiment


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The table of an experiment at smoke scale, run once for all tests. Claims of laptop scale are judged on it."""

    @functools.cache
    def run(name):
        outcome = reproduce(name, tmp_path_factory.mktemp("runs"), scale="smoke", workers=0)
        assert outcome.claims and not outcome.failed
        assert all(claim.verdict == "not judged at this scale" for claim in outcome.claims)
        assert all((outcome.folder / file).stat().st_size > 100 for file in outcome.files)
        for claim in find_experiment(name).claims(outcome.table, "laptop"):
            assert claim.measured and claim.claim and claim.source
            assert claim.verdict == "yes" or claim.why
        return outcome.table

    return run


@pytest.fixture
def ceilings(smoke):
    return smoke("rank-ceiling")


@pytest.fixture
def fresh(smoke):
    return smoke("families")


class TestRankCeiling:
    def test_hard_choice_has_rank_063_and_causal_050(self, ceilings):
        hard = ceilings[ceilings.kind == "hard"]
        free = hard[hard["keys"] == "free"].set_index(["mask", "n"]).coverage
        assert free["none", 128] == pytest.approx(0.6336, abs=0.015)
        assert free["causal", 256] == pytest.approx(0.502, abs=0.015)
        assert free["window", 256] == pytest.approx(theory.windowed_columns(256, 32) / 256, abs=0.015)

    def test_width_matters_for_gaussian_keys_and_hardly_for_unit_keys(self, ceilings):
        hard = ceilings[(ceilings.kind == "hard") & (ceilings["mask"] == "none")]
        hard = hard.set_index(["keys", "n", "width"]).coverage
        for width, known in ((8, 0.356), (32, 0.541), (128, 0.608)):
            assert hard["gaussian", 128, width] == pytest.approx(known, abs=0.02)
        for width, known in ((2, 5 / 9), (8, 0.621)):
            assert hard["unit", 128, width] == pytest.approx(known, abs=0.02)

    def test_singular_values_of_hard_maps_are_roots_of_counts(self, ceilings):
        row = ceilings[ceilings.kind == "spectrum"].iloc[0]
        assert row.unequal == 0 and row.error < 1e-9
        assert row.matrix_rank == row["rank_float64"] == row.argmax_coverage
        assert row.participation_ratio / 512 == pytest.approx(0.5, abs=0.02)
        assert row.effective_rank / 512 == pytest.approx(0.6165, abs=0.02)
        assert row.effective_rank_of_squares / 512 == pytest.approx(0.5645, abs=0.02)

    def test_soft_maps_have_full_rank_and_sharp_ones_the_ceiling(self, ceilings):
        rows = ceilings[(ceilings.kind == "sharpness") & (ceilings["mask"] == "none")].set_index(["n", "sharpness"])
        assert rows.loc[(128, 1.0), "rank_float32"] >= 0.99 * 128
        assert 0.60 < rows.loc[(256, 3000.0), "rank_float32"] / 256 < 0.665
        assert rows.loc[(256, 0.5), "stable_rank"] == pytest.approx(math.exp(0.25), rel=0.02)

    def test_the_published_picture_needs_loud_logits_and_scores_have_the_rank_of_the_head(self, ceilings):
        rows = ceilings[ceilings.kind == "paper"]
        assert (rows.logit_rank == rows["width"].clip(upper=100)).all()
        rows = ceilings.query("kind == 'paper' and temperature == 1 and width == 64").set_index("inputs")
        assert rows.sharpness["gaussian"] == pytest.approx(512, rel=0.1)
        assert rows.sharpness["orthonormal"] == pytest.approx(1, rel=0.1)
        assert rows.rank_float32["gaussian"] / 100 == pytest.approx(0.59, abs=0.06)
        assert rows.rank_float32["orthonormal"] == 100


@pytest.mark.parametrize("keys", ["gaussian", "unit", "free"])
@pytest.mark.parametrize("mask, window", [("none", 0), ("causal", 0), ("window", 5)])
def test_counted_columns_are_the_rank_of_the_map(keys, mask, window, monkeypatch):
    """Against numpy's rank of a map built row by row; blocks of 16 rows must count as one of 40."""
    monkeypatch.setattr("hf_rankattn.papers.rank_barrier._random_maps.ROWS", 16)
    found = hard_columns(40, 3, keys, generator(1, 2), mask, window)
    rng = generator(1, 2)
    if keys == "free":
        scores = torch.cat([torch.randn(rows, 40, generator=rng) for rows in (16, 16, 8)])
    else:
        query, key = random_heads(40, 3, keys, rng)
        scores = query @ key.T
    chosen = np.zeros((40, 40))
    for i, row in enumerate(scores.numpy()):
        first = {"none": 0, "causal": 0, "window": max(0, i - 4)}[mask]
        last = 40 if mask == "none" else i + 1
        chosen[i, first + row[first:last].argmax()] = 1
    assert found == np.linalg.matrix_rank(chosen)


def test_map_metrics_count_as_numpy_does():
    query, key = random_heads(64, 2, "gaussian", generator(3), torch.float64)
    maps = soft_map(query @ key.T)
    found, singular = map_metrics(maps), np.linalg.svd(maps.numpy(), compute_uv=False)
    assert found["rank_float64"] == np.linalg.matrix_rank(maps.numpy())
    above = (singular > 64 * np.finfo(np.float32).eps * singular[0]).sum()
    assert found["rank_float32"] == above < found["rank_float64"]
    assert found["stable_rank"] == pytest.approx((singular**2).sum() / singular[0] ** 2)


class TestSaturation:
    def test_half_of_the_ceiling_comes_late_for_long_texts(self, smoke):
        table = smoke("saturation")
        widths = table[(table.what == "width") & (table.reached == 0.5)].set_index(["keys", "n"])["width"]
        assert 2.35 < widths["gaussian", 512] / widths["gaussian", 64] < 2.9  # ln n would give 1.50
        nine = table[(table.what == "width") & (table.reached == 0.9) & (table["keys"] == "unit")]["width"]
        assert nine.max() < 4
        # the widths are read off the curve of the same table
        curve = table[(table.what == "curve") & (table.n == 512) & (table["keys"] == "gaussian")]
        read = np.interp(0.5 * curve.ceiling.iloc[0], curve.value, np.log(curve["width"]))
        assert widths["gaussian", 512] == pytest.approx(math.exp(read))


class TestLatentAttention:
    def test_ranks_are_those_of_the_rule(self, smoke):
        table = smoke("mla")
        assert (table.form_rank == table.form_rule).all() and (table.logit_rank == table.head_rule).all()
        assert (table.key_rank == table.keys_rule).all()
        rows = table[table.kind == "rule"]
        assert rows.form_rank.tolist() == [40, 48, 20] and rows.logit_rank.tolist() == [40, 48, 36]
        assert (table.argmax_coverage_causal_1 <= table.argmax_coverage_none_1.max()).all()


class TestFamilies:
    def test_every_family_is_there(self, fresh):
        from hf_rankattn.families.architectures import TABLE

        assert {family.name for family in TABLE if family.layers} == set(fresh.family)
        normed = set(fresh[fresh.qk_norm.astype(bool)].model_type)
        assert normed == {"rank_bert", "rank_albert", "rank_xlnet", "rank_encoder"}

    def test_fresh_maps_are_nearly_content_free(self, fresh):
        plain = fresh[~fresh.qk_norm.astype(bool) & (fresh.model_type != "qwen3")]
        assert (plain.stable_rank / plain.free_stable_rank).between(0.95, 1.1).all()
        n = 32
        reference = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
        singular = np.linalg.svd(reference, compute_uv=False)
        causal = fresh[fresh.causal & (fresh.tokens == n)]
        assert causal.free_stable_rank.to_numpy() == pytest.approx((singular**2).sum() / singular[0] ** 2)

    def test_unit_queries_and_keys_raise_the_rank(self, fresh):
        ranks = fresh.set_index("name").effective_rank
        for stock, normed in (("bert", "rank_bert"), ("albert", "rank_albert"), ("xlnet", "rank_xlnet")):
            assert ranks[f"{normed} + qk_norm"] > 3 * ranks[stock]

    def test_a_checkpoint_given_is_measured_on_text(self, minilm, tmp_path):
        from transformers import AutoTokenizer

        text = tmp_path / "text.txt"
        text.write_text("Bread rises because yeast eats sugar and breathes out gas.\n\nRivers carry sand to the sea.")
        words = len(AutoTokenizer.from_pretrained(minilm)(text.read_text().split("\n\n")[0])["input_ids"])
        cells = families.cells("smoke", None, {"checkpoint": minilm, "text": text})
        rows = families.run(cells[-1].parameters, tmp_path)
        assert len(rows) == 6 and {row["model"] for row in rows} == {"bert"}
        assert {row["tokens"] for row in rows} == {float(words)}
        # trained maps, unlike fresh ones, have rank
        assert max(row["stable_rank"] for row in rows) > 1.5


class TestLearning:
    def test_smoke(self, smoke):
        table = smoke("head-dim-learning")
        ends = table[table.what == "end"]
        assert len(ends) == 2 * 2 * 2 and ends.accuracy.between(0, 1).all()
        traces = table[table.what == "trace"]
        assert set(traces.groupby("cell").step.min()) == {0}
        assert traces.groupby("cell").step.max().to_dict() == ends.set_index("cell").steps.to_dict()
        for cell, end in ends.set_index("cell").iterrows():
            last = traces[(traces.cell == cell) & (traces.step == end.steps)].iloc[0]
            assert last.effective_rank == end.effective_rank <= end.tokens
        # a head of width one centres to logits of rank one
        assert (ends[ends.qk_rank == 1].energy_rank == 1).all()

    def test_a_model_that_learns_gets_rank(self, tmp_path):
        from hf_rankattn.papers.rank_collapse._classifying import train_classifier

        parameters = {"n": 8, "hidden": 32, "steps": 150, "batch_size": 32, "qk_rank": 8, "qk_norm": True, "seed": 0}
        *trace, end = train_classifier(head_dim_learning.RETRIEVAL | parameters, tmp_path)
        assert end["accuracy"] > 0.9  # guessing gives 0.125
        assert end["logit_std"] > 1.5 * trace[0]["logit_std"] and end["row_entropy"] < trace[0]["row_entropy"]

    def test_patches_are_cut_row_by_row(self):
        images = np.random.default_rng(0).random((2, 6, 6, 3))
        cut = patches(images, 2)
        assert cut.shape == (2, 9, 12)
        assert (cut[1, 5] == images[1, 2:4, 4:6].ravel()).all()
        with pytest.raises(ValueError, match="divisor"):
            patches(images, 4)

    def test_digits_are_those_of_scikit_learn(self):
        from sklearn.datasets import load_digits

        found, whole = load_images("digits", 8, 1500), load_digits()
        train, test = (found[split][0].reshape(-1, 64) * 16 for split in ("train", "test"))
        assert len(train) == 1438 and len(test) == 359
        rows = {tuple(row) for row in whole.data}
        assert {tuple(row) for row in np.concatenate([train, test])} == rows

    def test_without_scikit_learn_it_says_what_to_install(self, monkeypatch):
        import sys

        load_images.cache_clear()
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(ValueError, match=r"hf_rankattn\[experiments\]"):
            load_images("digits", 8, 100)

    def test_a_folder_of_images_takes_the_place_of_the_digits(self, tmp_path, caplog):
        from PIL import Image

        folder, rng = tmp_path / "shapes", np.random.default_rng(0)
        for place, label in enumerate(("dark", "light")):
            (folder / label).mkdir(parents=True)
            for number in range(10):
                pixels = rng.integers(0, 100, (20, 20, 3)) + 150 * place
                Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{number}.png")
        load_images.cache_clear()
        cells = head_dim_learning.cells("smoke", None, {"dataset": str(folder)})
        chosen = [cell.parameters for cell in cells if cell.parameters["task"] == "images"][-1]
        rows = [{**chosen, **row} for row in head_dim_learning.run(chosen, tmp_path / "work")]
        assert rows[-1]["what"] == "end" and rows[-1]["judged"] == 4
        assert set(head_dim_learning.complete(pd.DataFrame(rows)).data) == {"shapes, 16 patches"}
        found = load_images(str(folder), 16, 500)
        assert len(found["train"][1]) == 16 and found["test"][0].shape == (4, 16, 16, 3)
        for images, classes in found.values():
            assert ((images.mean((1, 2, 3)) > 0.5) == classes.astype(bool)).all()
        empty = tmp_path / "texts"
        empty.mkdir()
        assert choose_images(str(empty)) == "digits" and "no images" in caplog.text


class TestConvert:
    def test_smoke(self, smoke):
        table = smoke("convert")
        curve = table[table.what == "curve"].set_index(["way", "rank"]).embedding_cosine
        assert curve["weights only", 16] == pytest.approx(1, abs=1e-5)
        energy = table[table.what == "energy"]
        assert set(energy.of) == {"weights", "logits"} and (energy.energy_rank <= 16).all()

    @pytest.mark.slow
    def test_real_weights(self, minilm, tmp_path):
        outcome = reproduce("convert", tmp_path, scale="smoke", workers=0, options={"checkpoint": minilm})
        curve = outcome.table[outcome.table.what == "curve"].set_index(["way", "rank"]).embedding_cosine
        assert curve["calibrated", 16] > 0.95 > 0.85 > curve["weights only", 16]
        assert curve["weights only", 32] > 0.9999
        energy = outcome.table[outcome.table.what == "energy"].groupby("of").energy_rank.median()
        assert energy["weights"] > 1.5 * energy["logits"]

    @pytest.mark.slow
    def test_xlnet_has_no_last_position(self, tmp_path):
        source = checkpoint_folder(XLNET, tmp_path / "xlnet", n_layer=1)
        outcome = reproduce("convert", tmp_path, scale="smoke", workers=0, options={"checkpoint": str(source)})
        assert set(outcome.table.what) == {"curve", "energy"}

    def test_what_is_no_checkpoint_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="nowhere cannot be read as a checkpoint"):
            reproduce("convert", tmp_path, scale="smoke", workers=0, options={"checkpoint": str(tmp_path / "nowhere")})
