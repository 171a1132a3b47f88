"""`RankCache`: what a limited model computes with it is what it computes without a cache, and its bytes are counted by hand."""

import copy

import pytest
import torch
from small_families import small_and_running
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_rankattn import RankCache, limit_rank, package_text
from hf_rankattn.limit.cache import GrowingLayer


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 47,
}
DECODERS = """llama qwen3 gpt2 gemma2 gemma3_text gpt_oss deepseek_v3 qwen3_next lfm2 mixtral falcon_h1 cohere2 phi3 opt smollm3
exaone4 qwen3_5_text jetmoe""".split()
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def llama(**fields) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, **fields)).eval()
    return sharpened(model)


def sharpened(model):
    """Larger logits, so that the next token depends on the text."""
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(torch.randn_like(model.get_output_embeddings().weight))
    return model


def ids(texts: int = 2, tokens: int = 9) -> torch.Tensor:
    return torch.randint(1, 47, (texts, tokens))


def step_by_step(model, tokens: torch.Tensor, cache, first: int = 5) -> torch.Tensor:
    """The output of a model that gets `first` tokens, then two, then one at a time."""
    ends = [first, first + 2, *range(first + 3, tokens.shape[1] + 1)]
    found = []
    with torch.no_grad():
        for start, end in zip([0, *ends], ends, strict=False):
            found.append(model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True)[0])
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("static", [False, True], ids=["grows", "static"])
@pytest.mark.parametrize("kind", DECODERS)
def test_step_by_step_is_one_forward(kind, static):
    model, batch, reason = small_and_running(kind)
    assert not reason
    # closed forms: the descent on these few tokens can make large projections, which round
    limit = limit_rank(model, 3, 4, calibration=batch, objective="logits")
    tokens = torch.cat([batch["input_ids"]] * 2, dim=1)  # longer than the sliding windows of 16
    with torch.no_grad():
        expected = model(input_ids=tokens)[0]
    cache = RankCache(model, max_cache_len=30 if static else None)
    found = step_by_step(model, tokens, cache)
    assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())
    if kind == "deepseek_v3":  # it caches 16 + 8 numbers of a latent, whatever the limit is
        assert cache.nbytes == 2 * 2 * (30 if static else 24) * (16 + 8) * 4
    elif kind in ("llama", "qwen3", "mixtral", "phi3", "smollm3"):
        assert cache.nbytes == 2 * 2 * limit.heads[0].widths.groups * (30 if static else 24) * (3 + 4) * 4


