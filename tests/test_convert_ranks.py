"""Ranks chosen from spectra: by energy in every layer, by one mean budget."""

import pytest
import torch
from testing_common import FAMILIES, FAMILY_IDS, XLNET, attention_modules, tiny_inputs
from testing_convert import difference, trained_like
from transformers import AutoModel

from hf_rankattn import convert_rank
from hf_rankattn.convert import convert_model
from hf_rankattn.convert.ranks import ranks_for_budget, ranks_for_energy


class TestRanks:
    def test_energy_is_kept_in_every_layer_and_not_with_one_less(self):
        generator = torch.Generator().manual_seed(0)
        spectra = [torch.rand(4, 8, generator=generator).sort(descending=True).values for _ in range(5)]
        for rank, singular in zip(ranks_for_energy(spectra, 0.9), spectra, strict=True):
            share = [singular[:, :r].square().sum() / singular.square().sum() for r in (rank - 1, rank)]
            assert share[0] < 0.9 <= share[1]

    def test_the_budget_is_spent_where_it_saves_most(self):
        """Against all ways to spend it."""
        from itertools import product

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


def test_auto_never_widens_a_layer():
    config = XLNET.rank_config(per_layer_config={0: {"qk_rank": 3}, 1: {"qk_rank": 6}})
    model = XLNET.rank("Model")(config).double().eval()
    old = [config.head_geometry(layer).qk_rank for layer in range(config.num_hidden_layers)]
    _, reports = convert_model(model, "auto", energy=1.0)
    assert all(report.rank <= rank for report, rank in zip(reports, old, strict=True))
