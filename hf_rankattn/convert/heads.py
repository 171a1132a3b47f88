"""Queries and keys of a head as matrices, and weights from their factors, for each family.

A logit is `x^T form y`. For BERT and ALBERT `x` is the query and `y` the key, biases included, and `form` the identity.
For XLNet `x` is the query with a one, and `y` the content key, the position key and the segment embedding one after the
other: the three terms share the query, and the form holds their biases, `[[1, 1, 1], [r_w_bias, r_r_bias, r_s_bias]]`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..families.projections import RelativeProjections
from ..families.row import Family


Tensors = dict[str, torch.Tensor]


class Sides(NamedTuple):
    """`query` (heads, d + 1, x) and `key` (heads, ..., y) map inputs (with a one) to both sides of `form` (heads, x, y)."""

    query: torch.Tensor
    key: torch.Tensor
    form: torch.Tensor


class LinearHeads:
    """BERT and ALBERT: two linear layers with biases."""

    names: tuple[str, ...] = ("query.weight", "query.bias", "key.weight", "key.bias")

    def rank_of(self, tensors: Tensors, num_heads: int) -> int:
        return tensors["query.weight"].shape[0] // num_heads

    def hidden_size(self, tensors: Tensors) -> int:
        return tensors["query.weight"].shape[1]

    def sides(self, tensors: Tensors, num_heads: int) -> Sides:
        query, key = (
            torch.cat([tensors[f"{name}.weight"].T, tensors[f"{name}.bias"][None]]).double()
            for name in ("query", "key")
        )
        query, key = (side.unflatten(1, (num_heads, -1)).transpose(0, 1) for side in (query, key))
        identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
        return Sides(query, key, identity.expand(num_heads, -1, -1))

    def fold(self, tensors: Tensors, query: torch.Tensor, key: torch.Tensor) -> Tensors:
        """The weights whose queries are `query^T x` and whose keys are `key^T y`."""
        folded = {}
        sides = self.sides(tensors, len(query))
        for name, side, factor in (("query", sides.query, query), ("key", sides.key, key)):
            joined = (side @ factor.to(side)).transpose(0, 1).flatten(1)
            folded[f"{name}.weight"] = joined[:-1].T.contiguous().to(tensors[f"{name}.weight"])
            folded[f"{name}.bias"] = joined[-1].contiguous().to(tensors[f"{name}.bias"])
        return folded

    def widen(self, tensors: Tensors, num_heads: int, rank: int, fresh: torch.Tensor) -> Tensors:
        """The same logits at a larger rank: new keys are zero, new queries are `fresh` (heads, d, more)."""
        more = rank - self.rank_of(tensors, num_heads)
        widened = {}
        for name, tensor in tensors.items():
            heads = tensor.unflatten(0, (num_heads, -1))
            extra = heads.new_zeros(num_heads, more, *heads.shape[2:])
            if name == "query.weight":
                extra = fresh.transpose(1, 2).to(heads)
            widened[name] = torch.cat([heads, extra], dim=1).flatten(0, 1)
        return widened


def in_blocks(keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Three kinds of keys (heads, n, w), each in columns of its own: (heads, sum of n, 3 w)."""
    width = keys[0].shape[-1]
    padded = [pad(key, (place * width, (2 - place) * width)) for place, key in enumerate(keys)]
    return torch.cat(padded, dim=1)


class RelativeHeads:
    """XLNet: parameters (d, heads, width), three biases and two segments (heads, width)."""

    names: tuple[str, ...] = ("q", "k", "r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")

    def rank_of(self, tensors: Tensors, num_heads: int) -> int:
        return tensors["q"].shape[-1]

    def hidden_size(self, tensors: Tensors) -> int:
        return tensors["q"].shape[0]

    def sides(self, tensors: Tensors, num_heads: int) -> Sides:
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        query, key, position = (wide[name].transpose(0, 1) for name in ("q", "k", "r"))
        width = query.shape[-1]
        one = query.new_ones(num_heads, 1, 1)
        query = torch.cat([pad(query, (0, 1)), pad(one, (width, 0))], dim=1)
        segments = wide["seg_embed"].transpose(0, 1)
        key = in_blocks((key, position, segments))
        identity = torch.eye(width, dtype=key.dtype, device=key.device).expand(num_heads, -1, -1)
        biases = torch.cat([wide[name] for name in ("r_w_bias", "r_r_bias", "r_s_bias")], dim=-1)
        return Sides(query, key, torch.cat([identity.repeat(1, 1, 3), biases[:, None]], dim=1))

    def fold(self, tensors: Tensors, query: torch.Tensor, key: torch.Tensor) -> Tensors:
        """The weights whose queries and bias are `query^T x`, and whose three kinds of keys are the blocks of `key^T y`."""
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        query, key = query.to(wide["q"]), key.to(wide["q"])
        content, position, segment = key.chunk(3, dim=1)
        folded = {
            "q": torch.einsum("dhw,hwr->dhr", wide["q"], query[:, :-1]),
            "k": torch.einsum("dhw,hwr->dhr", wide["k"], content),
            "r": torch.einsum("dhw,hwr->dhr", wide["r"], position),
            "seg_embed": torch.einsum("shw,hwr->shr", wide["seg_embed"], segment),
        }
        folded.update({name: query[:, -1].clone() for name in ("r_w_bias", "r_r_bias", "r_s_bias")})
        return {name: folded[name].contiguous().to(tensors[name]) for name in tensors}

    def widen(self, tensors: Tensors, num_heads: int, rank: int, fresh: torch.Tensor) -> Tensors:
        """The same logits at a larger rank: new keys and biases are zero, new queries `fresh` (heads, d, more)."""
        widened = {name: pad(tensor, (0, rank - tensor.shape[-1])) for name, tensor in tensors.items()}
        widened["q"][..., self.rank_of(tensors, num_heads) :] = fresh.transpose(0, 1).to(widened["q"])
        return widened


Heads = LinearHeads | RelativeHeads


def heads_of(family: Family) -> Heads:
    return RelativeHeads() if isinstance(family.projections, RelativeProjections) else LinearHeads()