class TestGeneration:
    """Against the tokens of the limited model without a cache."""

    @pytest.mark.parametrize("widths", [(4, 6), (4, None), (None, 5), ([[2, 5], [3, 3]], [[4, 4], [6, 1]])])
    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_greedy_with_left_padding(self, widths, implementation):
        model, prompts = llama(attn_implementation=implementation), ids(3)
        mask = torch.ones_like(prompts)
        mask[1, :4] = 0
        options = {"attention_mask": mask, "max_new_tokens": 12, **GREEDY}
        with limit_rank(model, *widths, calibration={"input_ids": ids(4, 20)}):
            expected = model.generate(prompts, use_cache=False, **options)
            for options["past_key_values"] in (RankCache(model), RankCache(model, max_cache_len=25)):
                assert torch.equal(model.generate(prompts, **options), expected)
        assert len(expected[:, 9:].unique()) > 5

    def test_unequal_key_heads_are_stored_without_zeros(self):
        model, prompts = llama(), ids(3)
        with limit_rank(model, [[2, 5], [3, 3]], [[4, 4], [6, 1]], calibration={"input_ids": ids(4, 20)}):
            cache = RankCache(model)
            model.generate(prompts, past_key_values=cache, max_new_tokens=12, **GREEDY)
        assert cache.nbytes == 3 * 20 * ((2 + 5) + (4 + 4) + (3 + 3) + (6 + 1)) * 4

    def test_beams_and_several_returned_texts(self):
        model, prompts = llama(), ids(2)
        with limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)}):
            for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.0}):
                options |= {"max_new_tokens": 10, **GREEDY}
                expected = model.generate(prompts, use_cache=False, **options)
                assert torch.equal(model.generate(prompts, past_key_values=RankCache(model), **options), expected)

    def test_sliding_windows_keep_their_windows(self):
        config = Gemma3TextConfig(**SIZES, num_hidden_layers=2, head_dim=8, sliding_window=6)
        config.layer_types = ["sliding_attention", "full_attention"]
        model, prompts = sharpened(Gemma3ForCausalLM(config).eval()), ids(2)
        with limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)}):
            cache = RankCache(model)
            options = {"max_new_tokens": 12, **GREEDY}
            expected = model.generate(prompts, use_cache=False, **options)
            assert torch.equal(model.generate(prompts, past_key_values=cache, **options), expected)
        assert cache.nbytes == 2 * 2 * (5 + 20) * (4 + 6) * 4  # a window of 6 keeps 5 tokens for the next one

    def test_a_prompt_is_cached_once_and_used_again(self):
        model, prompt = llama(), ids(1, 8)
        with limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)}):
            cache = RankCache(model)
            with torch.no_grad():
                model(prompt, past_key_values=cache)
            for question in (ids(1, 3), ids(1, 4)):
                own = copy.deepcopy(cache)
                whole = torch.cat([prompt, question], dim=1)
                options = {"max_new_tokens": 6, **GREEDY}
                expected = model.generate(whole, use_cache=False, **options)
                assert torch.equal(model.generate(whole, past_key_values=own, **options), expected)
            assert own.limits is cache.limits and cache.get_seq_length() == 8
            cache.reset()
            assert torch.equal(model.generate(whole, past_key_values=cache, **options), expected)

    def test_candidates_that_are_taken_back(self):
        model, prompts = llama(), ids(1, 4).repeat(1, 5)
        with limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)}):
            options = {"max_new_tokens": 15, **GREEDY}
            expected = model.generate(prompts, use_cache=False, **options)
            options |= {"prompt_lookup_num_tokens": 3, "past_key_values": RankCache(model)}
            assert torch.equal(model.generate(prompts, **options), expected)

    def test_half_precision(self):
        model, prompts = llama().bfloat16(), ids(2)
        with limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)}):
            cache = RankCache(model)
            found = model.generate(prompts, past_key_values=cache, max_new_tokens=4, **GREEDY)
            assert cache.layers[0].keys.dtype == torch.bfloat16 and cache.nbytes == 2 * 2 * 2 * 12 * (4 + 6) * 2
            theirs = model.generate(
                prompts, past_key_values=DynamicCache(config=model.config), max_new_tokens=4, **GREEDY
            )
        assert (found == theirs).float().mean() > 0.9

    def test_an_exception_between_the_cache_and_the_attention_leaves_nothing_behind(self):
        model, prompts = llama(), ids(2)
        with limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)}), torch.no_grad():
            expected = model(prompts).logits
            limit = model.model.layers[1].self_attn.__dict__["rank_limit"]
            with pytest.raises(RuntimeError, match="size|shape|expand"):
                model(
                    prompts, past_key_values=RankCache(model), attention_mask=torch.ones(2, 1, 9, 5, dtype=torch.bool)
                )
            limit.given = torch.zeros(1)  # as after Ctrl-C
            assert torch.equal(model(prompts).logits, expected)


