"""Single paths by themselves, and products of maps along them: against networks and products made by hand."""

import itertools
import math

import pytest
import torch
from testing_common import FAMILIES, GPT2, float_tensors, shaken, small_bert, tiny_inputs
from testing_probe import small, value_of
from transformers import BertForPreTraining, BertLMHeadModel

from hf_rankattn import RankEncoderConfig, RankEncoderModel, isolated_paths, path_products
from hf_rankattn.families.architectures import family_of, layers_of
from hf_rankattn.families.projections import submodule
from hf_rankattn.probe.frozen import walk
from hf_rankattn.probe.isolated import Products, draw_paths, sum_of_paths


POST_NORM = [family for family in FAMILIES if family is not GPT2]  # its layers normalise before they add


class TestIsolatedPaths:
    def by_hand(self, model, ids, path):
        """One path of a BERT as a network of its own: {layer: head} from the embeddings, norms without gain and bias."""
        width = model.config.hidden_size // model.config.num_attention_heads
        states = model.embeddings(ids)
        for index, head in enumerate(path):
            if head < 0:
                continue
            attention = model.encoder.layer[index].attention
            part = slice(head * width, (head + 1) * width)
            query, key, value = (
                layer(states)[..., part] for layer in (attention.self.query, attention.self.key, attention.self.value)
            )
            maps = (query @ key.transpose(1, 2) / math.sqrt(width)).softmax(-1)
            total = maps @ value @ attention.output.dense.weight[:, part].T + attention.output.dense.bias
            states = torch.nn.functional.layer_norm(total, total.shape[-1:], eps=model.config.layer_norm_eps)
        return states

    def test_against_networks_made_by_hand(self, paths=5):
        model = small_bert(3, 4).double()
        ids = torch.randint(50, (2, 7))
        for length in range(4):
            chosen = draw_paths([4, 4, 4], length, paths, [0, length])
            assert ((chosen >= 0).sum(1) == length).all() and len(chosen) == paths
            _, states = sum_of_paths(model, {"input_ids": ids}, chosen, mlp=False)
            total = sum(self.by_hand(model, ids, path.tolist()) for path in chosen)
            expected = torch.nn.functional.layer_norm(total, total.shape[-1:], eps=model.config.layer_norm_eps)
            torch.testing.assert_close(states, expected)

    @pytest.mark.parametrize("family", POST_NORM, ids=[family.name for family in POST_NORM])
    def test_every_family_and_restored_to_the_last_bit(self, family):
        model = shaken(family.rank("ForTokenClassification")(family.rank_config(qk_rank=3)))
        batch = tiny_inputs(family, "ForTokenClassification", labels=True)
        before = float_tensors(model(**batch))
        table = isolated_paths(model, batch, paths=3, repetitions=2)
        assert set(table.metric) == {"relative_residual", "loss", "accuracy"}
        assert all(torch.equal(a, b) for a, b in zip(before, float_tensors(model(**batch)), strict=True))
        # a path through more layers of attention without skips has less rank
        curve = table[table.metric == "relative_residual"].groupby("length").value.mean().tolist()
        assert curve[0] > curve[-1]
        again = isolated_paths(model, batch, paths=3, repetitions=2)
        assert table.value.equals(again.value)
        assert not table.value.equals(isolated_paths(model, batch, paths=3, repetitions=2, seed=1).value)

    @pytest.mark.parametrize("name", ["bert", "albert", "distilbert", "xlnet"])
    def test_gains_and_biases_of_norms_change_nothing(self, name):
        model, batch = small(name, layers=2).double(), {"input_ids": torch.arange(1, 9)[None]}
        before = isolated_paths(model, batch, repetitions=2)
        for layer in layers_of(model):
            norm = submodule(layer, family_of(model).attention_norm)
            with torch.no_grad():
                norm.weight.uniform_(0.1, 2)
                norm.bias.normal_()
        assert isolated_paths(model, batch, repetitions=2).value.equals(before.value)

    def test_what_has_no_isolated_paths(self):
        with pytest.raises(ValueError, match="normalise after they add"):
            model = RankEncoderModel(RankEncoderConfig(input_dim=4, norm_placement="pre"))
            isolated_paths(model, {"points": torch.ones(1, 4, 4)})
        batch = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
        for argument, message in (
            ({"paths": 0}, "`paths` must be at least 1, got 0"),
            ({"paths": 2.5}, "`paths` must be a whole number, got 2.5"),
            ({"repetitions": True}, "`repetitions` must be a whole number, got True"),
            ({"seed": -1}, "`seed` must be at least 0, got -1"),
        ):
            with pytest.raises(ValueError, match=message):
                isolated_paths(small_bert(1, 1), batch, **argument)
        lengths = ({"lengths": wrong} for wrong in ([3], [0], [1.5], [], 2, "one"))
        for argument in (*lengths, {"samples": 0}):
            message = "`samples` must be at least 1" if "samples" in argument else "whole numbers within 1 and 2"
            with pytest.raises(ValueError, match=message):
                path_products(small_bert(2, 2), batch, **argument)

    def test_positions_that_all_examples_share(self):
        """They are one row, in front of the tokens here, which does not make the batch one example."""
        model, ids = small_bert(2, 2), torch.randint(50, (3, 6))
        shared = {"position_ids": torch.arange(6)[None], "input_ids": ids}
        for probe in (isolated_paths, path_products):
            assert probe(model, shared).equals(probe(model, {"input_ids": ids}))

    def test_a_head_that_returns_no_logits_of_that_name(self):
        model = BertForPreTraining(small_bert(2, 2).config)
        labels = {"labels": torch.randint(50, (2, 6)), "next_sentence_label": torch.tensor([0, 1])}
        table = isolated_paths(model, {"input_ids": torch.randint(50, (2, 6)), **labels}, repetitions=1)
        assert set(table.metric) == {"relative_residual", "loss"}

    def test_accuracy_where_each_token_names_the_next(self):
        model = BertLMHeadModel(small_bert(1, 1, is_decoder=True).config)
        with torch.no_grad():  # a head that always says 7
            model.cls.predictions.bias.zero_()[7] = 1e4
        batch = {"input_ids": torch.tensor([[7, 1, 7, 7]]), "labels": torch.tensor([[7, 1, 7, 7]])}
        table = isolated_paths(model, batch, repetitions=1)
        assert value_of(table, "accuracy").tolist() == pytest.approx([2 / 3, 2 / 3])


class TestProducts:
    def test_against_products_of_the_maps_that_the_model_returns(self):
        model, ids = small_bert(3, 2).double(), torch.randint(50, (2, 6))
        chosen = torch.tensor(list(itertools.product([-1, 0, 1], repeat=3))).numpy()[1:]
        examples = torch.arange(len(chosen)).numpy() % 2
        walker = Products(chosen, examples)
        walk(model, {"input_ids": ids}, walker)
        model.set_attn_implementation("eager")
        maps = model(ids, output_attentions=True).attentions
        for product, path, example in zip(walker.products, chosen, examples, strict=True):
            expected = torch.eye(6, dtype=torch.float64)
            for layer, head in enumerate(path):
                if head >= 0:
                    expected = maps[layer][example, head] @ expected
            torch.testing.assert_close(product, expected)
