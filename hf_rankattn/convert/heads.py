"""Queries, keys, values and outputs of a head as matrices, and weights from their factors, for each layout.

Both parts of a head are a bilinear form between two sides. A logit is `x^T form y` with the query `x` and the key `y`, biases
included, and the identity as form. For XLNet `x` is the query with a one, and `y` the content key, the position key and the
segment embedding one after the other: the three terms share the query, and the form holds their biases, `[[1, 1, 1],
[r_w_bias, r_r_bias, r_s_bias]]`. What a head writes is `z^T form W` with the values `z` that attention has mixed and the rows
`W` of the output projection; the form is the identity in every family.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..families.projections import FusedProjections, LinearProjections, RelativeProjections
from ..families.row import Family


Tensors = dict[str, torch.Tensor]
KINDS = ("query", "key", "value", "output")


class Sides(NamedTuple):
    """`query` (heads, d + 1, x) and `key` (heads, ..., y) map inputs (with a one) to both sides of `form` (heads, x, y).

    For values, `query` maps inputs to values, and `key` maps the output coordinates to the rows of the output projection.
    """

    query: torch.Tensor
    key: torch.Tensor
    form: torch.Tensor


def identities(count: int, like: torch.Tensor) -> torch.Tensor:
    width = like.shape[-1]
    return torch.eye(width, dtype=like.dtype, device=like.device).expand(count, -1, -1)


class LinearHeads:
    """Linear layers for queries, keys, values and outputs, at paths from the attention block.

    `read` and `write` translate between the tensors of a block and `query.weight` (heads * r, d), `query.bias`, ...,
    `output.weight` (d, heads * v), which all other methods take. The bias of the output does not change.
    """

    def __init__(self, projections: LinearProjections | FusedProjections, biases_required: bool = True):
        self.paths = dict(zip(KINDS, projections.block()[1], strict=True))
        biases = [f"{self.paths[kind]}.bias" for kind in KINDS[:3]]
        self.names = tuple(f"{path}.weight" for path in self.paths.values()) + tuple(biases if biases_required else ())
        self.optional = () if biases_required else tuple(biases)

    def read(self, stored: Tensors, num_heads: int) -> Tensors:
        names = {f"{self.paths[kind]}.{leaf}": f"{kind}.{leaf}" for kind in KINDS for leaf in ("weight", "bias")}
        return {names[name]: tensor for name, tensor in stored.items()}

    def write(self, tensors: Tensors) -> Tensors:
        return {f"{self.paths[name.split('.')[0]]}.{name.split('.')[1]}": tensor for name, tensor in tensors.items()}

    def rank_of(self, tensors: Tensors, num_heads: int) -> int:
        return tensors["query.weight"].shape[0] // num_heads

    def width_of(self, tensors: Tensors, num_heads: int) -> int:
        return tensors["value.weight"].shape[0] // num_heads

    def hidden_size(self, tensors: Tensors) -> int:
        return tensors["query.weight"].shape[1]

    def side(self, tensors: Tensors, kind: str, num_heads: int) -> torch.Tensor:
        """The matrix (heads, d + 1, width) from inputs with a one to queries, keys or values."""
        weight, bias = tensors[f"{kind}.weight"], tensors.get(f"{kind}.bias")
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return torch.cat([weight.T, bias[None]]).double().unflatten(1, (num_heads, -1)).transpose(0, 1)

    def sides(self, tensors: Tensors, num_heads: int) -> Sides:
        query, key = (self.side(tensors, kind, num_heads) for kind in ("query", "key"))
        return Sides(query, key, identities(num_heads, query))

    def value_sides(self, tensors: Tensors, num_heads: int) -> Sides:
        value = self.side(tensors, "value", num_heads)
        output = tensors["output.weight"].double().unflatten(1, (num_heads, -1)).transpose(0, 1)
        return Sides(value, output, identities(num_heads, value))

    def folded(self, tensors: Tensors, kind: str, factor: torch.Tensor) -> Tensors:
        """The layer whose outputs are `factor^T` times those of the old one, head by head."""
        side = self.side(tensors, kind, len(factor))
        joined = (side @ factor.to(side)).transpose(0, 1).flatten(1)
        found = {f"{kind}.weight": joined[:-1].T, f"{kind}.bias": joined[-1]}
        return {name: tensor.contiguous().to(tensors[name]) for name, tensor in found.items() if name in tensors}

    def fold(self, tensors: Tensors, query: torch.Tensor, key: torch.Tensor) -> Tensors:
        """The tensors whose queries are `query^T x` and whose keys are `key^T y`."""
        return {**tensors, **self.folded(tensors, "query", query), **self.folded(tensors, "key", key)}

    def fold_values(self, tensors: Tensors, value: torch.Tensor, output: torch.Tensor) -> Tensors:
        """The tensors whose values are `value^T z`, written by `output^T W`."""
        rows = self.value_sides(tensors, len(value)).key @ output
        written = rows.transpose(0, 1).flatten(1).contiguous().to(tensors["output.weight"])
        return {**tensors, **self.folded(tensors, "value", value), "output.weight": written}

    def extended(self, tensors: Tensors, kind: str, fresh: torch.Tensor) -> Tensors:
        """A layer with further outputs in each head, of the weights `fresh` (heads, d, more) and without bias."""
        heads, hidden, more = fresh.shape
        weight = tensors[f"{kind}.weight"].unflatten(0, (heads, -1))
        found = {f"{kind}.weight": torch.cat([weight, fresh.transpose(1, 2).to(weight)], dim=1).flatten(0, 1)}
        if (bias := tensors.get(f"{kind}.bias")) is not None:
            found[f"{kind}.bias"] = pad(bias.unflatten(0, (heads, -1)), (0, more)).flatten()
        return found

    def widen(self, tensors: Tensors, fresh: torch.Tensor) -> Tensors:
        """The same logits at a larger rank: new keys are zero, new queries are `fresh` (heads, d, more)."""
        keys = self.extended(tensors, "key", torch.zeros_like(fresh))
        return {**tensors, **self.extended(tensors, "query", fresh), **keys}

    def widen_values(self, tensors: Tensors, fresh: torch.Tensor) -> Tensors:
        """The same output at a larger width: new values are `fresh` (heads, d, more), and nothing reads them."""
        output = pad(tensors["output.weight"].unflatten(1, (len(fresh), -1)), (0, fresh.shape[2])).flatten(1)
        return {**tensors, **self.extended(tensors, "value", fresh), "output.weight": output}

    def rescale(self, tensors: Tensors, factor: float) -> Tensors:
        """Queries times a factor."""
        return {name: tensor * factor if name.startswith("query.") else tensor for name, tensor in tensors.items()}


class FusedHeads(LinearHeads):
    """GPT-2: one matrix (d, heads * (2 r + v)) for queries, keys and values, and one (heads * v, d) for outputs."""

    def __init__(self, projections: FusedProjections):
        self.fused, output = projections.block()[1]
        self.paths = {"output": output}
        self.names = (f"{self.fused}.weight", f"{self.fused}.bias", f"{output}.weight")
        self.optional = ()

    def read(self, stored: Tensors, num_heads: int) -> Tensors:
        weight, bias, output = (stored[name] for name in self.names)
        rank = (weight.shape[1] - output.shape[0]) // 2
        sizes = (rank, rank, output.shape[0])
        found = {"output.weight": output.T}
        for kind, own, shift in zip(KINDS, weight.T.split(sizes), bias.split(sizes), strict=False):
            found |= {f"{kind}.weight": own, f"{kind}.bias": shift}
        return found

    def write(self, tensors: Tensors) -> Tensors:
        weight, bias = (torch.cat([tensors[f"{kind}.{leaf}"] for kind in KINDS[:3]]) for leaf in ("weight", "bias"))
        written = (weight.T, bias, tensors["output.weight"].T)
        return {name: tensor.contiguous() for name, tensor in zip(self.names, written, strict=True)}


def in_blocks(keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Three kinds of keys (heads, n, w), each in columns of its own: (heads, sum of n, 3 w)."""
    width = keys[0].shape[-1]
    padded = [pad(key, (place * width, (2 - place) * width)) for place, key in enumerate(keys)]
    return torch.cat(padded, dim=1)


