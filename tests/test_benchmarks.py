"""The parts of the speed suite that measure nothing: fits, verdicts, and the comparison with a baseline."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from benchmarks import timing
from benchmarks.__main__ import BASELINE, LIMIT, SUITES, USUAL, parsed, table_of, times_of
from benchmarks.baseline import Run, change, comparison, read_run, verdict
from benchmarks.measure_command import INDEX, check_equal
from benchmarks.timing import at_least, at_most, exponent, fitted_exponent, median_ratio, timed


def row(ratio: float, what: str = "a", better: str = "lower", suite: str = "one", limit: float = 1.0):
    made = (at_most if better == "lower" else at_least)(what, "b", ratio, limit)
    made.suite = suite
    return made


def test_the_line_is_that_of_least_squares():
    random = np.random.default_rng(0)
    sizes = [8, 16, 32, 64, 128]
    seconds = [size**1.5 * math.exp(random.normal(0, 0.2)) for size in sizes]
    assert math.isclose(fitted_exponent(sizes, seconds), np.polyfit(np.log(sizes), np.log(seconds), 1)[0])

    for few in ([1, 2], [1, 2, 2]):
        with pytest.raises(ValueError, match="at least three sizes"):
            fitted_exponent(few, few)


def test_a_target_is_met_when_it_is_reached_and_an_exponent_misses_on_either_side():
    for made, met, missed in ((at_most, 1.0, 1.01), (at_least, 1.0, 0.99)):
        assert made("a", "b", met, 1.0).met
        assert not made("a", "b", missed, 1.0).met and not made("a", "b", math.nan, 1.0).met
    found = {
        power: exponent("a", 2, 0.15, [10, 20, 40], [10**power, 20**power, 40**power]) for power in (1.8, 2.14, 2.2)
    }
    assert [row.met for row in found.values()] == [False, True, False] and found[1.8].target == "2.00 ± 0.15"


def test_the_ratio_is_taken_within_a_repeat():
    # the second repeat was slow for both, the third was not
    assert median_ratio({"ours": [2.0, 40.0, 2.2], "theirs": [1.0, 20.0, 1.0]}, "ours", "theirs") == 2.0


def test_competitors_take_turns_and_long_ones_fewer():
    calls: list[str] = []
    times = timed({name: lambda name=name: calls.append(name) for name in "ab"}, repeats=4)
    assert "".join(calls) == "ab" + "ba" + "ab" + "ba" + "ab" and len(times["a"]) == 4
    short = timed({"a": lambda: sum(range(10_000))}, repeats=50, most=0.0)
    assert len(short["a"]) == timing.LEAST_REPEATS


@pytest.mark.parametrize(
    "better, then, now, expected",
    [
        ("lower", 1.0, 1.5, 0.5),
        ("lower", 2.0, 1.0, -0.5),
        ("higher", 3.0, 2.0, 0.5),
        ("higher", 1.0, 2.0, -0.5),
        ("lower", 0.0, 0.0, 0.0),
        ("lower", 0.0, 0.1, math.inf),
        ("lower", -0.1, -0.2, 0.0),
        ("lower", 0.5, -0.1, -1.0),
    ],
)
def test_worse_is_positive_whichever_way_is_better(better, then, now, expected):
    assert change(row(now, better=better), row(then, better=better)) == expected


def test_changes_above_the_noise_are_reported():
    before = Run([row(1.0, "same"), row(1.0, "slower"), row(1.0, "gone"), row(1.0, "elsewhere", suite="two")])
    now = Run([row(1.2, "same", limit=2.0), row(1.5, "slower", limit=2.0), row(0.5, "fresh")])
    lines = comparison(now, before, ["one"])
    assert len(lines) == 3
    assert lines[0].startswith("worse than the baseline by 50% (noise up to 25%): slower") and "1.00 then" in lines[0]
    assert lines[1].startswith("new, not in the baseline: fresh")
    assert lines[2].startswith("gone, in the baseline only: gone")  # the suite of "elsewhere" was not run

    lost = comparison(Run([row(1.1)]), Run([row(0.95)]), ["one"])
    assert lost == ["met in the baseline, missed now: a (against b), target <= 1.00"]
    # counts have a narrow band
    assert comparison(Run([row(1.03, limit=2).counted()]), Run([row(1.0)]), ["one"])
    assert verdict(row(1.03), row(1.0)) == "1.00" and verdict(row(1.03).counted(), row(1.0)) == "1.00 worse"
    assert verdict(row(0.5), row(1.0)) == "1.00 better" and verdict(row(1.0), None) == "new"


def test_a_run_comes_back_from_its_file_and_renews_a_baseline_suite_by_suite(tmp_path):
    run = Run([row(0.5), row(2.0, better="higher")], {"one": 3.0}, {"cores": 2})
    run.write(tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    before = Run([row(1.0, "a"), row(1.0, "old"), row(1.0, "b", suite="two")], {"one": 5.0, "two": 6.0}, {"cores": 1})
    whole = before.updated_by(Run([row(2.0, "a")], {"one": 7.0}, {"cores": 2}), ["one"])
    assert [(entry.what, entry.ratio) for entry in whole.rows] == [("b", 1.0), ("a", 2.0)]
    assert whole.seconds == {"one": 7.0, "two": 6.0} and whole.machine == {"cores": 2}


def test_a_file_that_is_no_run_is_refused(tmp_path):
    for content in ("", "[]", "{}", '{"format": 0}', '{"format": 1, "rows": [{"what": 1}]}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ValueError, match="cannot be read as a run of the benchmarks"):
            read_run(tmp_path / "run.json")


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--only", "nothing"], "invalid choice"),
        (["--repeats", "3"], "at least 7"),
        (["--repeats", "many"], "invalid int"),
        (["--json", "absent/rows.json"], "cannot be written"),
        (["--json", "."], "cannot be written"),
        (["--baseline", "absent.json"], "is not there to compare with"),
        (["--baseline", "broken.json"], "cannot be read as a run"),
        (["--budget", "3"], "unrecognized"),
    ],
)
def test_bad_arguments_end_with_two_before_anything_is_run(arguments, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(SystemExit) as stop:
        parsed(arguments)
    assert stop.value.code == 2 and reason in capsys.readouterr().err.splitlines()[-1]
    # a broken baseline can be written anew
    options = parsed(["--baseline", "broken.json", "--write-baseline"])
    assert options.before is None and options.write_baseline


def test_the_committed_baseline_is_of_these_suites():
    run = read_run(BASELINE)
    assert {entry.suite for entry in run.rows} <= set(SUITES)
    assert len({entry.key for entry in run.rows}) == len(run.rows)
    assert all(math.isfinite(entry.ratio) for entry in run.rows)
    assert not [word for word in ("/root", "/home", "/work") if word in json.dumps(run.as_dict())]


def test_the_budgets_fit_into_the_limit_and_the_table_has_the_baseline_beside_each_row():
    assert sum(SUITES[name].budget for name in USUAL) <= LIMIT
    lines = list(times_of(Run([], {"kernels": SUITES["kernels"].budget + 1.0})))
    assert "over" in lines[0] and len(lines) == 2
    table = table_of(Run([row(2.0), row(1.0, "fresh")]), Run([row(1.0)]))
    assert list(table.columns[4].cells) == ["NO", "yes"]
    assert list(table.columns[5].cells) == ["1.00 worse", "new"]


def survey_table(**values: float) -> pd.DataFrame:
    rows = [("attention", None, 0, 0, 0, None, metric, value) for metric, value in values.items()]
    return pd.DataFrame(rows, columns=[*INDEX, "value"])


def test_a_competitor_with_other_numbers_is_not_timed():
    table = survey_table(stable_rank=2.0, numerical_rank=5.0)
    check_equal(table, survey_table(stable_rank=2.0005, numerical_rank=5.0))
    others = {"stable_rank": (2.01, 5.0), "numerical_rank": (2.0, 7.0), "rows": (2.0,)}
    for named, values in others.items():
        with pytest.raises(AssertionError, match=named):
            check_equal(table, survey_table(**dict(zip(("stable_rank", "numerical_rank"), values, strict=False))))
