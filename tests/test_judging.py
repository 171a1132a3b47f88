"""Verdicts: a yes or a no needs seeds that agree, and a baseline that has trained."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from testing_probe import run

from hf_rankattn.papers import Claim, reproduce
from hf_rankattn.papers.rank_benefits._points import judge_separation
from hf_rankattn.papers.sweep.judging import every, judge, mean_interval, not_testable
from hf_rankattn.papers.sweep.runner import find_experiment


def verdict(judgement) -> str:
    return judgement.claim("a", "ours", "", "1").verdict


@pytest.mark.parametrize(
    ("values", "least", "most", "expected"),
    [
        ([5.0, 5.1, 4.9], 4, np.inf, "yes"),
        ([5.0, 5.1, 4.9], 6, np.inf, "no"),
        ([5.0, 5.1, 4.9], -np.inf, 4, "no"),
        ([5.0, 5.1, 4.9], 4.99, np.inf, "undecided"),
        ([5.0, 5.1, 4.9], np.float64(4.5), np.float64(5.5), "yes"),
        ([1.0, 9.0, 5.0], 4, np.inf, "undecided"),
        ([5.0], 4, np.inf, "not testable"),
        ([5.0, np.nan, 5.0], 4, np.inf, "not testable"),
    ],
)
def test_the_interval_decides(values, least, most, expected):
    judgement = judge("it", values, least, most)
    assert verdict(judgement) == expected and judgement.rule
    assert (judgement.interval is None) == (expected == "not testable")


def test_the_interval_is_that_of_student():
    values = np.random.default_rng(0).normal(size=7)
    expected = stats.t.interval(0.95, 6, loc=values.mean(), scale=stats.sem(values))
    assert np.allclose(mean_interval(values), expected)


def test_ratios_are_judged_by_their_logarithms():
    low, high = judge("it", [10.0, 1000.0, 100.0], 4, ratio=True).interval
    assert np.sqrt(low * high) == pytest.approx(100)


def test_the_sign_of_noise_is_rarely_a_verdict():
    rng = np.random.default_rng(0)
    found = [verdict(judge("it", rng.normal(size=4), least=0)) for _ in range(400)]
    assert found.count("undecided") > 0.9 * len(found)


def test_of_several_requirements_the_worst_counts():
    yes, no, noise = (judge("it", values, 0) for values in ([1, 1.1], [-1, -1.1], [-1, 1]))
    assert verdict(every([yes, yes])) == "yes" and verdict(every([yes, noise])) == "undecided"
    assert verdict(every([noise, not_testable("no"), yes])) == "not testable"
    assert verdict(every([noise, not_testable("so"), no])) == "no" and every([no, noise]).rule == no.rule


def test_without_a_trained_baseline_there_is_nothing_to_compare_with():
    half = pd.Series([0.6, 0.61, 0.6])
    assert verdict(judge_separation("it", half, pd.Series([0.01, 0.012, 0.011]), 4)) == "yes"
    untrained = judge_separation("it", half, pd.Series([0.05, 0.49, 0.05]), 4)
    assert verdict(untrained) == "not testable" and "0.05 to 0.49" in untrained.rule


def circle_table(steps: dict[int, list[int]]) -> pd.DataFrame:
    """Two points that are together after so many steps, by width and seed."""
    return pd.DataFrame(
        [
            {"variant": variant, "hidden": hidden, "seed": seed, "step": step, "as_published": False,
             "gap": 0.5 if step < last else 0.0}
            for variant in ("attention alone", "attention + MLP", "attention + skip")
            for hidden, own in steps.items()
            for seed, last in enumerate(own)
            for step in range(301)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("narrow", "wide", "expected"),
    [
        ([4, 5], [5, 6], "yes"),
        ([4, 5], [5, 5], "undecided"),
        ([5, 5, 6, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5, 5, 5], "no"),
    ],
)
def test_two_seeds_do_not_make_wide_circles_slow(narrow, wide, expected):
    claims = find_experiment("circle").claims(circle_table({32: narrow, 128: wide}), "laptop")
    (claim,) = [claim for claim in claims if claim.claim.startswith("Wider")]
    assert claim.verdict == expected and f"{len(wide)} seeds" in claim.why


def test_a_smoke_run_judges_nothing_and_does_not_read_as_a_failure(tmp_path, capsys):
    command = ["reproduce", "path-counts", "--scale", "smoke", "--workers", "0", "--out", tmp_path / "runs"]
    code, said, _ = run(capsys, *command)
    assert code == 0 and "claims, not judged at this scale." in said and "not testable" not in said
    found = json.loads(run(capsys, *command, "--json")[1])
    assert found[0]["verdicts"]["not judged at this scale"] == len(found[0]["claims"]) > 0


def test_claims_are_judged_again_from_stored_cells(tmp_path, monkeypatch):
    """A table is rebuilt, and judged by the code that runs, without a cell being computed twice."""
    reproduce("path-counts", tmp_path, scale="laptop", seeds=1, workers=0)
    claim = Claim("a", "ours", "", "1", None, "b", (0.0, 2.0))
    monkeypatch.setattr(find_experiment("path-counts"), "claims", lambda table, scale: [claim])
    again = reproduce("path-counts", tmp_path, scale="laptop", seeds=1, workers=0)
    assert again.computed == 0
    assert again.as_dict()["verdicts"] == {"yes": 0, "no": 0, "undecided": 1, "not testable": 0}
