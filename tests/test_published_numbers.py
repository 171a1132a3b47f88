"""Numbers of the papers at the sizes of the papers, and of real trained weights."""

import pytest
import torch
from transformers import AlbertConfig, AlbertModel, AutoTokenizer, BertConfig, BertModel, XLNetConfig, XLNetModel

from hf_rankattn import ablate, measure_collapse, package_text, relative_residual


ALBERT_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12}
XLNET_BASE = {"d_model": 768, "n_head": 12, "d_inner": 3072, "n_layer": 12}


def curves(model, batch, variants):
    table = measure_collapse(model.eval(), batch, variants)
    rows = table[table.metric == "relative_residual"]
    return {variant: rows[rows.variant == variant].groupby("layer").value.mean().tolist() for variant in variants}


def random_ids(vocabulary=30000, examples=2):
    return {"input_ids": torch.randint(vocabulary, (examples, 128), generator=torch.Generator().manual_seed(0))}


@pytest.mark.slow
class TestBaseShapes:
    def test_bert(self):
        torch.manual_seed(0)
        model = BertModel(BertConfig())
        seen = curves(model, random_ids(examples=8), ["san", "san+mlp", "san+skip", "transformer"])
        for variant in ("san", "san+mlp"):
            curve = seen[variant]
            assert 0.53 < curve[0] < 0.65 and 0.012 < curve[1] < 0.023 and curve[2] < 3e-6
            assert all(1e-7 < value < 4e-7 for value in curve[3:])
        assert all(0.30 < seen[variant][12] < 0.50 for variant in ("san+skip", "transformer"))

    def test_bert_in_float64(self):
        curve = curves(BertModel(BertConfig(num_hidden_layers=3)).double(), random_ids(), ["san"])["san"]
        assert 1e-7 < curve[2] < 2e-6 and curve[3] < 1e-14

    def test_albert(self):
        model = AlbertModel(AlbertConfig(**ALBERT_BASE)).double()
        seen = curves(model, random_ids(), ["san", "san+skip"])
        assert 5e-11 < seen["san"][2] < 1e-9
        assert 0.04 < seen["san+skip"][12] < 0.12
        with ablate(model, mlp="identity_trick"):
            assert 0.20 < curves(model, random_ids(), ["transformer"])["transformer"][12] < 0.30

    def test_xlnet(self):
        model = XLNetModel(XLNetConfig(**XLNET_BASE)).double()
        seen = curves(model, random_ids(examples=1), ["san", "san+skip"])
        steps = [after / before for before, after in zip(seen["san"][1:10], seen["san"][2:11], strict=True)]
        assert all(1 / 40 < step < 1 / 12 for step in steps), steps
        assert seen["san+skip"][12] > 0.90


@pytest.fixture(scope="module")
def batch(minilm):
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    return dict(tokenizer(package_text()[:4], truncation=True, max_length=128, return_tensors="pt"))


class TestRealWeights:
    def test_attention_alone_collapses_and_skips_stop_it(self, minilm):
        tokenizer = AutoTokenizer.from_pretrained(minilm)
        batch = tokenizer(package_text()[:32], truncation=True, max_length=128, return_tensors="pt")
        seen = curves(BertModel.from_pretrained(minilm), batch, ["san", "san+mlp", "san+skip", "transformer"])
        assert 0.98 < seen["san"][0] < 1.0
        assert seen["san"][5] < 4e-6 and seen["san+mlp"][6] < 4e-6  # ten to twenty times the float32 floor
        assert min(seen["san+skip"]) > 0.8 and min(seen["transformer"]) > 0.6

    def test_residuals_do_not_depend_on_the_kernel_and_hardly_on_half_precision(self, minilm, batch):
        model = BertModel.from_pretrained(minilm, attn_implementation="eager")
        variants = ["san", "transformer"]
        eager = curves(model, batch, variants)
        model.set_attn_implementation("sdpa")
        sdpa = curves(model, batch, variants)
        half = curves(model.bfloat16(), batch, variants)
        for variant, tolerance in (("transformer", 1e-5), ("san", 1e-4)):
            for layer, value in enumerate(eager[variant]):
                assert sdpa[variant][layer] == pytest.approx(value, rel=tolerance, abs=1e-6)
        # bfloat16 has three digits: a hundredth on what is large, and a floor near 2e-3 for equal tokens
        for layer, value in enumerate(eager["transformer"]):
            assert half["transformer"][layer] == pytest.approx(value, abs=0.02)
        assert half["san"][6] < 0.01

    def test_xlnet_with_two_streams(self):
        config = XLNetConfig(d_model=32, n_head=4, d_inner=32, n_layer=2, vocab_size=50)
        model = XLNetModel(config).eval()
        ids = torch.arange(5, 14)[None]
        mapping = torch.zeros(1, 2, 9)
        mapping[0, 0, 7] = mapping[0, 1, 8] = 1
        batch = {"input_ids": ids, "perm_mask": torch.zeros(1, 9, 9), "target_mapping": mapping}
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).hidden_states
        assert len(states) == 2 * (config.n_layer + 1)
        table = measure_collapse(model, batch, ["transformer"])
        for layer in range(3):
            expected = relative_residual(states[2 * layer])[0].item()
            rows = table[(table.layer == layer) & (table.metric == "relative_residual")]
            assert rows.value.item() == pytest.approx(expected, rel=1e-4)
