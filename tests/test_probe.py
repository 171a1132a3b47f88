"""Collapse, maps and weights of real model classes, against the published behaviour."""

import pytest
import torch
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, XLNET, attention_modules, bilinear_forms, tiny_inputs
from testing_probe import close, small, value_of
from transformers import MambaConfig, MambaModel, T5Config, T5Model

from hf_rankattn import (
    RankEncoderConfig,
    RankEncoderModel,
    ablate,
    collapse_rate,
    measure_attention,
    measure_collapse,
    measure_weights,
    spectral_metrics,
)


IDS = torch.arange(1, 9)[None]


def medium(family, layers=6, **fields):
    """Hidden 128, as deep as asked, stock geometry: large enough for the published rates."""
    sizes = {
        "Bert": {"num_hidden_layers": layers, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256},
        "XLNet": {"n_layer": layers, "d_model": 128, "n_head": 4, "d_inner": 256},
    }
    sizes["Albert"] = {**sizes["Bert"], "embedding_size": 64}
    return family.stock("Model")(family.stock("Config")(vocab_size=1000, **sizes[family.name], **fields)).eval()


def mean_curve(table, variant, metric="relative_residual"):
    rows = table[(table.variant == variant) & (table.metric == metric)]
    return rows.groupby("layer").value.mean().tolist()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1000, (2, 128), generator=torch.Generator().manual_seed(0))


