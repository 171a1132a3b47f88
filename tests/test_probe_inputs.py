"""The entrance of every probe: which models and batches are taken, which are refused, and that the caller's modes do not matter."""

import pandas as pd
import pytest
import torch
from testing_common import BERT, FAMILIES, FAMILY_IDS, VOCAB, XLNET, shaken, tiny_inputs
from testing_probe import close, examples_alone, small
from transformers import AutoModel, AutoTokenizer, BertForTokenClassification, BertModel

from hf_rankattn import (
    ablate,
    isolated_paths,
    layer_bounds,
    measure_attention,
    measure_collapse,
    measure_logits,
    measure_weights,
    path_lengths,
    path_products,
    path_terms,
)
from hf_rankattn.measure import cheap_metrics, factor_spectrum, token_cosine


ON_BATCHES = {
    "collapse": measure_collapse,
    "attention": lambda model, batch: measure_attention(model, batch, metrics="full"),
    "logits": measure_logits,
    "path_lengths": path_lengths,
    "path_terms": path_terms,
    "isolated_paths": lambda model, batch: isolated_paths(model, batch, repetitions=1),
    "path_products": path_products,
    "bounds": layer_bounds,
}
PROBES = {**ON_BATCHES, "weights": lambda model, batch: measure_weights(model)}
every_probe = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
every_probe_of_batches = pytest.mark.parametrize("probe", ON_BATCHES.values(), ids=ON_BATCHES)
IDS = torch.arange(24).view(2, 12)


def tiny(model_class=BertModel):
    return model_class(BERT.stock_config(vocab_size=50, num_hidden_layers=2)).eval()


class OfNotebook(BertModel):
    """As many wrappers, it names only `labels`; transformers finds no source of it, as of a class in a notebook."""

    __module__ = "a_notebook"
    _can_set_attn_implementation_cached_value = None

    def forward(self, *args, labels=None, **kwargs):
        return super().forward(*args, **kwargs)


class LooseTagger(BertForTokenClassification):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@every_probe
def test_the_modes_of_the_caller_change_no_number(probe):
    model, batch = tiny(), {"input_ids": IDS}
    expected = probe(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pd.testing.assert_frame_equal(probe(model, batch), expected, check_exact=True)
        assert torch.is_autocast_enabled("cpu")
    with torch.inference_mode():
        pd.testing.assert_frame_equal(probe(model, batch), expected, check_exact=True)


def test_nor_does_it_change_the_measures_of_tensors():
    states, maps = torch.randn(3, 9, 16), torch.softmax(torch.randn(3, 9, 9), -1)
    measures = (
        lambda: token_cosine(states),
        lambda: cheap_metrics(maps)["stable_rank"],
        lambda: factor_spectrum(states, states),
    )
    for measure in measures:
        expected = measure()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(measure(), expected)


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
@pytest.mark.parametrize("name", ["collapse", "attention", "cheap attention", "logits", "path_lengths", "bounds"])
def test_padding_changes_no_number(name, family):
    probe = {**PROBES, "cheap attention": measure_attention}[name]
    model, batch = shaken(family.stock("Model")(family.stock_config())).double(), tiny_inputs(family, "Model")
    together = probe(model, batch)
    keys = [column for column in together if column not in ("model", "example", "value", "note")]
    for example, own in examples_alone(batch):
        alone = probe(model, own)
        merged = together[together.example == example].merge(alone, on=keys, suffixes=("", "_alone"))
        assert len(merged) == len(alone) > 0
        merged = merged[~merged.metric.isin(["reconstruction_error", "stable_rank_error"])]
        close(merged.value, merged.value_alone, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["collapse", "attention", "logits", "weights", "path_lengths", "path_terms", "bounds"]
)
def test_weights_that_are_not_finite_are_an_error(name):
    model = tiny()
    with torch.no_grad():
        for projection in ("query", "value"):  # torch's fused attention returns zeros for NaN queries
            model.encoder.layer[1].attention.self.get_submodule(projection).weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="hold NaN or Inf"):
        PROBES[name](model, {"input_ids": IDS})


@every_probe
def test_a_forward_that_passes_on_its_arguments_in_a_class_without_source(probe):
    model, batch = tiny(), {"input_ids": IDS, "labels": torch.zeros(2)}
    loose = tiny(OfNotebook)
    loose.load_state_dict(model.state_dict())
    before = loose.config._attn_implementation
    pd.testing.assert_frame_equal(probe(loose, batch), probe(model, batch), check_exact=True)
    assert loose.config._attn_implementation == before == "sdpa"


def test_also_above_a_task_head():
    batch = {"input_ids": IDS, "labels": IDS % 2}
    tagger = tiny(BertForTokenClassification)
    loose = tiny(LooseTagger)
    loose.load_state_dict(tagger.state_dict())
    expected = path_lengths(tagger, batch, loss=True)
    assert "loss_up_to" in set(expected.metric)
    pd.testing.assert_frame_equal(path_lengths(loose, batch, loss=True), expected, check_exact=True)


