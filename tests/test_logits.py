"""Spectra of logits, against logits that are made, centred and decomposed in full."""

import pytest
import torch
from testing_common import ALBERT, BERT, XLNET, tiny_inputs
from testing_probe import small
from transformers import BertConfig, BertModel

from hf_rankattn import RankEncoderConfig, RankEncoderModel, measure_logits
from hf_rankattn.measure.spectrum import spectrum_metrics


def from_maps(maps):
    """Row-centred logits are row-centred logarithms of maps: the normaliser is constant along a row."""
    logits = maps.double().log()
    return logits - logits.mean(-1, keepdim=True)


def long_of(table, metric, example=0, layer=0):
    return torch.tensor(
        table[(table.metric == metric) & (table.example == example) & (table.layer == layer)].value.to_numpy()
    )


@pytest.mark.parametrize("family", [BERT, ALBERT], ids=["Bert", "Albert"])
@pytest.mark.parametrize("kind", ["stock", "rank"])
def test_the_logits_are_those_of_the_maps(family, kind):
    config = family.stock_config() if kind == "stock" else family.rank_config(qk_rank=3)
    model = getattr(family, kind)("Model")(config).double().eval()
    batch = {"input_ids": torch.randint(5, 40, (2, 11))}
    table = measure_logits(model, batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**batch, output_attentions=True).attentions
    for layer, of_layer in enumerate(maps):
        for example in range(2):
            logits = from_maps(of_layer[example])
            expected = spectrum_metrics(torch.linalg.svdvals(logits))
            for name in ("effective_rank", "stable_rank", "participation_ratio", "energy_rank"):
                seen = long_of(table, name, example, layer)
                torch.testing.assert_close(seen, expected[name], rtol=1e-6, atol=1e-6, msg=name)
            spread = logits.square().mean((-2, -1)).sqrt()
            torch.testing.assert_close(long_of(table, "logit_std", example, layer), spread, rtol=1e-6, atol=1e-9)


def test_xlnet_shows_its_content_term():
    model = XLNET.stock("Model")(XLNET.stock_config()).double().eval()
    attention = model.layer[0].rel_attn
    with torch.no_grad():
        attention.r_w_bias.normal_()
    ids = torch.randint(5, 40, (1, 9))
    states = model.word_embedding(ids)[0]
    query = torch.einsum("id,dnr->nir", states, attention.q) + attention.r_w_bias[:, None]
    key = torch.einsum("id,dnr->nir", states, attention.k)
    logits = query @ (key - key.mean(1, keepdim=True)).transpose(1, 2) * attention.scale
    table = measure_logits(model, {"input_ids": ids})
    expected = spectrum_metrics(torch.linalg.svdvals(logits.detach()))["effective_rank"]
    torch.testing.assert_close(long_of(table, "effective_rank"), expected, rtol=1e-6, atol=1e-6)
    assert "rel_attn_core" not in vars(attention)


@pytest.mark.parametrize("attention", ["softmax", "hardmax"])
def test_the_encoder_shows_its_logits_also_where_they_are_fused_or_hard(attention):
    config = RankEncoderConfig(
        input_dim=8, num_hidden_layers=1, num_attention_heads=2, qk_rank=8, attention=attention, qk_norm=True
    )
    model = RankEncoderModel(config).eval()
    points = torch.randn(2, 9, 8)
    table = measure_logits(model, {"points": points})
    assert set(table[table.metric == "rank_limit"].value) == {8.0}
    assert (long_of(table, "logit_std") > 0).all()


def decoders():
    sizes = {"hidden": 32, "layers": 2, "inner": 40, "vocabulary": 100}
    yield "GPT-2", small("gpt2", **sizes), 8
    yield "Llama", small("llama", **sizes), 8
    yield "Llama, heads above hidden size", small("llama", **sizes, head_dim=40, rope_theta=10.0), 40
    # with a narrow query latent the rule of the weights gives 20; rotary positions add their width
    for kv, q, limit in ((24, 64, 40), (100, 200, 48), (100, 20, 36)):
        widths = {"q_lora_rank": q, "kv_lora_rank": kv, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
        model = small("deepseek_v3", **sizes | {"hidden": 256}, **widths, v_head_dim=16, first_k_dense_replace=2)
        yield f"DeepSeek {kv}-{q}", model, limit


@pytest.mark.parametrize("model, limit", [pytest.param(m, limit, id=name) for name, m, limit in decoders()])
def test_grouped_and_latent_heads_have_the_rank_of_their_rule(model, limit):
    """With rotary positions a head has the rank of its own width, also above the hidden size."""
    model = model.double().eval()
    batch = {"input_ids": torch.randint(3, 100, (1, 64))}
    table = measure_logits(model, batch, rtol=1e-10)
    assert set(table[table.metric == "rank_limit"].value) == {float(limit)}
    assert set(table[table.metric == "numerical_rank"].value) == {float(limit)}


def test_shares_of_the_spectrum_add_up_and_the_implementation_is_restored():
    model = BERT.stock("Model")(BERT.stock_config()).eval()
    table = measure_logits(model, tiny_inputs(BERT, "Model"), spectra=True)
    shares = table[table.metric == "energy_share"]
    assert shares.groupby(["layer", "head", "example"]).value.sum().sub(1).abs().max() < 1e-5
    assert shares.sort_values("component").groupby(["layer", "head", "example"]).value.is_monotonic_decreasing.all()
    assert model.config._attn_implementation == "sdpa"


def test_logits_that_are_all_zero_have_rank_zero():
    config = BertConfig(vocab_size=50, hidden_size=1, num_hidden_layers=2, num_attention_heads=1, intermediate_size=4)
    table = measure_logits(BertModel(config), {"input_ids": torch.arange(1, 9)[None]}, spectra=True)
    assert (table[table.metric != "rank_limit"].value == 0).all()