class TestCollapse:
    def test_bert_and_albert_collapse_doubly_exponentially_without_skips(self, ids):
        table = measure_collapse(medium(BERT).double(), {"input_ids": ids})
        san = mean_curve(table, "san")
        assert len(san) == 7 and 3e-3 < san[1] < 9e-3 and 1e-9 < san[2] < 1e-8 and san[3] < 1e-15
        rate = collapse_rate(san)
        assert rate.kind == "doubly_exponential" and rate.exponent == pytest.approx(3, abs=0.4)
        for variant in ("san+skip", "transformer"):
            assert all(0.5 < value < 0.75 for value in mean_curve(table, variant)[1:])
        assert mean_curve(table, "san", "token_cosine")[-1] == pytest.approx(1, abs=1e-9)
        albert = mean_curve(measure_collapse(medium(ALBERT).double(), {"input_ids": ids}, ["san"]), "san")
        assert 1e-4 < albert[1] < 4e-4 and 3e-14 < albert[2] < 5e-13

    def test_xlnet_collapses_geometrically(self, ids):
        table = measure_collapse(medium(XLNET).double(), {"input_ids": ids}, ["san", "san+skip", "transformer"])
        san = mean_curve(table, "san")
        assert 5e-15 < san[6] < 2e-13
        assert collapse_rate(san).kind == "geometric"
        assert min(mean_curve(table, "san+skip")) > 0.95

    def test_albert_without_its_mlp_and_with_the_identities_of_the_published_code(self, ids):
        model = medium(ALBERT, layers=12)
        base = mean_curve(measure_collapse(model, {"input_ids": ids}, ["san+skip"]), "san+skip")[-1]
        with ablate(model, mlp="identity_trick"):
            trick = mean_curve(measure_collapse(model, {"input_ids": ids}, ["transformer"]), "transformer")[-1]
        assert trick > base

    def test_a_shuffling_loader_gives_all_variants_the_same_texts(self):
        model = BERT.stock("Model")(BERT.stock_config()).eval()
        rows = [{"input_ids": torch.randint(5, 40, (9,))} for _ in range(6)]
        table = measure_collapse(model, torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True))
        inputs = table[(table.layer == 0) & (table.metric == "relative_residual")]
        assert inputs.groupby("example").value.nunique().tolist() == [1] * 6

    def test_the_other_mask_of_xlnet_and_masks_that_are_none(self):
        model = XLNET.stock("Model")(XLNET.stock_config()).double().eval()
        ids, mask = torch.randint(5, 40, (2, 9)), torch.ones(2, 9, dtype=torch.long)
        mask[1, 6:] = 0
        one = measure_collapse(model, {"input_ids": ids, "attention_mask": mask}, ["san"])
        other = measure_collapse(model, {"input_ids": ids, "input_mask": 1.0 - mask}, ["san"])
        close(one.value, other.value)
        with pytest.raises(ValueError, match=r"must be \(batch, n\), 1 for tokens"):
            measure_collapse(model, {"input_ids": ids, "attention_mask": mask[:, None, None]}, ["san"])

    def test_batches_lists_and_loaders_are_one(self, ids):
        model = medium(BERT, layers=2)
        rows = [{"input_ids": row, "labels": torch.tensor(0)} for row in ids]
        whole = measure_collapse(model, {"input_ids": ids}, ["san"])
        listed = measure_collapse(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:]}], ["san"])
        loaded = measure_collapse(model, torch.utils.data.DataLoader(rows, batch_size=1), ["san"])
        generated = measure_collapse(model, ({"input_ids": row[None]} for row in ids), ["san", "transformer"])
        assert generated.groupby("variant").example.nunique().tolist() == [2, 2]
        key = ["layer", "example", "metric"]
        for other in (listed, loaded):
            merged = whole.merge(other, on=key)
            assert len(merged) == len(whole)
            # at the floor only the order of sums is left
            assert ((merged.value_x - merged.value_y).abs() <= 1e-5 * merged.value_x.abs() + 1e-4).all()

    @pytest.mark.parametrize("norm_placement", ["post", "pre"])
    def test_the_encoder(self, norm_placement):
        sizes = {"input_dim": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        config = RankEncoderConfig(**sizes, norm_placement=norm_placement)
        model = RankEncoderModel(config).double().eval()
        table = measure_collapse(model, {"points": 0.1 * torch.randn(2, 12, 16, dtype=torch.float64)})
        assert set(table.layer) == {0, 1, 2, 3}
        assert mean_curve(table, "san")[-1] < 0.05 * mean_curve(table, "san+skip")[-1]

    def test_other_families(self, ids):
        sizes = {"hidden": 32, "inner": 40, "vocabulary": 1000}
        models = [small(name, **sizes) for name in ("roberta", "distilbert")] + [
            small("electra", **sizes, embedding_size=32)
        ]
        for model in models:
            table = measure_collapse(model, {"input_ids": ids})
            assert mean_curve(table, "san")[-1] < 1e-5 < 0.1 < mean_curve(table, "san+skip")[-1], type(model).__name__
        for model in (small("gpt2", **sizes), small("llama", **sizes)):
            table = measure_collapse(model, {"input_ids": ids})
            assert len(mean_curve(table, "san+skip")) == 4
            assert mean_curve(table, "san")[-1] < 0.5 * mean_curve(table, "san+skip")[-1]


class TestAttention:
    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_the_maps_that_transformers_returns(self, family):
        """Reduced layer by layer, against the metrics of all maps kept, for padded texts of rank twins."""
        model = family.rank("Model")(family.rank_config(qk_rank=3)).eval()
        before = model.config._attn_implementation
        batch = tiny_inputs(family, "Model")
        table = measure_attention(model, batch, metrics="full")
        assert model.config._attn_implementation == before
        model.set_attn_implementation("eager")
        kept = model(**batch, output_attentions=True).attentions
        assert set(table.layer) == set(range(len(kept)))
        for layer, maps in enumerate(kept):
            for name, expected in spectral_metrics(maps, batch["attention_mask"]).items():
                rows = table[(table.layer == layer) & (table.metric == name)].sort_values(["example", "head"])
                torch.testing.assert_close(torch.tensor(rows.value.tolist()), expected.flatten(), atol=1e-5, rtol=1e-5)

    def test_causal_maps_are_compared_with_the_map_that_sees_no_content(self, ids):
        for name in ("llama", "gpt2"):
            model = small(name, hidden=64, layers=2, inner=64, vocabulary=1000)
            table = measure_attention(model, {"input_ids": ids}, "full")
            assert set(table["head"]) == {0, 1, 2, 3}
            mean = table.groupby("metric").value.mean()
            assert mean["stable_rank_over_content_free"] == pytest.approx(1, abs=0.1)
            assert mean["stable_rank"] == pytest.approx(2, abs=0.2)
        bert = measure_attention(medium(BERT, layers=1), {"input_ids": ids})
        assert "stable_rank_over_content_free" not in set(bert.metric)

    def test_the_rows_of_the_published_table(self):
        """A freshly initialised BERT-base layer, n 128: stable rank 1.043, effective rank 24.6, 40.9 argmax columns."""
        model = BERT.stock("Model")(BERT.stock("Config")(num_hidden_layers=1))
        table = measure_attention(model, {"input_ids": torch.randint(30522, (2, 128))}, "full")
        mean = table.groupby("metric").value.mean()
        assert mean["stable_rank"] == pytest.approx(1.043, abs=0.02)
        assert mean["effective_rank"] == pytest.approx(24.6, abs=3)
        assert mean["argmax_coverage"] == pytest.approx(40.9, abs=6)


class TestWeights:
    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_the_spectra_of_the_forms_themselves(self, family):
        model = family.rank("Model")(family.rank_config(qk_rank=3)).double()
        table = measure_weights(model)
        assert len(table) == model.config.num_hidden_layers * 4 * 11  # rank_limit, and five metrics of two forms
        attention = attention_modules(model)[0]
        expected = spectral_metrics(bilinear_forms(attention))
        for name in ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "energy_rank"):
            rows = table[(table.layer == 0) & (table.metric == name)].sort_values("head")
            torch.testing.assert_close(torch.tensor(rows.value.tolist(), dtype=torch.float64), expected[name])
        assert (table[table.metric == "rank_limit"].value == 3).all()

    def test_grouped_and_fused_queries(self):
        llama = small("llama", hidden=64, layers=1, head_dim=8).double()
        attention = llama.layers[0].self_attn
        grouped = attention.q_proj.weight.view(4, 8, 64)[3].T @ attention.k_proj.weight.view(2, 8, 64)[1]
        gpt2 = small("gpt2", hidden=64, layers=1).double()
        weight = gpt2.h[0].attn.c_attn.weight
        fused = weight[:, 16:32] @ weight[:, 64 + 16 : 64 + 32].T
        for model, head, form in ((llama, 3, grouped), (gpt2, 1, fused)):
            found = value_of(measure_weights(model), "effective_rank", head=head).item()
            assert found == pytest.approx(spectral_metrics(form[None])["effective_rank"].item())

    def test_the_values_of_identity_uniform_and_sink_weights(self):
        model = small("bert", hidden=64, layers=1).double()
        attention = model.encoder.layer[0].attention
        value, output = attention.self.value.weight.data, attention.output.dense.weight.data
        eye, ones, sink = torch.eye(64), torch.ones(64, 64), torch.zeros(64, 64)
        sink[0] = 1  # every direction is written to the first feature
        names = ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "energy_rank")
        for written, rank in ((eye, 16), (ones, 1), (sink, 1)):  # four heads of width 16
            value.copy_(eye)
            output.copy_(written)
            table = measure_weights(model)
            for name in names:
                expected = 15 if (name, rank) == ("energy_rank", 16) else rank  # 15 of 16 equal values hold 90 %
                found = value_of(table, f"value_{name}").tolist()
                assert found == pytest.approx([expected] * 4, abs=1e-6), name

    def test_values_of_shared_value_heads_against_their_forms(self):
        model = small("llama", hidden=64, layers=1, head_dim=8).double()
        attention = model.layers[0].self_attn
        table = measure_weights(model)
        for head in range(4):
            value = attention.v_proj.weight.view(2, 8, 64)[head // 2]
            expected = spectral_metrics((value.T @ attention.o_proj.weight[:, 8 * head : 8 * head + 8].T)[None])
            for name in ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "energy_rank"):
                found = value_of(table, f"value_{name}", head=head).item()
                assert found == pytest.approx(expected[name].item()), (name, head)

    @pytest.mark.parametrize("kv, q, expected", [(24, 64, 40), (100, 200, 48), (100, 20, 20)])
    def test_the_rule_of_latent_attention(self, kv, q, expected):
        widths = {"q_lora_rank": q, "kv_lora_rank": kv, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
        model = small("deepseek_v3", hidden=256, layers=1, heads=2, num_key_value_heads=2, **widths)
        table = measure_weights(model.double(), rtol=1e-9)
        assert (table[table.metric == "rank_limit"].value == expected).all()
        assert (table[table.metric == "numerical_rank"].value == expected).all()


BERT_MODEL = BERT.stock("Model")(BERT.stock_config()).eval()
SMALL_T5 = T5Config(d_model=8, d_kv=2, d_ff=8, num_layers=1, num_heads=2)
SMALL_MAMBA = MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=10)
FOREIGN = {**tiny_inputs(BERT, "Model"), "encoder_hidden_states": torch.ones(2, 3, 32)}