@pytest.fixture(scope="module")
def sentence_model(minilm):
    library = pytest.importorskip("sentence_transformers")
    return library.SentenceTransformer(minilm, device="cpu")


@pytest.mark.parametrize("name", ["collapse", "weights", "bounds"])
def test_a_sentence_transformer_is_measured_as_the_model_inside(name, sentence_model, minilm):
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(["Depth loses rank.", "Skips keep it."], return_tensors="pt", padding=True)
    expected = PROBES[name](AutoModel.from_pretrained(minilm), batch)
    pd.testing.assert_frame_equal(PROBES[name](sentence_model, batch), expected, check_exact=True)


def test_and_is_ablated_as_the_model_inside(sentence_model):
    before = sentence_model.encode("Depth loses rank.")
    with ablate(sentence_model, attention_skip=True, mlp=True):
        assert abs(before - sentence_model.encode("Depth loses rank.")).max() > 0.01
    assert (before == sentence_model.encode("Depth loses rank.")).all()


@every_probe
def test_a_model_without_layers_is_refused(probe):
    with pytest.raises(ValueError, match="the BertModel has no layers"):
        probe(BertModel(BERT.stock_config(num_hidden_layers=0)), {"input_ids": IDS})


@every_probe
def test_what_is_no_model_with_weights_is_refused(probe):
    for other in (torch.nn.Linear(2, 2), torch.nn.Sequential(), "bert-base-uncased"):
        with pytest.raises(ValueError, match="must be a transformers model in PyTorch, got a (Linear|Sequential|str)"):
            probe(other, {"input_ids": IDS})
    with torch.device("meta"):
        model = tiny()
    with pytest.raises(ValueError, match="weights of the model are on the meta device"):
        probe(model, {"input_ids": IDS})


@every_probe_of_batches
@pytest.mark.parametrize(
    "batch, message",
    [
        ({"input_ids": IDS.float()}, "`input_ids` must be of dtype torch.int64 or torch.int32, got torch.float32"),
        ({"input_ids": IDS - 1}, r"`input_ids` must be 0 to 49 \(vocab_size is 50\), got values from -1 to 22"),
        ([{"input_ids": IDS}, {"input_ids": IDS + 30}], r"be 0 to 49 \(vocab_size is 50\), got values from 30 to 53"),
        ({"input_ids": IDS, "token_type_ids": IDS}, r"`token_type_ids` must be 0 to 1 \(type_vocab_size is 2\)"),
        ({"input_ids": IDS, "position_ids": IDS + 60}, "`position_ids` must be 0 to 63"),
        ({"input_ids": IDS.to("meta")}, "`input_ids` is on the meta device"),
        ({"input_ids": IDS, "attention_mask": IDS.to("meta")}, "`attention_mask` is on the meta device"),
        ({"input_ids": IDS[:0]}, "must hold at least one example"),
        ({"inputs_embeds": torch.ones(2, 12, 32).long()}, "`inputs_embeds` must hold floating-point numbers"),
        ([], "`inputs` is empty"),
        (None, "`inputs` must be a batch"),
        ([torch.ones(2, 3)], "must be a dict of tensors"),
        ({"pixel_values": torch.ones(1, 3)}, "no entry of the batch is an input"),
        ({"input_ids": IDS[0]}, r"tokens must be \(batch, n\), got \(12,\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, r"mask is \(2, 5\), and the tokens are \(2, 12\)"),
        ({"input_ids": IDS[:, :1]}, "one token has no others"),
        ({"input_ids": IDS.repeat(1, 6)}, "has 72 tokens, but the model has 64 positions"),
        (
            {"input_ids": IDS, "attention_mask": torch.eye(2, 12)},
            r"examples \[0, 1\] of the batch have fewer than two",
        ),
    ],
)
def test_batches_that_no_model_can_read_are_refused_in_plain_words(probe, batch, message):
    with pytest.raises(ValueError, match=message):
        probe(tiny(), batch)


def test_what_other_families_read_is_let_in():
    positions = {"input_ids": IDS[:, :9] % VOCAB, "token_type_ids": IDS[:, :9] % 5}  # XLNet only compares token types
    measure_collapse(XLNET.stock("Model")(XLNET.stock_config()).eval(), positions, ["san"])
    model = small("vit", layers=1)
    measure_collapse(model, {"pixel_values": torch.rand(1, 3, 8, 8)}, ["transformer"])
    with pytest.raises(ValueError, match="`pixel_values` must hold floating-point numbers, got torch.uint8"):
        measure_collapse(model, {"pixel_values": torch.ones(1, 3, 8, 8, dtype=torch.uint8)}, ["transformer"])
    measure_collapse(tiny(), {name: value.int() for name, value in tiny_inputs(BERT, "Model").items()}, ["san"])
