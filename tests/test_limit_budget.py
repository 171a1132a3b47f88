"""One budget over layers, key heads and both kinds of widths, and the training of projections."""

import numpy as np
import pytest
import torch
from testing_common import shaken
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_rankattn import limit_rank
from hf_rankattn.limit.attaching import entered
from hf_rankattn.limit.damage import Sloping, add_slopes
from hf_rankattn.limit.limiting import slopings_of


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 50,
}
torch.manual_seed(0)
IDS = torch.randint(50, (8, 16), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, 10:] = 0
BATCH = {"input_ids": IDS, "attention_mask": PADDED}


def decoder():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(5)
    return model


def encoder():
    return shaken(BertModel(BertConfig(**SIZES))).eval()


def output(model):
    with torch.no_grad():
        found = model(**BATCH)
    return (found.logits if "logits" in found else found.last_hidden_state)[PADDED.bool()].double()


def error(model, **request) -> float:
    whole = output(model)
    with limit_rank(model, calibration=BATCH, **request):
        return float((output(model) - whole).norm() / whole.norm())


@pytest.mark.parametrize("make", [decoder, encoder])
@pytest.mark.parametrize(
    "equal, auto",
    [
        ({"qk_rank": 4}, {"qk_rank": "auto", "mean_rank": 4}),
        ({"v_head_dim": 6}, {"v_head_dim": "auto", "mean_rank": 6}),
        ({"qk_rank": 4, "v_head_dim": 6}, {"qk_rank": "auto", "v_head_dim": "auto", "mean_rank": 5}),
        ({"qk_rank": 4, "v_head_dim": 6}, {"qk_rank": "auto", "v_head_dim": "auto", "mean_rank": (4, 6)}),
    ],
)
def test_a_budget_loses_less_than_equal_widths_and_spends_no_more(make, equal, auto):
    model = make()
    assert error(model, **auto) < error(model, **equal)
    with limit_rank(model, calibration=BATCH, **auto) as limit:
        kinds = [width for head in limit.heads for width in head.key_ranks] if "qk_rank" in auto else []
        kinds += [width for head in limit.heads for width in head.value_widths] if "v_head_dim" in auto else []
    assert np.mean(kinds) <= np.mean(auto["mean_rank"]) and min(kinds) >= 1
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_the_damage_of_queries_and_keys_is_that_of_the_slopes():
    """Row by row: the change of the loss to first order is the slope of a query times the part of its projection that is lost."""
    model = decoder()
    batch = {"input_ids": IDS[:2]}
    seen = []

    class Recorded(Sloping):
        def listening(self, states, by_head, add):
            self.head = self.key_heads[0]
            if add == "add_keys":
                kept, before = self.head.add_keys, by_head(states.detach())
                self.head.add_keys = lambda query, slope: (seen.append((before, query, slope)), kept(query, slope))
            return super().listening(states, by_head, add)

    slopings = [Recorded(one.widths, one.key_heads[:1]) for one in slopings_of(model, batch, None)]
    with entered(model, slopings):
        add_slopes(model, slopings, batch, seed=0)
    for sloping, (_, query, slope) in zip(slopings, reversed(seen), strict=True):
        lost = sloping.head.lost_keys
        for rank in (1, 3, 7):
            form = np.eye(8) - (sloping.head.query[:, :rank] @ sloping.head.key[:, :rank].T).double().numpy()
            change = np.einsum("hnx,xy,hny->hn", query.double().numpy(), form, slope.double().numpy())
            assert np.isclose(float(lost[rank - 1]), (change**2).sum() / 2, rtol=1e-4)
        assert float(lost[-1]) < 1e-6 * float(lost[0])


def test_training_the_projections_lowers_the_error_and_leaves_the_weights():
    model = decoder()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    whole = output(model)
    losses = []
    with limit_rank(model, 3, 6, calibration=BATCH) as limit:
        untrained = (output(model) - whole).norm()
        limit.distil([BATCH], 40, progress=lambda step, loss: losses.append(loss))
        assert (output(model) - whole).norm() < 0.8 * untrained and losses[-1] < losses[0]
        assert not any(weight.requires_grad for weight in limit.parameters())
    assert torch.equal(output(model), whole)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    "request_, message",
    [
        ({"qk_rank": "auto"}, "mean_rank"),
        ({"qk_rank": 4, "mean_rank": 4}, "'auto'"),
        ({"qk_rank": "auto", "mean_rank": 0.5}, "at least 1"),
        ({"v_head_dim": "wide", "mean_rank": 4}, "auto"),
    ],
)
def test_contradictory_budgets(request_, message):
    with pytest.raises(ValueError, match=message):
        limit_rank(decoder(), calibration=BATCH, **request_)
