"""The largest rank that the logits of a head can have, by the widths of its projections."""

from .inputs import whole


def gqa_ranks(
    n: int, *, hidden_size: int, num_heads: int, num_key_value_heads: int, head_dim: int, rotary_dim: int = 0
) -> dict[str, int]:
    """Ranks of grouped-query attention on n tokens, reached by random weights and random tokens.

    Returns `head` (the logits of one head), `group` (the logits of all heads that share a key head, one below the other) and
    `keys` (the keys of all heads side by side, what a cache holds). With `num_key_value_heads` equal to `num_heads` it is
    ordinary attention, with 1 it is multi-query attention.

    `rotary_dim` is the number of features of a head that rotary positions turn: 0 without them, `head_dim` in Llama. Without
    them all keys are linear in the token, so `hidden_size` bounds every rank. Rotary positions turn the keys of each
    position by another matrix, so that keys of several positions together leave that space: the turned features of a head
    reach rank `rotary_dim`, those of all heads `rotary_dim * min(num_key_value_heads, hidden_size)`, and `hidden_size`
    bounds only the features that are not turned. The ranks with and without rotary positions differ only if
    `num_key_value_heads * head_dim > hidden_size`. The rule needs frequencies that differ from each other, as they do in
    transformers; slow ones make the last singular values small.

    >>> gqa_ranks(4096, hidden_size=4096, num_heads=32, num_key_value_heads=8, head_dim=128, rotary_dim=128)  # Llama 3 8B
    {'head': 128, 'group': 128, 'keys': 1024}
    >>> gemma = {"hidden_size": 3072, "num_heads": 16, "num_key_value_heads": 16, "head_dim": 256}  # Gemma 7B
    >>> gqa_ranks(8192, **gemma), gqa_ranks(8192, **gemma, rotary_dim=256)
    ({'head': 256, 'group': 256, 'keys': 3072}, {'head': 256, 'group': 256, 'keys': 4096})
    """
    n, hidden_size, head_dim = whole("n", n, 1), whole("hidden_size", hidden_size, 1), whole("head_dim", head_dim, 1)
    num_heads, groups = whole("num_heads", num_heads, 1), whole("num_key_value_heads", num_key_value_heads, 1)
    turned = whole("rotary_dim", rotary_dim, 0)
    if num_heads % groups:
        raise ValueError(f"num_key_value_heads={groups} does not divide num_heads={num_heads}.")
    if turned > head_dim or turned % 2:
        raise ValueError(f"rotary_dim={turned} must be even and at most head_dim={head_dim}: positions turn pairs.")
    head = min(n, turned + min(hidden_size, head_dim - turned))
    keys = min(n, turned * min(groups, hidden_size) + min(hidden_size, groups * (head_dim - turned)))
    return {"head": head, "group": head, "keys": keys}


def mla_ranks(
    n: int,
    *,
    num_heads: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    kv_lora_rank: int,
    q_lora_rank: int | None = None,
) -> dict[str, int]:
    """Ranks of multi-head latent attention on n tokens, reached by random weights and a hidden size above all widths.

    Returns `form` (the bilinear form of a head between tokens at one distance: the smaller of `q_lora_rank` and
    min(qk_nope_head_dim, kv_lora_rank) + qk_rope_head_dim), `head` (its logits over all distances: the rotary part is turned
    after the query latent, fills its own width, and the latent bounds only the rest) and `keys` (the keys of all heads side
    by side).

    >>> mla_ranks(8192, num_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, q_lora_rank=1536)
    {'form': 192, 'head': 192, 'keys': 576}
    """
    n, num_heads = whole("n", n, 1), whole("num_heads", num_heads, 1)
    nope, rope = whole("qk_nope_head_dim", qk_nope_head_dim, 0), whole("qk_rope_head_dim", qk_rope_head_dim, 0)
    latent = whole("kv_lora_rank", kv_lora_rank, 1)
    content = min(nope, latent)
    queries = content + rope if q_lora_rank is None else whole("q_lora_rank", q_lora_rank, 1)
    return {
        "form": min(n, content + rope, queries),
        "head": min(n, min(content, queries) + rope),
        "keys": min(n, min(num_heads * nope, latent) + rope),
    }
