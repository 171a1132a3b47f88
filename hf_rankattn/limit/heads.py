"""The projections of one attention module, and the attention function that applies them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..probe.interface import LIMIT, eager_function


# the attention implementation of modules within a limit
NAME = "rank_limit"
# the attribute of such a module for the config that it has outside of the limit
WHOLE = "rank_limit_whole_config"


class Widths(NamedTuple):
    """The numbers of heads and of key heads of an attention module, and the widths of its queries and values."""

    heads: int
    groups: int
    qk: int
    value: int


class HeadLimits(nn.Module):
    """Projections of the queries, keys and values of one attention module. What is None stays whole.

    Keys and values have one basis for each key head, which its group of query heads shares: `key` (groups, w, r) and `value`
    (groups, v, s). Each query head has its own `query` (heads, w, r), and its own `output` (heads, s, v), which maps what it
    has mixed back to the width that the output projection of the model reads. Where the key heads of a module have different
    ranks, the projections of the smaller ones end in zeros.
    """

    def __init__(
        self,
        widths: Widths,
        key_ranks: list[int],
        value_widths: list[int],
        keys: tuple[torch.Tensor, torch.Tensor] | None = None,
        values: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        super().__init__()
        self.widths, self.key_ranks, self.value_widths = widths, key_ranks, value_widths
        self.query, self.key = map(frozen, keys or (None, None))
        self.value, self.output = map(frozen, values or (None, None))
        # set by a cache, which gives keys and values that are projected already, until attention has read them
        self.cached = False

    def whole(self) -> "HeadLimits":
        """The same module without projections."""
        groups, qk, value = self.widths.groups, self.widths.qk, self.widths.value
        return HeadLimits(self.widths, [qk] * groups, [value] * groups)

    @property
    def trainable(self) -> bool:
        return any(weight.requires_grad for weight in self.parameters())

    def keys(self, key: torch.Tensor) -> torch.Tensor:
        """The directions (batch, groups, n, r) of keys (batch, groups, n, w) that are kept."""
        return key if self.key is None else key @ self.key.to(key)

    def values(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.value is None else value @ self.value.to(value)

    def narrow(self, module: nn.Module, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values within the limits; keys and values from a cache are so already."""
        if module.training and torch.is_grad_enabled() and not self.trainable:
            raise ValueError(
                "the model is in training mode within a rank limit, whose projections are not trained: call model.eval(), train "
                "the projections alone with limit.distil(...), or call limit.requires_grad_(True)."
            )
        cached, self.cached = self.cached, False
        if (query.shape[1], query.shape[-1]) != (self.widths.heads, self.widths.qk):
            raise ValueError(
                f"the limit is for {self.widths.heads} heads of width {self.widths.qk}, and {type(module).__name__} has "
                f"{query.shape[1]} of width {query.shape[-1]}: it was made for another model."
            )
        if not cached:
            key, value = self.keys(key), self.values(value)
        return (query if self.query is None else query @ self.query.to(query)), key, value

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixed values (batch, n, heads, s) at the width that the output projection reads."""
        if self.output is None:
            return mixed[..., : self.widths.value]
        return torch.einsum("bnhs,hsv->bnhv", mixed[..., : self.output.shape[1]], self.output.to(mixed))

    def packed(self, states: torch.Tensor, ranks: list[int]) -> torch.Tensor:
        """Keys or values (batch, groups, n, r) as a cache stores them: without the zeros, (batch, 1, n, sum of ranks)."""
        if len(set(ranks)) == 1:
            return states
        return torch.cat([states[:, group, :, :rank] for group, rank in enumerate(ranks)], dim=-1)[:, None]

    def unpacked(self, states: torch.Tensor, ranks: list[int]) -> torch.Tensor:
        if len(set(ranks)) == 1:
            return states
        parts = states[:, 0].split(ranks, dim=-1)
        return torch.stack([nn.functional.pad(part, (0, max(ranks) - part.shape[-1])) for part in parts], dim=1)


def frozen(weight: torch.Tensor | None) -> nn.Parameter | None:
    return (
        None
        if weight is None
        else nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
    )


def equally_wide(
    function: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Zeros behind narrower queries and keys, for attention functions that need them as wide as values."""
    missing = value.shape[-1] - key.shape[-1]
    if missing > 0 and "flash" in getattr(function, "__name__", ""):
        query, key = (nn.functional.pad(states, (0, missing)) for states in (query, key))
    return query, key, value


class Turns:
    """The limits of a module that several layers share, in the order in which these layers run."""

    def __init__(self, limits: list[Any]):
        self.limits, self.turn = limits, -1

    @property
    def now(self) -> Any:
        return self.limits[max(self.turn, 0)]

    def first(self, module, args) -> None:
        self.turn = -1

    def next(self, module, args) -> None:
        self.turn = (self.turn + 1) % len(self.limits)

    def narrow(self, *args):
        return self.now.narrow(*args)

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.now.expand(mixed)


def limited_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The attention of a module within a limit: the model's own function, on what the limit keeps."""
    limit = module.__dict__[LIMIT]
    limit = limit.now if isinstance(limit, Turns) else limit
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(limit, HeadLimits):  # it is fitted now
        limit = limit.see(module, query, key, value, attention_mask, scaling, kwargs)
    query, key, value = limit.narrow(module, query, key, value)
    function = attention_function(module, module.__dict__[WHOLE]._attn_implementation)
    states = equally_wide(function, query, key, value)
    mixed, maps = function(module, *states, attention_mask, scaling=scaling, **kwargs)
    return limit.expand(mixed), maps


def attention_function(module: nn.Module, name: str | None) -> Callable[..., Any]:
    """The attention function of this name; for eager attention, that of the file that defines the module."""
    return eager_function(module) if name in (None, "eager", "paged|eager") else ALL_ATTENTION_FUNCTIONS[name]


AttentionInterface.register(NAME, limited_attention)
