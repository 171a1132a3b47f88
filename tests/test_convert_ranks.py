"""Ranks chosen from spectra: by energy in every layer, by one mean budget."""

from itertools import product

import numpy as np
import pytest
import torch
from testing_common import BERT, FAMILIES, FAMILY_IDS, XLNET, attention_modules, tiny_inputs
from testing_convert import difference, plain_inputs, trained_like
from transformers import AutoModel

from hf_rankattn import convert_rank
from hf_rankattn.convert import convert_model
from hf_rankattn.convert.by_damage import LastStates, ranks_for_damage
from hf_rankattn.convert.checkpoint import own_ranks
from hf_rankattn.convert.ranks import ranks_for_budget, ranks_for_energy
from hf_rankattn.families.architectures import base_of


def all_ranks(width, layers, budget):
    """Every way to spend at most this budget."""
    return [ranks for ranks in product(range(1, width + 1), repeat=layers) if sum(ranks) <= budget]


class TestRanksByDamage:
    @pytest.mark.parametrize("seed", range(20))
    def test_no_other_choice_has_a_smaller_sum_of_damages(self, seed):
        """Against all choices, for curves of any shape: convex, with steps, with equal values, impossible at small ranks."""
        random = np.random.default_rng(seed)
        curves = [-np.sort(-random.choice([0.0, 1, 2, 2, 3, 5, 8, np.inf], 5)) for _ in range(4)]
        for curve in curves:
            curve[-1] = 0.0
        for budget in (9, 12, 19):
            least = min(sum(c[r - 1] for c, r in zip(curves, ranks, strict=True)) for ranks in all_ranks(5, 4, budget))
            chosen = ranks_for_damage(curves, budget / 4)
            assert sum(chosen) <= budget
            assert sum(c[r - 1] for c, r in zip(curves, chosen, strict=True)) == least

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_the_chosen_ranks_are_near_the_best_of_all(self, family):
        """The damage of the whole cut model, for every choice of its ranks: chosen by single layers, it is among the best."""
        model, batch = trained_like(family).float(), plain_inputs(family)
        judge = LastStates(model, batch)
        layers = len(own_ranks(model.config))
        mean = 3
        ways = [ranks for ranks in all_ranks(5, layers, mean * layers) if sum(ranks) == mean * layers]
        damage = {ranks: judge.damage(convert_rank(model, list(ranks), calibration=batch)) for ranks in ways}
        chosen = convert_rank(model, "auto", mean_rank=mean, ranks="damage", calibration=batch)
        found = judge.damage(chosen)
        assert sum(own_ranks(chosen.config)) == mean * layers
        assert found <= sorted(damage.values())[len(damage) // 3]

    def test_damage_is_the_change_of_embeddings_or_of_every_token(self):
        """Held against plain loops over the texts, without padding."""
        for suffix in ("Model", "ForMaskedLM"):
            model, batch = trained_like(BERT, suffix), plain_inputs(BERT, suffix)
            cut = convert_rank(model, 2)
            change = energy = 0.0
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                alone = {"input_ids": ids[mask.bool()][None]}
                old, new = (base_of(one)(**alone).last_hidden_state[0] for one in (model, cut))
                if suffix == "Model":
                    old, new = old.mean(0), new.mean(0)
                change, energy = change + float((new - old).square().sum()), energy + float(old.square().sum())
            assert LastStates(model, batch).damage(cut) == pytest.approx(change / energy)

    def test_layers_keep_the_ranks_that_they_have(self):
        """None is widened, and a layer below all ranks that are tried is left as it is."""
        config = BERT.rank_config(per_layer_config={0: {"qk_rank": 1}, 1: {"qk_rank": 8}, 2: {"qk_rank": 8}})
        model = BERT.rank("Model")(config)
        cut = convert_rank(model, "auto", mean_rank=5, ranks="damage", calibration=plain_inputs(BERT))
        ranks = own_ranks(cut.config)
        assert ranks[0] == 1 and max(ranks) <= 8 and 14 <= sum(ranks) <= 15

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"ranks": "luck"}, "must be 'spectra' or 'damage'"),
            ({"ranks": "damage", "energy": 0.9}, "give qk_rank='auto' or v_head_dim='auto', and `mean_rank`"),
            ({"ranks": "damage", "mean_rank": 3, "calibration": None}, "measured on texts"),
            ({"ranks": "damage", "mean_rank": float("inf")}, "more than the heads have"),
        ],
    )
    def test_requests_that_make_no_sense(self, arguments, message):
        model = BERT.stock("Model")(BERT.stock_config())
        with pytest.raises(ValueError, match=message):
            convert_rank(model, "auto", **{"calibration": plain_inputs(BERT), **arguments})


class TestRanks:
    def test_energy_is_kept_in_every_layer_and_not_with_one_less(self):
        generator = torch.Generator().manual_seed(0)
        spectra = [torch.rand(4, 8, generator=generator).sort(descending=True).values for _ in range(5)]
        for rank, singular in zip(ranks_for_energy(spectra, 0.9), spectra, strict=True):
            share = [singular[:, :r].square().sum() / singular.square().sum() for r in (rank - 1, rank)]
            assert share[0] < 0.9 <= share[1]

    def test_the_budget_is_spent_where_it_saves_most(self):
        """Against all ways to spend it."""
        generator = torch.Generator().manual_seed(3)
        spectra = [torch.rand(2, 4, generator=generator).sort(descending=True).values for _ in range(3)]

        def lost(ranks):
            return sum(
                (s[:, r:].square().sum() / s.square().sum()).item() for s, r in zip(spectra, ranks, strict=True)
            )

        best = min(lost(ranks) for ranks in product(range(1, 5), repeat=3) if sum(ranks) <= 7)
        chosen = ranks_for_budget(spectra, 7 / 3)
        assert sum(chosen) == 7 and lost(chosen) == pytest.approx(best)

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    @pytest.mark.parametrize("calibrated", [False, True])
    def test_auto(self, family, calibrated, tmp_path):
        model, batch = trained_like(family).float(), tiny_inputs(family, "Model")
        options = {"calibration": batch} if calibrated else {}
        converted, reports = convert_model(model, "auto", energy=0.9, **options)
        assert all(report.rank <= 8 for report in reports)
        assert calibrated or all(report.energy_kept >= 0.9 for report in reports)
        spread = convert_rank(model, "auto", mean_rank=4, **options)
        ranks = [module.qk_rank for module in attention_modules(spread)]
        assert sum(ranks) == 4 * len(ranks)
        converted.save_pretrained(tmp_path)
        assert difference(AutoModel.from_pretrained(tmp_path).eval(), converted, batch) < 1e-6


def test_widths_can_be_arrays_of_numpy():
    model = BERT.stock("Model")(BERT.stock_config())
    converted = convert_rank(model, np.array([3, 4, 5]), np.int64(6))
    heads = [converted.config.head_geometry(layer) for layer in range(3)]
    assert [(head.qk_rank, head.v_head_dim) for head in heads] == [(3, 6), (4, 6), (5, 6)]


def test_auto_never_widens_a_layer():
    config = XLNET.rank_config(per_layer_config={0: {"qk_rank": 3}, 1: {"qk_rank": 6}})
    model = XLNET.rank("Model")(config).double().eval()
    old = [config.head_geometry(layer).qk_rank for layer in range(config.num_hidden_layers)]
    _, reports = convert_model(model, "auto", energy=1.0)
    assert all(report.rank <= rank for report, rank in zip(reports, old, strict=True))
