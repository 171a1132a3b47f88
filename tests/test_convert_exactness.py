"""Conversion from the weights alone: exact where the rank allows it, Eckart-Young where it does not."""

import pytest
import torch
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, TASK_IDS, TASKS, XLNET, tiny_inputs
from testing_convert import difference, entries, trained_like
from transformers import BertModel

from hf_rankattn import convert_rank
from hf_rankattn.convert import convert_model


class TestExactness:
    @pytest.mark.parametrize("family, suffix", TASKS, ids=TASK_IDS)
    @pytest.mark.parametrize("rank", [8, 11])
    def test_a_rank_that_is_not_smaller_changes_nothing(self, family, suffix, rank):
        model = family.stock(suffix)(family.stock_config()).eval()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        converted = convert_rank(model, rank)
        assert type(converted) is family.rank(suffix) and converted.config.head_geometry(0).qk_rank == rank
        assert difference(converted, model, tiny_inputs(family, suffix)) < 1e-6
        assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
        shared = {w.data_ptr() for w in model.parameters()} & {w.data_ptr() for w in converted.parameters()}
        assert not shared, "the converted model must not share storage with its argument"

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    @pytest.mark.parametrize("rank", [3, 11])
    def test_the_default_dtype_of_torch_does_not_matter(self, family, rank, request):
        model = trained_like(family).float()
        usual = convert_rank(model, rank).state_dict()
        request.getfixturevalue("float64_default")
        other = convert_rank(model, rank).state_dict()
        assert {weight.dtype for weight in other.values()} == {torch.float32}
        assert all(torch.equal(usual[name], weight) for name, weight in other.items())

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_a_rank_model_is_converted_in_turn(self, family):
        model = family.rank("Model")(family.rank_config(qk_rank=6, v_head_dim=5, qk_scale=0.3)).eval()
        wide = convert_rank(model, 9)
        batch = tiny_inputs(family, "Model")
        assert difference(wide, model, batch) < 1e-6
        assert wide.config.head_geometry(0)[1:] == (9, 5, False, 0.3)
        if family is not XLNET:  # whose three biases become one when its rank is cut
            assert difference(convert_rank(wide, 6), model, batch) < 1e-6, "zero keys are the first to be cut"

    def test_layers_of_different_geometry(self):
        model = BERT.rank("Model")(BERT.rank_config(per_layer_config={0: {"qk_rank": 3}, 1: {"v_head_dim": 5}})).eval()
        converted = convert_rank(model, [3, 8, 8])
        assert difference(converted, model, tiny_inputs(BERT, "Model")) < 1e-6
        new, old = ([m.config.head_geometry(i) for i in range(3)] for m in (converted, model))
        assert new == old

    def test_new_dimensions_can_learn(self):
        model = BERT.stock("Model")(BERT.stock_config())
        wide = convert_rank(model, 12)
        wide(**tiny_inputs(BERT, "Model")).last_hidden_state.square().sum().backward()
        gradient = wide.encoder.layer[0].attention.self.key.weight.grad.view(4, 12, 32)
        assert bool((gradient[:, 8:].abs().sum((1, 2)) > 0).all())

    def test_mode_flags_ties_and_buffers_are_kept(self):
        model = BERT.stock("ForMaskedLM")(BERT.stock_config()).train().to(torch.bfloat16)
        model.bert.embeddings.requires_grad_(False)
        converted = convert_rank(model, 4)
        assert converted.training and converted.dtype == torch.bfloat16
        assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight
        assert not converted.bert.embeddings.LayerNorm.weight.requires_grad
        assert converted.bert.encoder.layer[0].attention.self.query.weight.requires_grad
        assert convert_rank(BertModel(BERT.stock_config(), add_pooling_layer=False), 4).pooler is None


class TestWeightsOnly:
    @pytest.mark.parametrize("family", [BERT, ALBERT], ids=["Bert", "Albert"])
    def test_reaches_eckart_young_of_the_augmented_form(self, family):
        model = trained_like(family)
        converted, reports = convert_model(model, 3)
        lost = total = 0.0
        (_, old), (_, new) = entries(model), entries(converted)
        for head in range(4):
            forms = []
            for tensors, width in ((old, 8), (new, 3)):
                rows = slice(head * width, (head + 1) * width)
                query, key = (
                    torch.cat([tensors[f"{n}.weight"][rows].T, tensors[f"{n}.bias"][None, rows]])
                    for n in ("query", "key")
                )
                forms.append(query @ key.T)
            energy = torch.linalg.svdvals(forms[0]).square()
            torch.testing.assert_close((forms[0] - forms[1]).square().sum(), energy[3:].sum(), rtol=1e-6, atol=0)
            lost, total = lost + energy[3:].sum().item(), total + energy.sum().item()
        assert reports[0].energy_kept == pytest.approx(1 - lost / total, abs=1e-9)

    def test_xlnet_reaches_eckart_young_of_its_three_terms_together(self):
        model = trained_like(XLNET)
        converted = convert_rank(model, 3)
        (_, old), (_, new) = entries(model), entries(converted)
        for head in range(4):
            forms = []
            for tensors in (old, new):
                blocks = []
                for keys, bias in (("k", "r_w_bias"), ("r", "r_r_bias"), ("seg_embed", "r_s_bias")):
                    key = tensors[keys][:, head]
                    blocks.append(torch.cat([tensors["q"][:, head] @ key.T, (tensors[bias][head] @ key.T)[None]]))
                forms.append(torch.cat(blocks, dim=1))
            tail = torch.linalg.svdvals(forms[0])[3:].square().sum()
            torch.testing.assert_close((forms[0] - forms[1]).square().sum(), tail, rtol=1e-6, atol=0)
