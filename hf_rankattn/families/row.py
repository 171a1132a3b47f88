"""What a row of the table of architectures says: the class of a row, and the edits that remove parts of a layer."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .projections import Projections, submodule


@dataclass(frozen=True)
class OnModule:
    """An edit of one module of a layer, and of one of its positional arguments."""

    module: str
    argument: int = 0


class ZeroInput(OnModule):
    """The module gets zeros for the argument."""


class PassInput(OnModule):
    """The module returns the argument unchanged."""


class ZeroOutput(OnModule):
    """The module returns zeros."""


class Idle(OnModule):
    """The module runs on one token of each text, because its output is not used."""


@dataclass(frozen=True)
class Feed:
    """The target gets the last output of the source, instead of the sum that the layer computes from it."""

    source: str
    target: str


@dataclass(frozen=True)
class Return:
    """The target returns the last output of the source, after `function` if there is one."""

    source: str
    target: str
    function: str | None = None


Edit = ZeroInput | PassInput | ZeroOutput | Idle | Feed | Return


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
    """One row of the table. `layers` and `final_norm` are paths from the base model, all other paths start at a layer."""

    name: str
    model_types: tuple[str, ...]
    # a list of layers; `groups.*.layers` means that each entry of `groups` has a list
    layers: str
    # the module that returns the attention maps
    attention: str
    # the modules whose outputs are added to the residual stream by attention and by the MLP
    attended: str
    updated: str
    attention_norm: str
    mlp_norm: str
    # whether the norms come before attention and MLP, after each sum, or as `layer.pre_norm` says
    norm: Literal["pre", "post", "layer"] = "post"
    # the norm of the base model after its last layer
    final_norm: str | None = None
    # a norm without bias between the stream and the values
    value_norm: str | None = None
    projections: Projections
    # None for a gated MLP, which multiplies two maps and has no Lipschitz constant
    mlp: MLPPaths | None = None
    # how `ablate` removes each part, and why it cannot remove others
    edits: dict[str, tuple[Edit, ...]]
    notes: dict[str, str] = field(default_factory=dict)
    # False where layers take (n, batch, d) and return a tuple
    batch_first: bool = True
    # the maps are the second output of the attention module, or the first input of its dropout
    maps: Literal["output", "dropout"] = "output"
    causal: Callable[[Any], bool] = lambda config: getattr(config, "is_decoder", False)
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
    # what the base model computes from its last states (batch, n, d) for heads that read one vector per text
    pool: Callable[[Any, torch.Tensor], torch.Tensor] = lambda base, states: base.pooler(states)
    # for conversion: the prefix of the classes of the rank twin, and a second attention module of each layer
    rank_twin: str | None = None
    cross_attention: str | None = None

    def cannot_remove(self, part: str) -> str:
        """Why `ablate` cannot remove a part, or an empty string where it can."""
        return "" if part in self.edits else self.notes.get(part, "this family has no such part")

    def pre_norm(self, layer: Any) -> bool:
        return layer.pre_norm if self.norm == "layer" else self.norm == "pre"