class TestGrowingLayer:
    """Against torch.cat."""

    def test_appends_without_copying_and_survives_what_caches_do(self):
        layer, random = GrowingLayer(), torch.Generator().manual_seed(0)
        keys, values = torch.empty(2, 3, 0, 4), torch.empty(2, 3, 0, 5)
        copies = 0

        def append(tokens: int) -> None:
            nonlocal keys, values, copies
            new = [torch.randn(*keys.shape[:2], tokens, width, generator=random) for width in (4, 5)]
            room = layer.room[0]
            ours = layer.update(*new)
            copies += layer.room[0] is not room
            keys, values = torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)
            assert (
                torch.equal(ours[0], keys) and torch.equal(ours[1], values) and layer.get_seq_length() == keys.shape[2]
            )

        for tokens in (7, *[1] * 200):
            append(tokens)
        assert copies < 15
        layer.crop(-5)
        keys, values, before = keys[:, :, :-5], values[:, :, :-5], copies
        append(1)
        assert copies == before
        order = torch.tensor([1, 1])
        layer.reorder_cache(order)
        keys, values = keys[order], values[order]
        append(2)
        layer.batch_repeat_interleave(2)
        keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
        append(1)
        other = copy.deepcopy(layer)
        other.update(torch.ones(4, 3, 1, 4), torch.ones(4, 3, 1, 5))
        append(1)
        layer.batch_select_indices(torch.tensor([2]))
        keys, values = keys[[2]], values[[2]]
        append(1)
        with torch.inference_mode():
            append(300)
        append(1)
        layer.offload()
        layer.prefetch()
        append(1)

    def test_gradients_go_through_it(self):
        model, tokens = llama(), ids(2)
        limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)})
        weight = model.model.layers[0].self_attn.k_proj.weight
        cache, gradients = RankCache(model), []
        for caches in ((None,), (cache, cache)):
            model.zero_grad()
            parts = tokens.split(9 // len(caches) + 1 if len(caches) > 1 else 9, dim=1)
            logits = [model(part, past_key_values=own).logits for part, own in zip(parts, caches, strict=True)]
            torch.cat(logits, dim=1).square().sum().backward()
            gradients.append(weight.grad.clone())
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


class TestBadInput:
    def test_models_that_are_not_limited_or_not_decoders(self):
        model = llama()
        with pytest.raises(ValueError, match="is limited: call limit_rank.*first"):
            RankCache(model)
        sizes = {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "vocab_size": 47,
            "max_position_embeddings": 32,
        }
        heads = {
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 8,
            "decoder_ffn_dim": 8,
        }
        bart = BartForConditionalGeneration(BartConfig(**sizes, **heads)).eval()
        batch = {"input_ids": ids(2), "decoder_input_ids": ids(2)}
        with limit_rank(bart, 4, calibration=batch, tower="decoder"):
            with pytest.raises(ValueError, match="an encoder and a decoder.*own cache"):
                RankCache(bart)
            # its own cache works, and holds whole keys
            options = {"max_new_tokens": 4, **GREEDY}
            expected = bart.generate(ids(1), use_cache=False, **options)
            assert expected.shape[1] >= 4

    def test_a_cache_of_another_limit_or_after_it(self):
        model, tokens = llama(), ids(2)
        batch = {"input_ids": ids(4, 20)}
        with limit_rank(model, 4, 6, calibration=batch), torch.no_grad():
            cache = RankCache(model)
            model(tokens, past_key_values=cache)
        with pytest.raises(ValueError, match="not limited any more.*attach"), torch.no_grad():
            model(tokens, past_key_values=cache)
        for rank, other in ((3, batch), (4, {"input_ids": batch["input_ids"].flip(1)})):
            with limit_rank(model, rank, 6, calibration=other), torch.no_grad():
                with pytest.raises(ValueError, match="another limit in layer 0.*make a cache for each limit"):
                    model(tokens, past_key_values=cache)

    def test_layers_that_are_no_plain_keys_and_values(self):
        model, batch, reason = small_and_running("deepseek_v32")
        assert not reason
        with limit_rank(model, 4, calibration=batch), pytest.raises(ValueError, match="DynamicIndexedLayer"):
            RankCache(model)

    def test_layers_that_read_the_keys_of_others(self):
        model = llama()
        model.config.num_kv_shared_layers = 1
        with limit_rank(model, 4, calibration={"input_ids": ids(4, 20)}):
            with pytest.raises(ValueError, match="num_kv_shared_layers.*DynamicCache"):
                RankCache(model)

    def test_a_quantised_cache_is_not_mixed_with_it(self):
        model = llama()
        with limit_rank(model, 4, calibration={"input_ids": ids(4, 20)}):
            with pytest.raises(ValueError, match="cache_implementation"):
                model.generate(ids(1), past_key_values=RankCache(model), cache_implementation="quantized", **GREEDY)

    def test_keys_that_a_model_changes_behind_the_cache(self, monkeypatch):
        model, tokens = llama(), ids(2)
        with limit_rank(model, 4, 6, calibration={"input_ids": ids(4, 20)}), torch.no_grad():
            cache, update = RankCache(model), RankCache.update
            monkeypatch.setattr(RankCache, "update", lambda *args: tuple(part.clone() for part in update(*args)))
            with pytest.raises(ValueError, match="the model changes what the cache returns.*DynamicCache"):
                model(tokens, past_key_values=cache)


@pytest.mark.slow
class TestSmolLM2:
    def test_tokens_and_bytes(self, smollm2):
        options = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
        model = AutoModelForCausalLM.from_pretrained(smollm2, **options, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(smollm2, **options, padding_side="left")
        texts = package_text()
        batch = tokenizer(texts[:4], return_tensors="pt", padding=True, truncation=True, max_length=96)
        prompts = tokenizer(["Once upon a time", texts[5][:200]], return_tensors="pt", padding=True)
        with limit_rank(model, 32, 48, calibration=batch, objective="logits"):
            cache = RankCache(model)
            found = model.generate(**prompts, past_key_values=cache, max_new_tokens=40, do_sample=False)
            expected = model.generate(**prompts, use_cache=False, max_new_tokens=40, do_sample=False)
        assert torch.equal(found, expected)
        assert cache.nbytes == 2 * 30 * 3 * (found.shape[1] - 1) * (32 + 48) * 4