class RelativeHeads:
    """XLNet: parameters (d, heads, width), three biases and two segments (heads, width)."""

    biases = ("r_w_bias", "r_r_bias", "r_s_bias")
    names: tuple[str, ...] = ("q", "k", "r", *biases, "seg_embed", "v", "o")
    optional: tuple[str, ...] = ()

    def read(self, stored: Tensors, num_heads: int) -> Tensors:
        return stored

    def write(self, tensors: Tensors) -> Tensors:
        return tensors

    def rank_of(self, tensors: Tensors, num_heads: int) -> int:
        return tensors["q"].shape[-1]

    def width_of(self, tensors: Tensors, num_heads: int) -> int:
        return tensors["v"].shape[-1]

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
        biases = torch.cat([wide[name] for name in self.biases], dim=-1)
        identity = identities(num_heads, segments)
        return Sides(query, key, torch.cat([identity.repeat(1, 1, 3), biases[:, None]], dim=1))

    def value_sides(self, tensors: Tensors, num_heads: int) -> Sides:
        value, output = (tensors[name].double().transpose(0, 1) for name in ("v", "o"))
        return Sides(value, output, identities(num_heads, value))

    def fold(self, tensors: Tensors, query: torch.Tensor, key: torch.Tensor) -> Tensors:
        """The tensors whose queries and bias are `query^T x`, and whose three kinds of keys are the blocks of `key^T y`."""
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        query, key = query.to(wide["q"]), key.to(wide["q"])
        content, position, segment = key.chunk(3, dim=1)
        folded = {
            "q": torch.einsum("dhw,hwr->dhr", wide["q"], query[:, :-1]),
            "k": torch.einsum("dhw,hwr->dhr", wide["k"], content),
            "r": torch.einsum("dhw,hwr->dhr", wide["r"], position),
            "seg_embed": torch.einsum("shw,hwr->shr", wide["seg_embed"], segment),
        }
        folded.update({name: query[:, -1].clone() for name in self.biases})
        return {**tensors, **{name: tensor.contiguous().to(tensors[name]) for name, tensor in folded.items()}}

    def fold_values(self, tensors: Tensors, value: torch.Tensor, output: torch.Tensor) -> Tensors:
        """The tensors whose values are `value^T z`, written by `output^T W`."""
        pairs = (("v", value), ("o", output))
        folded = {name: torch.einsum("dhv,hvs->dhs", tensors[name].double(), factor) for name, factor in pairs}
        return {**tensors, **{name: tensor.contiguous().to(tensors[name]) for name, tensor in folded.items()}}

    def widen(self, tensors: Tensors, fresh: torch.Tensor) -> Tensors:
        """The same logits at a larger rank: new keys and biases are zero, new queries `fresh` (heads, d, more)."""
        more = fresh.shape[2]
        widened = {name: tensor if name in ("v", "o") else pad(tensor, (0, more)) for name, tensor in tensors.items()}
        widened["q"][..., -more:] = fresh.transpose(0, 1).to(widened["q"])
        return widened

    def widen_values(self, tensors: Tensors, fresh: torch.Tensor) -> Tensors:
        """The same output at a larger width: new values are `fresh` (heads, d, more), and nothing reads them."""
        value = torch.cat([tensors["v"], fresh.transpose(0, 1).to(tensors["v"])], dim=-1)
        return {**tensors, "v": value, "o": pad(tensors["o"], (0, fresh.shape[2]))}

    def rescale(self, tensors: Tensors, factor: float) -> Tensors:
        """Queries and their biases times a factor."""
        return {n: tensor * factor if n == "q" or n in self.biases else tensor for n, tensor in tensors.items()}


Heads = LinearHeads | RelativeHeads


def heads_of(family: Family) -> Heads:
    if isinstance(family.projections, RelativeProjections):
        return RelativeHeads()
    if isinstance(family.projections, FusedProjections):
        return FusedHeads(family.projections)
    assert isinstance(family.projections, LinearProjections)
    return LinearHeads(family.projections, biases_required=bool(family.rank_types))
