"""Rank models that generate: with a cache of each layer's own widths as without one, and as the stock model at its widths."""

import pytest
import torch
from testing_common import BERT, GPT2, ROBERTA, VOCAB


DECODERS = {"Bert": (BERT, "LMHeadModel"), "Roberta": (ROBERTA, "ForCausalLM"), "GPT2": (GPT2, "LMHeadModel")}
NARROW = {"qk_rank": 3, "v_head_dim": 5}
MIXED = {"qk_rank": [3, 8, 11], "v_head_dim": [5, 2, 8], "qk_norm": True}


def decoder(name, kind="rank", **fields):
    """A model whose weights are large enough that the next token depends on all tokens before it."""
    family, suffix = DECODERS[name]
    fields |= {} if family is GPT2 else {"is_decoder": True}
    config = getattr(family, f"{kind}_config")(initializer_range=0.3, **fields)
    return getattr(family, kind)(suffix)(config).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
@pytest.mark.parametrize("widths", [NARROW, MIXED], ids=["narrow", "mixed"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_cache_changes_no_token(name, widths, beams, implementation):
    model = decoder(name, attn_implementation=implementation, **widths)
    prompt = torch.randint(3, VOCAB, (2, 4))
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "return_dict_in_generate": True}
    cached = model.generate(prompt, use_cache=True, **options)
    assert torch.equal(cached.sequences, model.generate(prompt, use_cache=False, **options).sequences)
    layers = getattr(cached.past_key_values, "self_attention_cache", cached.past_key_values).layers
    for number, layer in enumerate(layers):
        heads = model.config.head_geometry(number)
        assert (layer.keys.shape[-1], layer.values.shape[-1]) == (heads.qk_rank, heads.v_head_dim)


@pytest.mark.parametrize("widths", [NARROW, MIXED], ids=["narrow", "mixed"])
def test_left_padding_changes_no_token(widths):
    model = decoder("GPT2", **widths)
    short, long = torch.randint(3, VOCAB, (1, 3)), torch.randint(3, VOCAB, (1, 6))
    batch = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1), long])
    mask = torch.ones_like(batch)
    mask[0, :3] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    for use_cache in (True, False):
        both = model.generate(batch, attention_mask=mask, use_cache=use_cache, **options)
        assert torch.equal(both[0, 6:], model.generate(short, **options)[0, 3:])
        assert torch.equal(both[1, 6:], model.generate(long, **options)[0, 6:])


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}], ids=["whole", "chunked"])
@pytest.mark.parametrize("widths", [NARROW, MIXED], ids=["narrow", "mixed"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_static_cache_takes_the_widths_of_each_layer(name, widths, options):
    model = decoder(name, **widths)
    prompt = torch.randint(3, VOCAB, (2, 4))
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    static = model.generate(prompt, max_new_tokens=5, do_sample=False, cache_implementation="static", **options)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DECODERS)
def test_cross_attention_and_cache_are_those_of_the_stock_model(name, implementation):
    fields = {"add_cross_attention": True, "attn_implementation": implementation}
    stock, rank = decoder(name, "stock", **fields), decoder(name, **fields)
    rank.load_state_dict(stock.state_dict())
    ids, encoder_states = torch.randint(3, VOCAB, (2, 6)), torch.randn(2, 4, 32)
    results = []
    for model in (stock, rank):
        prefix = model(ids[:, :4], encoder_hidden_states=encoder_states, use_cache=True)
        cached = {"past_key_values": prefix.past_key_values, "use_cache": True}
        step = model(ids[:, 4:], encoder_hidden_states=encoder_states, **cached)
        results.append([prefix.logits, step.logits])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    whole = rank(ids, encoder_hidden_states=encoder_states).logits
    torch.testing.assert_close(torch.cat(results[1], dim=1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("widths", [NARROW, MIXED], ids=["narrow", "mixed"])
@pytest.mark.parametrize("name", DECODERS)
def test_narrow_cross_attention_with_a_cache(name, widths):
    model = decoder(name, add_cross_attention=True, **widths)
    ids, encoder_states = torch.randint(3, VOCAB, (2, 6)), torch.randn(2, 4, 32)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    encoder = {"encoder_hidden_states": encoder_states, "encoder_attention_mask": mask}
    whole = model(ids, **encoder).logits
    prefix = model(ids[:, :4], **encoder, use_cache=True)
    step = model(ids[:, 4:], **encoder, past_key_values=prefix.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([prefix.logits, step.logits], dim=1), whole, atol=1e-5, rtol=1e-4)
    encoder["encoder_hidden_states"] = encoder_states.clone()
    encoder["encoder_hidden_states"][1, 2:] += 9.0
    torch.testing.assert_close(model(ids, **encoder).logits, whole)


class TestScalesOfGPT2:
    OPTIONS = {
        "unscaled": {"scale_attn_weights": False},
        "by-layer": {"scale_attn_by_inverse_layer_idx": True},
        "both": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        "upcast": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    }

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
    def test_the_options_of_stock_are_honoured(self, options, implementation):
        stock = decoder("GPT2", "stock", attn_implementation=implementation, **options)
        rank = decoder("GPT2", attn_implementation=implementation, **options)
        rank.load_state_dict(stock.state_dict())
        ids = torch.randint(3, VOCAB, (2, 6))
        assert torch.equal(rank(ids).logits, stock(ids).logits)
        scales = [block.attn.scaling for block in rank.transformer.h]
        assert scales == [block.attn.scaling for block in stock.transformer.h]
        assert scales == [rank.config.head_geometry(layer).qk_scale for layer in range(3)]

    def test_the_scale_of_a_narrow_head_follows_its_rank(self):
        config = GPT2.rank_config(qk_rank=[4, 16, 1], scale_attn_by_inverse_layer_idx=True)
        assert [config.head_geometry(layer).qk_scale for layer in range(3)] == [0.5, 0.125, 1 / 3]

    def test_a_given_scale_replaces_all_of_it(self):
        config = GPT2.rank_config(qk_scale=0.3, **self.OPTIONS["both"])
        assert [config.head_geometry(layer).qk_scale for layer in range(3)] == [0.3] * 3

    @pytest.mark.parametrize("widths", [NARROW, MIXED], ids=["narrow", "mixed"])
    def test_upcast_attention_at_other_widths(self, widths):
        """In float32 the upcast changes nothing but the order of sums."""
        plain = decoder("GPT2", attn_implementation="eager", **widths)
        upcast = decoder("GPT2", attn_implementation="eager", reorder_and_upcast_attn=True, **widths)
        upcast.load_state_dict(plain.state_dict())
        ids = torch.randint(3, VOCAB, (2, 6))
        torch.testing.assert_close(upcast(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-4)
        maps = upcast(ids, output_attentions=True).attentions
        assert [found.shape for found in maps] == [(2, 4, 6, 6)] * 3
