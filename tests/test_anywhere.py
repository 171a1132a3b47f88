"""Rank models, saved to a folder, in the tools that people use: sentence-transformers, torch.export, ONNX, torch.compile, PEFT,
and transformers' flex and flash attention."""

import json
from pathlib import Path

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_kernels
from testing_common import ALBERT, BERT, XLNET, float_tensors, run_code, shaken, tiny_inputs
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from hf_rankattn import RankBertConfig, RankBertModel, RankEncoderConfig, RankEncoderModel, measure_weights
from hf_rankattn.files.companions import copy_companions
from hf_rankattn.files.texts import package_text


NARROW_QUERIES, NARROW_VALUES = {"qk_rank": 4, "v_head_dim": 8}, {"qk_rank": 8, "v_head_dim": 4}
SMALL = {
    "bert": (BERT, {"num_hidden_layers": 1}),
    "albert": (ALBERT, {"num_hidden_layers": 2, "qk_norm": True}),
    "xlnet": (XLNET, {"n_layer": 1}),
}
ENCODER = {"input_dim": 8, "input_map": "linear", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
NAMES = [*SMALL, "encoder"]


def from_disk(name: str, folder: Path, **fields):
    """A small rank model that was saved to `folder` and loaded with `AutoModel`."""
    if name == "encoder":
        model = RankEncoderModel(RankEncoderConfig(**ENCODER, **fields))
    else:
        family, sizes = SMALL[name]
        model = family.rank("Model")(family.rank_config(**{**sizes, **fields}))
    shaken(model).save_pretrained(folder)
    return AutoModel.from_pretrained(folder).eval()


def padded_batch(name: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    if name == "encoder":
        return {"points": torch.randn(batch, length, 8), "attention_mask": mask}
    ids, types = torch.randint(47, (batch, length)), torch.randint(2, (batch, length))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


class TestSentenceTransformers:
    # what `rankattn convert` is asked for -> cosine to the embeddings of the original that is surely reached
    CUTS = [pytest.param(["--qk-rank", "16"], 0.9, id="qk16")]
    # prints what a SentenceTransformer of the folder consists of, and its embeddings of the texts
    ENCODE = """
import json, sys, hf_rankattn
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
names = [type(module).__name__ for module in model]
print(json.dumps([names, model.max_seq_length, model[1].pooling_mode, model.encode(json.loads(sys.argv[2])).tolist()]))
"""

    def by_hand(self, folder: str | Path, texts: list[str]) -> torch.Tensor:
        """Unit vectors along the means of the last states of the first 256 tokens."""
        model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        real = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)

    def check(self, folder: Path, source: str, texts: list[str]) -> torch.Tensor:
        """The folder is a SentenceTransformer with the modules of the source; returns its embeddings."""
        pytest.importorskip("sentence_transformers")
        for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
            assert (folder / name).read_bytes() == Path(source, name).read_bytes()
        answer = run_code(self.ENCODE, folder, json.dumps(texts)).stdout.strip().splitlines()[-1]
        modules, longest, pooling, rows = json.loads(answer)
        assert modules == ["Transformer", "Pooling", "Normalize"] and longest == 256 and pooling == "mean"
        embeddings = torch.tensor(rows)
        torch.testing.assert_close(embeddings, self.by_hand(folder, texts), atol=1e-5, rtol=0)
        return embeddings

    @pytest.fixture(params=[pytest.param(2, id="2-layers"), pytest.param(6, id="all-layers", marks=pytest.mark.slow)])
    def source(self, request, minilm, tmp_path):
        """The folder of MiniLM, or of its first layers."""
        copy_companions(minilm, tmp_path / "source")
        AutoModel.from_pretrained(minilm, num_hidden_layers=request.param).save_pretrained(tmp_path / "source")
        return str(tmp_path / "source")

    @pytest.mark.parametrize("options, cosine", CUTS)
    def test_a_converted_checkpoint_encodes(self, options, cosine, source, tmp_path):
        texts = [*package_text()[-4:], "Rank is a resource. " * 100]  # the last one is longer than 256 tokens
        few = tmp_path / "few.txt"
        few.write_text("\n\n".join(text[:300] for text in package_text()[:8]))
        command = ["convert", source, *options, "--calibration", str(few), "--out", str(tmp_path / "cut"), "--json"]
        run_code("from rankattn_cli.main import main; main()", *command)
        cut = self.check(tmp_path / "cut", source, texts)
        original = self.by_hand(source, texts)
        assert cosine < (cut * original).sum(-1).min() and (cut * original).sum(-1).max() < 0.9999
        config = json.loads((tmp_path / "cut" / "config.json").read_text())
        assert config["model_type"] == "rank_bert"

    def test_narrow_values_encode(self, minilm, tmp_path):
        config = RankBertConfig.from_pretrained(minilm, qk_rank=16, v_head_dim=16, num_hidden_layers=2)
        copy_companions(minilm, tmp_path)
        RankBertModel(config).save_pretrained(tmp_path)
        embeddings = self.check(tmp_path, minilm, package_text()[:3])
        assert embeddings.shape == (3, 384)


@pytest.mark.parametrize(
    "widths, opset",
    [
        pytest.param(NARROW_QUERIES, 23, id="qk4-v8-opset23"),  # the newest opset that this torch writes
        pytest.param(NARROW_VALUES, None, id="qk8-v4", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_export_and_onnx_at_other_shapes_than_the_traced_one(name, widths, opset, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = from_disk(name, tmp_path, **widths)
    example = padded_batch(name, 2, 7)
    free = {key: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for key in example}
    with torch.no_grad():
        program = torch.export.export(model, (), example, dynamic_shapes=free)
    torch.onnx.export(program, dynamo=True, verbose=False, opset_version=opset).save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch, length in ((2, 7), (3, 12), (1, 30)):
        inputs = padded_batch(name, batch, length)
        with torch.no_grad():
            expected, exported = model(**inputs)[0], program.module()(**inputs)[0]
        torch.testing.assert_close(exported, expected, atol=1e-5, rtol=0)
        (found, *_) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=0)


def test_a_traced_encoder_runs_at_other_shapes(tmp_path):
    """Attention in blocks of heads depends on the shape, so tracing has to take the other way."""
    model = from_disk("encoder", tmp_path, **NARROW_QUERIES)
    with torch.no_grad():
        example = {"points": torch.randn(2, 7, 8)}
        traced = torch.jit.trace(model, example_kwarg_inputs=example, strict=False, check_trace=False)
        points = torch.randn(3, 12, 8)
        torch.testing.assert_close(traced(points=points)["last_hidden_state"], model(points=points).last_hidden_state)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_forward_and_backward_are_one_graph_equal_to_eager(name, backend, tmp_path):
    torch.compiler.reset()
    model = from_disk(name, tmp_path, **NARROW_QUERIES)
    for inputs in (padded_batch(name, 2, 7), {"points": torch.randn(2, 7, 8)}):
        if (name == "encoder") != ("points" in inputs):
            continue
        results = []
        for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
            model.zero_grad()
            outputs = [tensor for tensor in float_tensors(run(**inputs)) if tensor.requires_grad]
            sum(tensor.square().mean() for tensor in outputs).backward()
            results.append([*outputs, *(weight.grad for weight in model.parameters() if weight.grad is not None)])
        assert len(results[0]) > 10
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_lora_is_trained_saved_loaded_and_merged(tmp_path):
    peft = pytest.importorskip("peft")
    family, suffix = BERT, "ForSequenceClassification"
    family.rank(suffix)(family.rank_config(**NARROW_QUERIES)).save_pretrained(tmp_path / "base")
    inputs = tiny_inputs(family, suffix, labels=True)

    def base():
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "base").eval()

    chosen = peft.LoraConfig(r=2, target_modules=["query", "key", "value"], task_type="SEQ_CLS")
    adapted = peft.get_peft_model(base(), chosen)
    optimizer = torch.optim.AdamW([weight for weight in adapted.parameters() if weight.requires_grad], lr=1e-2)
    for _ in range(2):
        adapted(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="merge it first"):
        measure_weights(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.eval()(**inputs).logits
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert torch.equal(loaded(**inputs).logits, expected)
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert type(merged) is family.rank(suffix)
    torch.testing.assert_close(merged(**inputs).logits, expected, atol=1e-6, rtol=0)
    assert not torch.allclose(base()(**inputs).logits, expected, atol=1e-4)
    before, after = measure_weights(base()), measure_weights(merged)
    assert before.shape == after.shape and not before["value"].equals(after["value"])


FLEX = [{"qk_rank": 16, "v_head_dim": 32}, {"qk_rank": 32, "v_head_dim": 16}, {"qk_rank": 24, "v_head_dim": 24}]


class TestFlexAttention:
    @pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("name", ["bert", "albert"])
    def test_it_equals_eager_attention(self, name, stance, tmp_path):
        """transformers compiles it, for a minute on a CPU; `force_eager` runs the same function without compilation."""
        torch.compiler.reset()
        for place, widths in enumerate(FLEX[:1] if stance == "default" else FLEX):
            model = from_disk(name, tmp_path / str(place), **widths)
            inputs = padded_batch(name, 3, 9)
            real = inputs["attention_mask"].bool()
            model.set_attn_implementation("eager")
            expected = model(**inputs).last_hidden_state.detach()
            model.set_attn_implementation("flex_attention")
            with torch.no_grad(), torch.compiler.set_stance(stance):
                found = model(**inputs).last_hidden_state
            torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)

    @torch.compiler.set_stance("force_eager")  # the mask is compiled, too
    @pytest.mark.parametrize("name", ["bert", "albert"])
    def test_narrow_heads_and_dropout_are_refused(self, name, tmp_path):
        for widths, given in ((NARROW_QUERIES, "qk_rank=4 and v_head_dim=8"), ({"qk_rank": 16}, "v_head_dim=8")):
            model = from_disk(name, tmp_path / given[:5], **widths)
            model.set_attn_implementation("flex_attention")
            with pytest.raises(ValueError, match=f"width 16 or more, got .*{given}.*set_attn_implementation..sdpa"):
                model(**padded_batch(name, 2, 7))
        fields = {**FLEX[0], "attention_probs_dropout_prob": 0.25}
        model = from_disk(name, tmp_path / "dropout", **fields).train()
        model.set_attn_implementation("flex_attention")
        with pytest.raises(
            ValueError, match=r"no dropout, got attention dropout 0\.25.*set_attn_implementation..sdpa"
        ):
            model(**padded_batch(name, 2, 7))
        model.set_attn_implementation("sdpa")
        model(**padded_batch(name, 2, 7))

    def test_families_without_it_refuse_it(self, tmp_path):
        for name in ("xlnet", "encoder"):
            with pytest.raises(ValueError, match="does not support"):
                from_disk(name, tmp_path / name).set_attn_implementation("flex_attention")


class FlashStandIn:
    """The two functions of the package flash-attn that transformers calls, in plain operations, with its requirements."""

    def __init__(self, half_only: bool):
        self.half_only, self.widths, self.calls = half_only, set(), set()

    def attend(self, query, key, value, scale):
        """(n, heads, width) each, of one sequence."""
        assert query.shape == key.shape == value.shape, "flash attention needs equal widths"
        if self.half_only and query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        self.widths.add(value.shape[-1])
        maps = (torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", maps, value.float()).to(query.dtype)

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        assert not causal and dropout_p == 0.0
        self.calls.add("batch")
        return torch.stack([self.attend(*one, softmax_scale) for one in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
    ):
        assert not causal and dropout_p == 0.0 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        self.calls.add("padded")
        sequences = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
        return torch.cat([self.attend(*one, softmax_scale) for one in sequences])

    def install(self, monkeypatch):
        functions = self.flash_attn_func, self.flash_attn_varlen_func, None
        padding = flash_kernels._pad_input, flash_kernels._unpad_input
        monkeypatch.setattr(flash_kernels, "_lazy_imports", lambda *_, **__: (*functions, *padding))
        monkeypatch.setattr(flash_kernels, "_loaded_implementation", None)
        monkeypatch.setattr(PreTrainedModel, "_flash_attn_import_error", lambda *_, **__: None)
        everywhere = ((lambda: True, "cpu"),)
        monkeypatch.setitem(flash_kernels.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "supported_devices", everywhere)
        return self


class TestFlashAttention:
    """On a stand-in: what transformers passes to the kernel is tested, the kernel itself is not."""

    @pytest.mark.parametrize("widths", [NARROW_QUERIES, NARROW_VALUES, {"qk_rank": 4, "qk_norm": True}], ids=str)
    @pytest.mark.parametrize("name", ["bert", "albert"])
    def test_widths_are_equal_and_no_value_is_lost(self, name, widths, tmp_path, monkeypatch):
        kernel = FlashStandIn(half_only=False).install(monkeypatch)
        model = from_disk(name, tmp_path, **widths)
        inputs = padded_batch(name, 3, 9)
        real = inputs["attention_mask"].bool()
        for mask in (inputs["attention_mask"], None):
            results = []
            for implementation in ("eager", "flash_attention_2"):
                model.set_attn_implementation(implementation)
                with torch.no_grad():
                    results.append(model(**{**inputs, "attention_mask": mask}).last_hidden_state)
            kept = real if mask is not None else slice(None)
            torch.testing.assert_close(results[1][kept], results[0][kept], atol=1e-5, rtol=0)
        assert kernel.calls == {"batch", "padded"} and kernel.widths == {8}

    def test_float32_is_refused_as_in_stock_and_half_precision_runs(self, tmp_path, monkeypatch):
        FlashStandIn(half_only=True).install(monkeypatch)
        stock = BERT.stock("Model")(BERT.stock_config()).eval()
        inputs = padded_batch("bert", 3, 9)
        for model in (stock, from_disk("bert", tmp_path, **NARROW_QUERIES)):
            model.set_attn_implementation("flash_attention_2")
            with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
                model(**inputs)
            assert model.to(torch.bfloat16)(**inputs).last_hidden_state.isfinite().all()

    def test_families_without_it_refuse_it(self, tmp_path):
        for name in ("xlnet", "encoder"):
            with pytest.raises(ValueError, match="does not support Flash Attention"):
                from_disk(name, tmp_path / name).set_attn_implementation("flash_attention_2")
