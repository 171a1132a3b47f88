"""The largest rank that the logits of a head can have, by the widths of its projections."""

from .inputs import whole


def gqa_ranks(n: int, *, hidden_size: int, num_heads: int, num_key_value_heads: int, head_dim: int) -> dict[str, int]:
    """Ranks of grouped-query attention on n tokens, reached by random weights; rotary positions do not change them.

    Returns `head` (the logits of one head), `group` (the logits of all heads that share a key head, one below the other) and
    `keys` (the keys of all heads side by side, what a cache holds). With `num_key_value_heads` equal to `num_heads` it is
    ordinary attention, with 1 it is multi-query attention.

    >>> gqa_ranks(4096, hidden_size=4096, num_heads=32, num_key_value_heads=8, head_dim=128)
    {'head': 128, 'group': 128, 'keys': 1024}
    """
    n, hidden_size, head_dim = whole("n", n, 1), whole("hidden_size", hidden_size, 1), whole("head_dim", head_dim, 1)
    num_heads, groups = whole("num_heads", num_heads, 1), whole("num_key_value_heads", num_key_value_heads, 1)
    if num_heads % groups:
        raise ValueError(f"num_key_value_heads={groups} does not divide num_heads={num_heads}.")
    head = min(n, hidden_size, head_dim)
    return {"head": head, "group": head, "keys": min(n, hidden_size, groups * head_dim)}


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
