"""The experiment on thin keys: its rows against brute force, its laws against simulation, its verdicts on tables of known answers."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from hf_rankattn.papers import reproduce
from hf_rankattn.papers.sweep.runner import find_experiment
from hf_rankattn.papers.thin_keys._selecting import VALUES, Selections, limit_selection, train_selection
from hf_rankattn.papers.thin_keys.thin_keys import LIMITS, circle, least_ranks, recall_law


SMALL = {"n": 4, "heads": 1, "hidden": 32, "learning_rate": 0.01, "batch_size": 64, "seed": 1, "num_keys": 31}
WIDTHS = {"keys": 31, "random keys": 12, "positions": 4, "points": 3}


@pytest.mark.parametrize("task", WIDTHS)
def test_the_label_is_the_value_of_the_token_that_the_address_means(task):
    d = WIDTHS[task]
    rows = Selections(SMALL | {"task": task, "d": d}).sample("test", 50)
    for tokens, queries, labels in zip(rows["points"], rows["queries"], rows["labels"], strict=True):
        assert tokens.shape == (4, d + VALUES) and not queries[:, d:].any()
        for query, label in zip(queries, labels, strict=True):
            distances = [math.dist(query[:d].tolist(), token[:d].tolist()) for token in tokens]
            chosen = int(np.argmin(distances))
            assert tokens[chosen, d:].argmax() == label and tokens[chosen, d:].count_nonzero() == 1
            # all but points ask with the address itself, and no other token of the row has it
            assert task == "points" or sorted(distances)[0] < 1e-3 < 1 < sorted(distances)[1]
    if task == "positions":
        assert (rows["points"][:, :, :d] == rows["points"][:1, :, :d]).all()
    entries = rows["points"][..., :d].square().mean()
    assert entries.item() == pytest.approx(1, abs=1e-3), "all tasks have addresses of one size"


def test_batches_begin_where_a_resumed_run_goes_on():
    whole, later = (Selections(SMALL | {"task": "points", "d": 3}) for _ in range(2))
    later.first = lambda: 2
    batches = iter(whole)
    for _ in range(2):
        next(batches)
    third, same = next(batches), next(iter(later))
    assert all(torch.equal(third[name], same[name]) for name in third)


def test_full_rank_learns_a_selection_and_ends_early(tmp_path):
    parameters = SMALL | {"task": "positions", "d": 4, "qk_rank": 4, "steps": 200}
    model, found = train_selection(parameters, tmp_path)
    assert found["accuracy"] > 0.98 and found["steps_done"] < 200
    attention = model.encoder.layers[0].attention
    assert attention.qk_rank == 4 and attention.v_head_dim == 32


@pytest.mark.parametrize("n, width, d", [(4, 6, 64), (16, 10, 64), (16, 6, 12), (8, 12, 12)])
def test_the_law_of_random_keys_against_random_projections(n, width, d):
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((4000, n, d))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    projected = keys @ np.linalg.qr(rng.standard_normal((d, width)))[0]
    right = ((projected @ projected.transpose(0, 2, 1)).argmax(-1) == np.arange(n)).mean()
    assert recall_law(n, width, d) == pytest.approx(right + (1 - right) / VALUES, abs=0.006)


@pytest.mark.parametrize("n", [2, 5, 300])
def test_codes_on_a_circle_have_the_weight_that_is_asked_for(n):
    found = circle(n, weight=0.9)
    angles = 2 * np.pi * np.arange(n) / n
    row = [math.exp(found["logit"] * (math.cos(angle) - 1)) for angle in angles]
    assert 1 / sum(row) == pytest.approx(found["weight"]) and found["weight"] >= 0.9 - 1e-12


def table_of(accuracy) -> pd.DataFrame:
    """All cells of the laptop scale with an accuracy that depends on the task, N, d and the rank."""
    experiment = find_experiment("thin-keys")
    rows = []
    for cell in experiment.cells("laptop", None, {}):
        if cell.parameters["how"] == "constructed":
            rows += [{**cell.parameters, **row} for row in experiment.run(cell.parameters, None)]
            continue
        full = cell.parameters["qk_rank"]
        limits = [rank for rank in LIMITS if rank < full] if cell.parameters["how"] == "limited" else []
        for rank in (*limits, full):
            chosen = {name: cell.parameters[name] for name in ("task", "n", "d")} | {"qk_rank": rank}
            rows.append(cell.parameters | chosen | {"accuracy": accuracy(**chosen) + 1e-4 * cell.parameters["seed"]})
    return experiment.complete(pd.DataFrame(rows))


def verdicts_of(table: pd.DataFrame) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for claim in find_experiment("thin-keys").claims(table, "laptop"):
        found.setdefault(claim.source, set()).add(claim.verdict)
        assert claim.claim and claim.measured and (claim.verdict == "yes" or claim.why)
    return found


def logarithmic(task, n, d, qk_rank):
    """Everything is selected from log2 N dimensions on, positions from one."""
    return 0.995 if task == "positions" or qk_rank >= math.log2(n) else 0.5


def by_dimension(task, n, d, qk_rank):
    """Only full rank selects points, one dimension selects nothing, and random keys follow the law."""
    if task == "points":
        return 0.97 if qk_rank == d else 0.9
    if task == "random keys":
        return recall_law(n, qk_rank, d)
    return 0.995 if qk_rank >= 8 else 0.5


def test_verdicts_follow_the_numbers():
    found = verdicts_of(table_of(logarithmic))
    assert found["Yao et al., selection by position"] == found["Yao et al., O(log N) for every selection"] == {"yes"}
    assert found["Amsel et al., Theorem 2"] == {"no"}
    assert found["Yao et al., language models"] == {"not testable"}
    found = verdicts_of(table_of(by_dimension))
    assert found["Amsel et al., Theorem 2"] == found["ours, the law of random projections"] == {"yes"}
    assert found["Yao et al., selection by position"] == found["Yao et al., O(log N) for every selection"] == {"no"}
    claims = find_experiment("thin-keys").claims(table_of(by_dimension), "laptop")
    limits = {claim.claim.split("(")[-1][:-1]: claim for claim in claims if claim.claim.startswith("A limit")}
    assert limits["random keys"].verdict == "yes" and "N 16: 15 (trained 15)" in limits["random keys"].measured
    assert limits["positions"].verdict == "not testable", "full rank has not trained there"
    untrained = verdicts_of(table_of(lambda **chosen: 0.6))
    assert untrained["Amsel et al., Theorem 2"] == untrained["Yao et al., retrieval by content"] == {"not testable"}


def test_the_least_rank_is_that_of_each_seed():
    table = table_of(by_dimension)
    table = table[table.how == "trained"]
    least = least_ranks(table)
    assert set(least["points", 16, 16, 1]) == {16} and set(least["points", 8, 64, 1]) == {8}
    assert set(least["keys", 256, 16, 1]) == {8} and np.isinf(least["keys", 256, 16, 4]).all()
    assert set(least["random keys", 64, 16, 1]) == {15}
    one = (table.task == "positions") & (table.n == 64) & (table.qk_rank == 4) & (table.seed == 2)
    changed = find_experiment("thin-keys").complete(table.assign(accuracy=table.accuracy.mask(one, 1.0)))
    assert least_ranks(changed)["positions", 64, 64, 1].to_dict() == {0: math.inf, 1: math.inf, 2: 4}


def test_smoke(tmp_path):
    outcome = reproduce("thin-keys", tmp_path, scale="smoke", workers=0)
    assert {claim.verdict for claim in outcome.claims} == {"not judged at this scale"}
    assert (outcome.folder / "thin-keys.png").stat().st_size > 1000
    trained = outcome.table[outcome.table.how == "trained"]
    assert trained.accuracy.between(0.05, 1).all() and set(trained.task) == set(WIDTHS)
    limited = outcome.table[outcome.table.how == "limited"]
    assert set(limited[limited.task == "positions"].qk_rank) == {1, 2, 3, 4}


def test_a_limit_of_a_trained_layer_loses_accuracy_and_the_layer_stays_whole(tmp_path):
    parameters = SMALL | {"task": "positions", "d": 4, "qk_rank": 4, "steps": 200}
    first, second, third, whole = limit_selection(parameters, tmp_path, [1, 2, 3, 16])
    assert [row["qk_rank"] for row in (first, second, third)] == [1, 2, 3]
    assert first["accuracy"] < 0.8 < whole["accuracy"] and third["accuracy"] > 0.9 and whole["accuracy"] > 0.98
