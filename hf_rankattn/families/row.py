"""What a row of the table of architectures says."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .projections import Projections, submodule


class MLP(NamedTuple):
    """The two maps of an MLP, (inner, hidden) and (hidden, inner), and the function between them."""

    up: torch.Tensor
    down: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]


class MLPPaths(NamedTuple):
    """Where a layer keeps the two linear modules of its MLP, and the function between them."""

    up: str
    down: str
    activation: str

    def read(self, layer: nn.Module) -> MLP:
        modules = submodule(layer, self.up), submodule(layer, self.down)
        up, down = (module.weight.t() if isinstance(module, Conv1D) else module.weight for module in modules)
        return MLP(up, down, submodule(layer, self.activation))


def position_limit(config: Any) -> int | None:
    """The number of rows of a position table; XLNet's relative positions have no limit, and -1 in the config."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if limit and limit > 0 else None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table. `layers` and `final_norm` are paths from the base model, all other paths start at a layer.

    A model type without a row has a `Family` of its name alone, and its parts are found by `structure` and `stream`. So are
    those of a row without `layers`, which says only what conversion needs: its `projections` are paths from the module that
    has all four.
    """

    name: str
    model_types: tuple[str, ...]
    # a list of layers, read off the structure if it is empty; `groups.*.layers` means that each entry of `groups` has a list
    layers: str = ""
    # the module that returns the attention maps
    attention: str = ""
    # the modules whose outputs are added to the residual stream by attention and by the MLP
    attended: str = ""
    updated: str = ""
    attention_norm: str = ""
    mlp_norm: str = ""
    # whether the norms come before attention and MLP, after each sum, or as `layer.pre_norm` says
    norm: Literal["pre", "post", "layer"] = "post"
    # the norm of the base model after its last layer
    final_norm: str | None = None
    # a norm without bias between the stream and the values
    value_norm: str | None = None
    # only a family without a row has none
    projections: Projections = None  # type: ignore[assignment]
    # None for a gated MLP, which multiplies two maps and has no Lipschitz constant
    mlp: MLPPaths | None = None
    # whether `ablate` can replace the two linear maps of the MLP by identities, as the published curves of ALBERT do
    identity_trick: bool = False
    # False where layers take (n, batch, d) and return a tuple
    batch_first: bool = True
    # the maps come from the attention interface, are the second output of the attention module, or the first input of its dropout
    maps: Literal["interface", "output", "dropout"] = "interface"
    causal: Callable[[Any], bool] = lambda config: bool(getattr(config, "is_decoder", False))
    # which group of layers runs at each depth; None where every layer runs once
    groups: Callable[[Any], list[int]] | None = None
    # attributes of the attention module: the number of heads and the factor on the logits
    num_heads: str = "num_attention_heads"
    scale: str = "scaling"
    # the stock factor for heads of a given width
    default_scale: Callable[[int], float] = lambda width: width**-0.5
    # the part of the logits that depends on more than the content of two tokens
    positions: Literal["relative positions", "rotary positions"] | None = None
    longest: Callable[[Any], int | None] = position_limit
    # calls a function with queries and keys where attention does not use transformers' attention interface
    show_query_key: Callable[[Any, Callable, ExitStack], None] | None = None
    # XLNet has a second stream, for the tokens to be predicted
    streams: int = 1
    # whether attention is a function of its own, which torch's function modes do not see
    fused: bool = False
    # what the base model computes from its last states (batch, n, d) for heads that read one vector per text
    pool: Callable[[Any, torch.Tensor], torch.Tensor] = lambda base, states: base.pooler(states)
    # for conversion: the field of a stock config that holds one width for queries, keys and values
    stock_width: str | None = None
    # a second attention block of each layer, if the model has it
    cross_attention: str | None = None

    @property
    def rank_types(self) -> dict[str, str]:
        """Stock model type -> model type of its rank twin, for those model types of the row that have one."""
        twins = {name: f"rank_{name.replace('-', '_')}" for name in self.model_types}
        return {stock: rank for stock, rank in twins.items() if rank in self.model_types}

    def own_attention(self, layer: nn.Module) -> nn.Module | None:
        """The attention module of a layer that computes attention in a function of its own, which torch cannot show."""
        return submodule(layer, self.attention) if self.fused else None

    def pre_norm(self, layer: Any) -> bool:
        return layer.pre_norm if self.norm == "layer" else self.norm == "pre"
