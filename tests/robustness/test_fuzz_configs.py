"""Any value of the four rank fields gives a model that runs, or is refused with a `ValueError` that one can read."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing_common import float_tensors

import hf_rankattn
from hf_rankattn.models.rank_attention import RANK_FIELDS


CASES = 400  # a family, in the slow run
FEW = 15
BATCH, LENGTH = 2, 5

# family -> sizes that build in a millisecond
BERT = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 7}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": BERT,
    "Albert": {**BERT, "embedding_size": 6, "num_hidden_groups": 2},
    "XLNet": {"vocab_size": 11, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 7},
    "Encoder": {"input_dim": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 7},
}
NUMBERS = [-1, 0, 1, 3, 2**40, 2**200, 0.0, 0.5, 2.0, math.nan, -math.inf, 1e300, np.int64(3), np.float32(0.5), 1j]
OTHERS = [None, True, False, "", "8", "\u00fc\u221e", b"8", [], [1], [2, 3], (2, 3), print]
OTHERS += [[None, None], [[1]], ["8", 2], {}]
NONSENSE = st.sampled_from([*NUMBERS, *OTHERS, np.array([1, 2]), torch.tensor(3), torch.ones(2)])
WIDTHS = st.one_of(st.none(), st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=3))
PLAUSIBLE: dict[str, st.SearchStrategy] = {
    "qk_rank": WIDTHS,
    "v_head_dim": WIDTHS,
    "qk_norm": st.booleans(),
    "qk_scale": st.one_of(st.none(), st.floats(1e-6, 1e6), st.integers(1, 9)),
}
ONE_LAYER = st.dictionaries(
    st.sampled_from([*RANK_FIELDS, "hidden_size", "nothing"]), st.one_of(st.integers(1, 6), NONSENSE), max_size=3
)
LAYER_KEYS = st.one_of(st.integers(0, 2), st.sampled_from(["0", "1", "x", "", -1, 1.0, True, None, 2**70]))
LAYERS = st.dictionaries(LAYER_KEYS, st.one_of(ONE_LAYER, ONE_LAYER, NONSENSE), max_size=3)
VALUES = {name: st.one_of(strategy, strategy, NONSENSE) for name, strategy in PLAUSIBLE.items()}
VALUES |= {"per_layer_config": st.one_of(LAYERS, LAYERS, NONSENSE), "head_dim": st.integers(1, 8)}
FIELDS = st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)


def made(family: str, fields: dict[str, Any], way: str, folder: Path):
    """A config by one of the three ways in which fields are given."""
    config_class, sizes = getattr(hf_rankattn, f"Rank{family}Config"), FAMILIES[family]
    if way == "called":
        return config_class(**sizes, **fields)
    if way == "overrides":
        return config_class.from_dict(dict(sizes), **fields)
    try:
        written = json.dumps({**sizes, **fields})
    except (TypeError, ValueError):  # JSON cannot hold it, so no file can
        return config_class(**sizes, **fields)
    (folder / "config.json").write_text(written, encoding="utf-8")
    return config_class.from_pretrained(folder)


def forward_and_back(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first output of a model, after a check of all outputs and of the gradients of all weights."""
    model.zero_grad()
    tensors = float_tensors(dict(model(**inputs)))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), "outputs are not finite"
    assert tensors[0].shape == (BATCH, LENGTH, model.config.hidden_size)
    tensors[0].double().square().sum().backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(bool(torch.isfinite(grad).all()) for grad in grads), "gradients are not finite"
    return tensors[0].detach()


def attempt(family: str, fields: dict[str, Any], way: str, saved: bool, folder: Path) -> str:
    """`"refused"` with a readable message, or `"ran"`; whatever else happens is an error of the library."""
    try:
        model = getattr(hf_rankattn, f"Rank{family}Model")(made(family, fields, way, folder)).eval()
    except ValueError as error:
        assert 20 < len(str(error)) < 3000, str(error)[:200]
        return "refused"
    inputs = {"input_ids": torch.randint(11, (BATCH, LENGTH))}
    if family == "Encoder":
        inputs = {"points": torch.randn(BATCH, LENGTH, 6)}
    first = forward_and_back(model, inputs)
    if not saved:
        return "ran"
    model.save_pretrained(folder)
    torch.testing.assert_close(forward_and_back(type(model).from_pretrained(folder).eval(), inputs), first)
    return "ran and loaded"


def fuzz(family: str, cases: int, folder: Path) -> Counter:
    """Run so many cases of one family, the same at every run; count how they ended."""
    counts: Counter = Counter()
    options = {"database": None, "deadline": None, "print_blob": False, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=cases, derandomize=True, **options)
    @given(FIELDS, st.sampled_from(["called", "overrides", "file"]), st.integers(0, 3).map(lambda draw: draw == 0))
    def case(fields, way, saved):
        torch.manual_seed(0)
        work = folder / str(sum(counts.values()))
        work.mkdir(exist_ok=True)
        counts[attempt(family, fields, way, saved, work)] += 1

    case()
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_configs_run_or_are_refused(family, tmp_path):
    assert sum(fuzz(family, FEW, tmp_path).values()) >= FEW


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_configs_run_or_are_refused(family, tmp_path):
    counts = fuzz(family, CASES, tmp_path)
    print(family, dict(counts))
    assert min(counts["ran"], counts["ran and loaded"], counts["refused"]) > CASES / 40, counts
