"""Any config, sensible or not, either gives a model that runs or is refused with a `ValueError` that one can read."""

import copy
import json
import math
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testing_common import float_tensors

import hf_rankattn
from hf_rankattn.models.rank_bert.heads import RANK_FIELDS


CASES = 600  # a family, in the slow run
FEW = 15
BATCH, LENGTH = 2, 5

# family -> sizes that build in a millisecond, and the classes that are built from its config
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Bert": (
        {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 7,
         "max_position_embeddings": 9},
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    ),
    "Albert": (
        {"vocab_size": 11, "embedding_size": 6, "hidden_size": 8, "num_hidden_layers": 2, "num_hidden_groups": 2,
         "num_attention_heads": 2, "intermediate_size": 7, "max_position_embeddings": 9},
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    ),
    "XLNet": (
        {"vocab_size": 11, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 7},
        ("Model", "LMHeadModel", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnsweringSimple"),
    ),
    "Encoder": (
        {"input_dim": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 7},
        ("Model", "ForPointRegression", "ForTokenClassification"),
    ),
}  # fmt: skip

# fields that are not declared as such, and names that are fields of no family
LOOSE = ("num_labels", "torch_dtype", "output_attentions", "attn_implementation", "per_layer_config", "model_type",
         "head_dim", "qk_ranks", "unheard_of", "name_or_path")  # fmt: skip
# transformers writes these itself, and a model never reads them
WRITTEN = ("transformers_version",)


class Stranger:
    def __repr__(self):
        return "Stranger()"


# No size between a thousand and 2**40: it would be built, or tried, and either takes the memory of the machine.
NONSENSE = st.sampled_from(
    [None, True, False, -1, 0, 1, 2, 3, -7, 2**40, 2**63, 2**200, -(2**63), 0.0, 0.5, 1.0, 1.5, -0.5, 2.0, math.nan,
     math.inf, -math.inf, 1e300, "", "8", "gelu", "relu", "none", "ü∞", "a\nb", "float32", "no such thing", b"8", [], [1],
     [2, 3], [None, None], [[1]], ["8", 2], {}, {"a": 1}, {0: {}}, {0: {"qk_rank": 3}}, (2, 3), (), {1, 2}, Stranger(),
     np.int64(3), np.float32(0.5), np.float64("nan"), np.array([1, 2]), torch.tensor(3), torch.ones(2), torch.float32,
     1j, range(2), print, "²", "-1", "1" * 5000]
)  # fmt: skip
WIDTHS = st.one_of(st.none(), st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=3))
SHARES = st.one_of(st.sampled_from([0, 0.0, 0.1, 0.5, 1, 1.0]), st.floats(0, 1))
PLAUSIBLE: dict[str, st.SearchStrategy] = {
    "qk_rank": WIDTHS,
    "v_head_dim": WIDTHS,
    "qk_norm": st.booleans(),
    "qk_scale": st.one_of(st.none(), st.floats(1e-6, 1e6), st.integers(1, 9)),
    "output_scale": st.one_of(st.none(), st.floats(1e-6, 1e3)),
    "hidden_act": st.sampled_from(["gelu", "relu", "silu", "tanh", "gelu_new", "quick_gelu"]),
    "ff_activation": st.sampled_from(["gelu", "relu", "silu", "gelu_new"]),
    "attn_type": st.sampled_from(["bi", "uni"]),
    "summary_type": st.sampled_from(["last", "first", "mean", "cls_index"]),
    "summary_activation": st.sampled_from(["tanh", "gelu"]),
    "attention": st.sampled_from(["softmax", "hardmax"]),
    "position": st.sampled_from(["none", "additive", "concatenated"]),
    "norm": st.sampled_from(["l2", "layer", "rms", "none"]),
    "norm_placement": st.sampled_from(["post", "pre"]),
    "input_map": st.sampled_from(["none", "linear", "mlp"]),
    "problem_type": st.sampled_from([None, "regression", "single_label_classification"]),
    "attn_implementation": st.sampled_from([None, "eager", "sdpa"]),
    "dtype": st.sampled_from([None, "float32", "bfloat16", torch.float64]),
    "id2label": st.sampled_from([None, {0: "no"}, {0: "a", 1: "b", 2: "c"}, {"0": "a", "1": "b"}]),
    "label2id": st.sampled_from([None, {"a": 0, "b": 1}]),
    "architectures": st.sampled_from([None, ["RankBertModel"], []]),
}
LAYER_KEYS = st.one_of(
    st.integers(0, 2), st.sampled_from(["0", "1", "01", "²", "x", "", -1, 1.0, True, None, (0,), 2**70])
)
LAYERS = st.dictionaries(
    LAYER_KEYS,
    st.one_of(
        st.dictionaries(
            st.sampled_from([*RANK_FIELDS, "hidden_size", "num_attention_heads", "nothing", 3, None]),
            st.one_of(st.integers(1, 6), NONSENSE),
            max_size=3,
        ),
        st.dictionaries(st.sampled_from(["qk_rank", "v_head_dim"]), st.integers(1, 6), max_size=2),
        NONSENSE,
    ),
    max_size=3,
)


def plausible(name: str, annotation: Any) -> st.SearchStrategy:
    """Values that a user might mean, by the name of a field, else by its type."""
    if name in PLAUSIBLE:
        return PLAUSIBLE[name]
    if "dropout" in name:
        return SHARES
    if name.endswith("_eps") or name == "initializer_range":
        return st.floats(1e-12, 0.5)
    kinds = str(annotation)
    if "bool" in kinds:
        return st.booleans()
    return st.one_of(st.integers(0, 12), st.none()) if "None" in kinds else st.integers(0, 12)


