"""Calibration minimises the error of each text's logits on its own rows: against brute force, row by row."""

import logging

import pytest
import torch
from testing_common import ALBERT, BERT, XLNET, tiny_inputs
from testing_convert import (
    best_by_brute_force,
    caught_inputs,
    difference,
    entries,
    own_text_error,
    plain_inputs,
    rows_of_head,
    trained_like,
)

from hf_rankattn import convert_rank
from hf_rankattn.convert import convert_model, moments, own_rows, part
from hf_rankattn.convert.factors import best_factors, root_of_moment


# family, task class, fields, causal, how far above the brute-force optimum one head may end
CASES = {
    "Bert": (BERT, "Model", {}, False, 1.001),
    "Albert": (ALBERT, "Model", {"num_hidden_groups": 1, "num_hidden_layers": 3}, False, 1.001),
    "XLNet": (XLNET, "Model", {"n_layer": 1}, False, 1.1),
    "decoder": (BERT, "LMHeadModel", {"is_decoder": True, "num_hidden_layers": 1}, True, 1.001),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    family, suffix, fields, causal, slack = request.param
    model, batch = trained_like(family, suffix, **fields), plain_inputs(family)
    if causal:
        batch = {"input_ids": batch["input_ids"]}
    return model, batch, causal, slack


def test_reaches_the_brute_force_optimum(case, monkeypatch):
    """Head 1 of the first layer; the pooled closed form, where refining starts, leaves much more."""
    model, batch, causal, slack = case
    converted, reports = convert_model(model, 3, calibration=batch)
    monkeypatch.setattr(part, "refine", lambda pieces, form, query, key, _: own_rows.errors(pieces, form, query, key))
    pooled = convert_rank(model, 3, calibration=batch)
    caught = caught_inputs(model, batch)
    rows = {
        m: [rows_of_head(entries(m)[1], head, 4, caught, batch, causal) for head in range(4)]
        for m in (model, converted, pooled)
    }
    best = best_by_brute_force([tuple(t.detach() for t in row) for row in rows[model][1]], 3)
    ours, start = (own_text_error(rows[model][1], rows[m][1]) for m in (converted, pooled))
    assert start > 1.2 * best and ours < slack * best
    for head in range(4):
        refined, closed = (own_text_error(rows[model][head], rows[m][head]) for m in (converted, pooled))
        assert refined < closed
    lost = sum(own_text_error(old, new) for old, new in zip(rows[model], rows[converted], strict=True))
    total = sum(float((y @ form.T @ x).var(correction=0)) for head in rows[model] for x, y, form in head)
    assert reports[0].energy_kept == pytest.approx(1 - lost / total, abs=1e-9)


def test_segments_of_xlnet_are_in_the_error():
    model, batch = trained_like(XLNET, n_layer=1), tiny_inputs(XLNET, "Model")
    converted, reports = convert_model(model, 3, calibration=batch)
    caught = caught_inputs(model, batch)
    lost = total = 0.0
    for head in range(4):
        old, new = (rows_of_head(entries(m)[1], head, 4, caught, batch) for m in (model, converted))
        lost += own_text_error(old, new)
        total += sum(float((y @ form.T @ x).var(correction=0)) for x, y, form in old)
    assert reports[0].energy_kept == pytest.approx(1 - lost / total, abs=1e-9)


def random_pieces(texts=5, kind=torch.float64):
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(texts, 1, 2, 1, 6, generator=generator, dtype=torch.float64) + 0.1
    drawn = [torch.randn(texts, 2, 20, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    query, key = (part * scales[:, :, i] for i, part in enumerate(drawn))
    key = key - key.mean(2, keepdim=True)
    piece = own_rows.TextMoments((query.mT @ query).to(kind), (key.mT @ key / 20).to(kind))
    pools = piece.query.double().sum(0), 20 * piece.key.double().sum(0)
    form = torch.eye(6, dtype=torch.float64).expand(2, -1, -1)
    start = best_factors(*(root_of_moment(pool) for pool in pools), form, 2)
    return [piece], form, start.query, start.key, pools


def test_the_error_falls_with_every_round(monkeypatch):
    arguments, lost = random_pieces(), []
    for rounds in range(6):
        monkeypatch.setattr(own_rows, "ROUNDS", rounds)
        lost.append(own_rows.refine(*arguments).lost)
    assert all(bool((after <= before).all()) for before, after in zip(lost, lost[1:], strict=False))
    assert bool((lost[1] < lost[0]).all())


def test_single_precision_finds_the_same_optimum():
    double, single = (own_rows.refine(*random_pieces(kind=kind)) for kind in (torch.float64, torch.float32))
    torch.testing.assert_close(single.lost, double.lost, rtol=1e-3, atol=0)


def test_the_closed_form_is_kept_where_it_is_the_optimum():
    pieces, form, query, key, _ = random_pieces(texts=1)
    refined = own_rows.refine(pieces, form, query, key, (pieces[0].query[0], pieces[0].key[0]))
    torch.testing.assert_close(refined.query @ refined.key.mT, query @ key.mT)


def test_texts_that_share_a_place_weigh_as_much_as_apart(monkeypatch):
    """Three texts in two places: the first and the third share one, and are equal, so nothing may change."""
    model, two = trained_like(BERT), {name: values[:2] for name, values in plain_inputs(BERT).items()}
    batch = {name: torch.cat([values, values[:1]]) for name, values in two.items()}
    exact = convert_rank(model, 3, calibration=batch)
    monkeypatch.setattr(moments, "MOST_TEXTS", 3)
    assert difference(convert_rank(model, 3, calibration=batch), exact, batch) == 0
    monkeypatch.setattr(moments, "MOST_TEXTS", 2)
    shared = difference(convert_rank(model, 3, calibration=batch), exact, batch)
    assert shared < 1e-3 * difference(convert_rank(model, 3, calibration=two), exact, batch)


def test_rows_that_are_not_kept_are_said(monkeypatch, caplog):
    monkeypatch.setattr(moments, "MOST_ROWS", 10)
    logger = logging.getLogger("hf_rankattn.convert.moments")
    logger.addHandler(caplog.handler)
    model, batch = trained_like(XLNET, n_layer=1), plain_inputs(XLNET)
    converted = convert_rank(model, 3, calibration=batch)
    logger.removeHandler(caplog.handler)
    assert "has 19 tokens: the factors are fitted to the rows of the first 15" in caplog.text
    assert torch.isfinite(converted(**batch).last_hidden_state).all()
