"""Rank limits in folders and on the Hub: loaded to the last bit, described by a card, and refused where they are damaged."""

import json

import pytest
import torch
import yaml
from hub_stand_in import HubStandIn
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from test_sharing import answers_of
from testing_probe import small

from hf_rankattn import RankLimit, limit_rank


WEIGHTS, CONFIG = "rank_limit.safetensors", "rank_limit.json"


@pytest.fixture
def model():
    return small("llama", hidden=32)


@pytest.fixture
def batch():
    return {"input_ids": torch.randint(47, (2, 14))}


def states(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).last_hidden_state


@pytest.mark.parametrize("widths", [(3, 4), (2, None), (None, 5), ([8, [2, 3], 8], [8, 4, [8, 1]])])
def test_a_folder_gives_the_same_limit(widths, model, batch, tmp_path):
    with limit_rank(model, *widths, calibration=batch) as limit:
        expected = states(model, batch)
        folder = limit.save_pretrained(tmp_path / "limit")
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, CONFIG, "README.md"}
    # a limit is small: its projections, a header and the text
    projections = sum(weight.nbytes for weight in limit.parameters())
    assert (folder / WEIGHTS).stat().st_size < projections + 4000
    with RankLimit.from_pretrained(model, folder) as again:
        assert torch.equal(states(model, batch), expected)
        assert again.facts == limit.facts and not any(weight.requires_grad for weight in again.parameters())
    assert not torch.equal(states(model, batch), expected)


def test_a_bfloat16_model_and_its_limit(model, batch, tmp_path):
    model.bfloat16()
    with limit_rank(model, 3, 4, calibration=batch) as limit:
        expected = states(model, batch)
        limit.save_pretrained(tmp_path / "limit")
    with RankLimit.from_pretrained(model, tmp_path / "limit"):
        assert torch.equal(states(model, batch), expected)


def test_a_folder_is_replaced_only_if_it_is_asked_for_and_holds_a_limit(model, batch, tmp_path):
    limit = limit_rank(model, 3, calibration=batch)
    folder = limit.save_pretrained(tmp_path / "limit")
    with pytest.raises(ValueError, match="overwrite"):
        limit.save_pretrained(folder)
    limit.save_pretrained(folder, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="rank limit|rank_limit"):
        limit.save_pretrained(tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def with_description(change):
    def spoil(folder) -> None:
        described = json.loads((folder / CONFIG).read_text())
        change(described)
        (folder / CONFIG).write_text(json.dumps(described))

    return spoil


def with_weights(change):
    def spoil(folder) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return spoil


# what is done to a folder, and what is said of it
DAMAGED = {
    "cut": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-200]),
        "not safetensors, or are cut short",
    ),
    "no-weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read"),
    "no-description": (lambda folder: (folder / CONFIG).unlink(), "cannot be read"),
    "no-JSON": (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read"),
    "list": (lambda folder: (folder / CONFIG).write_text("[]"), "cannot be read"),
    "field": (with_description(lambda told: told["layers"][1].pop("qk")), "cannot be read.*qk"),
    "format": (with_description(lambda told: told.update(format=2)), "has the format 2, and this version reads 1"),
    "type": (
        with_description(lambda told: told.update(model_type="gpt2")),
        "is for a model of type gpt2, and the model is of type llama",
    ),
    "ranks": (
        with_description(lambda told: told["layers"][1].update(key_ranks=[5, 5])),
        "the query of layer 1 is .4, 8, 3., and its widths need .4, 8, 5.",
    ),
    "layers": (with_description(lambda told: told.update(layers=2 * told["layers"])), "no query|for 6 layers"),
    "missing": (with_weights(lambda weights: weights.pop("heads.1.key")), "layer 1 has no (query|key)"),
    "nan": (
        with_weights(lambda weights: weights["heads.1.key"].fill_(torch.nan)),
        "the key of layer 1 holds NaN or Inf",
    ),
}


@pytest.mark.parametrize("spoil, reason", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_folder_is_refused_by_what_is_wrong(spoil, reason, model, batch, tmp_path):
    whole = states(model, batch)
    with limit_rank(model, 3, 4, calibration=batch) as limit:
        folder = limit.save_pretrained(tmp_path / "limit")
    spoil(folder)
    with pytest.raises(ValueError, match=reason):
        RankLimit.from_pretrained(model, folder)
    assert torch.equal(states(model, batch), whole)


def test_the_card_says_what_is_kept_and_how_to_load_it(model, batch, tmp_path):
    model.config.name_or_path = model.name_or_path = "someone/small-llama"
    limit = limit_rank(model, [3, 3, [2, 5]], [4, 4, 4], calibration=batch, objective="logits")
    text = (limit.save_pretrained(tmp_path / "limit") / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "someone/small-llama" and {"rank-limit", "llama"} <= set(head["tags"])
    assert "| 0 to 1 | 4 | 2 | 3 of 8 | 4 of 8 |" in text and "| 2 | 4 | 2 | 2, 5 of 8 | 4 of 8 |" in text
    assert f"{2 * (6 + 8) + 7 + 8} numbers per token instead of {3 * 2 * 16}" in text
    assert "objective: logits" in text and "calibration tokens: 28" in text
    assert str(tmp_path) not in text


PUSH = """
import json, sys, torch
sys.path.insert(0, "tests")
from testing_probe import small
from hf_rankattn import RankLimit, limit_rank

torch.manual_seed(0)
model = small("llama", hidden=32)
batch = {"input_ids": torch.randint(47, (2, 14))}
with limit_rank(model, 3, 4, calibration=batch) as limit:
    pushed = model(**batch).last_hidden_state
    limit.push_to_hub("user/limit")
    limit.push_to_hub("user/limit", commit_message="again", revision="main")
with RankLimit.from_pretrained(model, "user/limit"):
    print(json.dumps(torch.equal(model(**batch).last_hidden_state, pushed)))
"""


def test_pushed_and_loaded_through_the_hub():
    with HubStandIn() as hub:
        assert answers_of(PUSH, **hub.env()) is True
        files = hub.files("user/limit")
    assert {WEIGHTS, CONFIG, "README.md"} <= set(files)
    card = ModelCard(files["README.md"].decode())
    assert 'from_pretrained(model, "user/limit")' in card.text and "rank-limit" in card.data.tags