class TestNonsense:
    @pytest.mark.parametrize(
        "probe, arguments, message",
        [
            (measure_collapse, (BERT_MODEL, FOREIGN, ["san+magic"]), "unknown variants"),
            (measure_collapse, (BERT_MODEL, FOREIGN, "san"), "must be a list of names, got 'san'"),
            (measure_attention, (BERT_MODEL, FOREIGN, "free"), "'cheap' or 'full', got 'free'"),
            (measure_collapse, (BERT_MODEL, FOREIGN), "cross-attention is not measured"),
            (
                measure_collapse,
                (T5Model(SMALL_T5), {}),
                "2 lists of layers: give one as `tower`, of 'encoder', 'decoder'",
            ),
        ],
    )
    def test_arguments(self, probe, arguments, message):
        with pytest.raises(ValueError, match=message):
            probe(*arguments)

    @pytest.mark.parametrize(
        "model, options, message",
        [
            (MambaModel(SMALL_MAMBA), {}, "has no list of layers in which each layer has one attention module"),
            (BERT_MODEL, {"mlp": True, "layers": [3]}, "the model has layers 0 to 2, got"),
            (BERT_MODEL, {"mlp": "identity-trick"}, "True, False or 'identity_trick', got 'identity-trick'"),
            (BERT_MODEL, {"mlp": "identity_trick"}, "mlp='identity_trick' is for ALBERT, got a model of type bert"),
        ],
    )
    def test_ablations(self, model, options, message):
        with pytest.raises(ValueError, match=message), ablate(model, **options):
            pass

    def test_adapters_are_not_passed_over(self):
        model = BERT.stock("Model")(BERT.stock_config()).eval()
        query = model.encoder.layer[0].attention.self.query
        query.base_layer = torch.nn.Identity()
        with pytest.raises(ValueError, match="has an adapter beside its weights: merge it first"):
            measure_weights(model)

    def test_a_sliding_window_is_not_compared_with_the_whole_past(self):
        model = small("mistral", hidden=32, layers=1, sliding_window=4)
        names = [set(measure_attention(model, {"input_ids": torch.arange(1, n)[None]}).metric) for n in (12, 5)]
        assert not any("content_free" in name for name in names[0])
        assert any("content_free" in name for name in names[1])

    def test_a_compiled_model_is_measured_as_the_module_it_wraps(self):
        model = BERT.stock("Model")(BERT.stock_config()).eval()
        batch = tiny_inputs(BERT, "Model")
        plain = measure_collapse(model, batch, ["san"])
        wrapped = torch.compile(model, backend="eager")
        with torch.no_grad():
            wrapped(**batch)
        compiled = measure_collapse(wrapped, batch, ["san"])
        assert (plain.value == compiled.value).all()

    def test_the_mode_of_the_model_is_restored(self):
        model = BERT.stock("Model")(BERT.stock_config()).train()
        model.embeddings.eval()
        measure_collapse(model, tiny_inputs(BERT, "Model"), ["san"])
        assert model.training and not model.embeddings.training
