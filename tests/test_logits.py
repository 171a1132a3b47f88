"""Spectra of logits, against logits that are made, centred and decomposed in full."""

import pytest
import torch
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, XLNET, tiny_inputs
from transformers import (
    DeepseekV3Config,
    DeepseekV3Model,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    ViTConfig,
    ViTModel,
)

from hf_rankattn import RankEncoderConfig, RankEncoderModel, measure_logits
from hf_rankattn.measure.spectrum import spectrum_metrics


SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}


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
    model = (
        family.stock("Model")(family.stock_config())
        if kind == "stock"
        else family.rank("Model")(family.rank_config(qk_rank=3))
    )
    model = model.double().eval()
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
    yield (
        "GPT-2",
        GPT2Model(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)),
        8,
    )
    yield "Llama", LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=2)), 8
    # with a narrow query latent the rule of the weights gives 20; turning the rotary part lifts it by its width
    for kv, q, limit in ((24, 64, 40), (100, 200, 48), (100, 20, 36)):
        latent = DeepseekV3Config(
            **{**SMALL, "hidden_size": 256}, q_lora_rank=q, kv_lora_rank=kv, qk_nope_head_dim=32, qk_rope_head_dim=16,
            v_head_dim=16, first_k_dense_replace=2, num_key_value_heads=4,
        )  # fmt: skip
        yield f"DeepSeek {kv}-{q}", DeepseekV3Model(latent), limit


@pytest.mark.parametrize("model, limit", [pytest.param(m, limit, id=name) for name, m, limit in decoders()])
def test_grouped_and_latent_heads_have_the_rank_of_their_rule(model, limit):
    """Rotary positions leave the rank of logits alone; grouped and latent heads have that of their own width."""
    model = model.double().eval()
    batch = {"input_ids": torch.randint(3, 100, (1, 64))}
    table = measure_logits(model, batch, rtol=1e-10)
    assert set(table[table.metric == "rank_limit"].value) == {float(limit)}
    assert set(table[table.metric == "numerical_rank"].value) == {float(limit)}


def test_images():
    model = ViTModel(ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=32, patch_size=8))  # fmt: skip
    table = measure_logits(model, {"pixel_values": torch.randn(2, 3, 32, 32)})
    assert set(table.layer) == {0, 1} and set(table["head"]) == {0, 1, 2, 3}


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
def test_padding_changes_nothing(family):
    model = family.stock("Model")(family.stock_config()).double().eval()
    ids, mask = torch.randint(5, 40, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    together = measure_logits(model, {"input_ids": ids, "attention_mask": mask}, spectra=True)
    alone = measure_logits(model, {"input_ids": ids[1:, :8]}, spectra=True)
    keys = ["layer", "head", "metric", "component"]
    merged = together[together.example == 1].merge(alone, on=keys, suffixes=("", "_alone"))
    # with fewer tokens than the width of a head there are fewer components, and the others are zero
    assert len(merged) >= len(alone) > 0
    torch.testing.assert_close(
        torch.tensor(merged.value.to_numpy()), torch.tensor(merged.value_alone.to_numpy()), rtol=1e-6, atol=1e-6
    )


def test_shares_of_the_spectrum_add_up_and_the_implementation_is_restored():
    model = BERT.stock("Model")(BERT.stock_config()).eval()
    table = measure_logits(model, tiny_inputs(BERT, "Model"), spectra=True)
    shares = table[table.metric == "energy_share"]
    assert shares.groupby(["layer", "head", "example"]).value.sum().sub(1).abs().max() < 1e-5
    assert shares.sort_values("component").groupby(["layer", "head", "example"]).value.is_monotonic_decreasing.all()
    assert model.config._attn_implementation == "sdpa"


def test_spoilt_weights_are_named():
    model = BERT.stock("Model")(BERT.stock_config()).eval()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="the logits of layer 1 hold NaN or Inf"):
        measure_logits(model, tiny_inputs(BERT, "Model"))