def field_values(family: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some of all the fields of a family over its tiny sizes."""
    config_class = getattr(hf_rankattn, f"Rank{family}Config")
    kinds = {field.name: field.type for field in fields(config_class) if field.name not in WRITTEN}
    kinds |= dict.fromkeys((*config_class.attribute_map, *LOOSE), int)
    sizes, _ = FAMILIES[family]
    values: dict[str, st.SearchStrategy] = {
        name: st.one_of(plausible(name, kind), plausible(name, kind), NONSENSE) for name, kind in kinds.items()
    }
    # what is no field of anybody is kept as it is, and JSON has to hold it: so far as stock configs go too
    values["unheard_of"] = values["qk_ranks"] = st.sampled_from([None, 3, "ü∞", [1], {"a": 1}])
    values["per_layer_config"] = st.one_of(LAYERS, LAYERS, NONSENSE)
    return st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: values[name] for name in names})
    ).map(lambda chosen: {**copy.copy(sizes), **chosen})  # fmt: skip


def made(family: str, given_fields: dict[str, Any], way: str, folder: Path):
    """A config by one of the four doors through which fields come in."""
    config_class = getattr(hf_rankattn, f"Rank{family}Config")
    if way == "called":
        return config_class(**given_fields)
    if way == "from_dict":
        return config_class.from_dict(given_fields)
    if way == "overrides":
        return config_class.from_dict(dict(FAMILIES[family][0]), **given_fields)
    try:
        written = json.dumps(given_fields)
    except (TypeError, ValueError):  # JSON cannot say it, so no file can
        return config_class(**given_fields)
    (folder / "config.json").write_text(written, encoding="utf-8")
    return config_class.from_pretrained(folder)


def inputs_of(config) -> dict[str, torch.Tensor]:
    limit = config.max_position_embeddings
    length = LENGTH if limit < 1 else min(LENGTH, limit)  # XLNet has no limit, and says -1
    if getattr(config, "position", "additive") == "none":
        length = LENGTH
    if getattr(config, "input_dim", None):
        return {"points": torch.randn(BATCH, length, config.input_dim)}
    return {"input_ids": torch.randint(config.vocab_size, (BATCH, length))}


def forward_and_back(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first output of a model, after a look at all of them and at the gradients of all weights."""
    model.zero_grad()
    if "points" in inputs:
        inputs = {"points": inputs["points"].to(model.dtype)}
    outputs = model(**inputs)
    tensors = float_tensors(outputs if isinstance(outputs, tuple) else dict(outputs))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), "outputs are not finite"
    first = tensors[0]
    length = next(iter(inputs.values())).shape[1]
    name, config = type(model).__name__, model.config
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        assert first.shape == (BATCH, length, config.hidden_size)
    elif "SequenceClassification" in name:
        assert first.shape == (BATCH, config.num_labels)
    elif "TokenClassification" in name:
        assert first.shape == (BATCH, length, config.num_labels)
    elif "Point" in name:
        assert first.shape == (BATCH, length, config.output_dim)
    elif "LM" in name:
        assert first.shape == (BATCH, length, config.vocab_size)
    if first.requires_grad:
        first.double().square().sum().backward()
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        assert all(bool(torch.isfinite(grad).all()) for grad in grads), "gradients are not finite"
    return first.detach()


def attempt(family: str, given_fields: dict[str, Any], way: str, suffix: str, saved: bool, folder: Path) -> str:
    """`"refused"` with a readable message, or `"ran"`; whatever else happens is an error of the library."""
    try:
        config = made(family, given_fields, way, folder)
        if "QuestionAnswering" in suffix and config.num_labels != 2:
            suffix = "Model"  # stock question answering unpacks a start and an end, and knows no other number
        model = getattr(hf_rankattn, f"Rank{family}{suffix}")(config)
    except ValueError as error:
        message = str(error)
        assert len(message) > 20 and len(message) < 3000, f"a message of {len(message)} characters: {message[:200]}"
        return "refused"
    model.eval()
    try:
        inputs = inputs_of(config)
        first = forward_and_back(model, inputs)
    except ValueError as error:
        # chunks have to divide the length of a batch, which a config cannot know
        assert "chunk" in str(error), error
        return "refused in forward"
    if saved:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder, dtype=model.dtype).eval()
        # not to the last bit: which attention kernel to use is not saved
        torch.testing.assert_close(forward_and_back(loaded, inputs), first)
        return "ran and loaded"
    return "ran"


def fuzz(family: str, cases: int, folder: Path) -> Counter:
    """Run so many cases of one family, the same at every run; count how they ended."""
    counts: Counter = Counter()
    suffixes = FAMILIES[family][1]

    @settings(
        max_examples=cases, derandomize=True, database=None, deadline=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        field_values(family),
        st.sampled_from(["called", "called", "from_dict", "overrides", "file"]),
        st.one_of(st.just("Model"), st.sampled_from(suffixes)),
        st.integers(0, 3).map(lambda draw: draw == 0),
    )
    def case(given_fields, way, suffix, saved):
        torch.manual_seed(0)
        work = folder / str(sum(counts.values()))
        work.mkdir(exist_ok=True)
        counts[attempt(family, given_fields, way, suffix, saved, work)] += 1

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
    assert sum(counts.values()) >= CASES
    assert min(counts["ran"], counts["ran and loaded"], counts["refused"]) > CASES / 30, counts
