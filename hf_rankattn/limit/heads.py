"""The projections of one attention module, and the attention function that applies them."""

from collections.abc import Callable, Mapping
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
        # the keys that a `RankCache` returned last: they are projected already, and are recognised by their identity
        self.given: torch.Tensor | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is limited."""
        return self.query is None and self.value is None

    def fits(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether keys and values (batch, groups, n, width) are those of the module, and not projected or latents."""
        groups, widths = (key.shape[1], value.shape[1]), (key.shape[-1], value.shape[-1])
        return groups == (self.widths.groups,) * 2 and widths == (self.widths.qk, self.widths.value)

    @staticmethod
    def unlimited(widths: Widths) -> "HeadLimits":
        """What keeps everything."""
        return HeadLimits(widths, [widths.qk] * widths.groups, [widths.value] * widths.groups)

    def version(self) -> tuple[int, ...]:
        """Changes with the projections and with their values, which training changes in place."""
        return (id(self), *(weight._version for weight in self.parameters()))

    @property
    def trainable(self) -> bool:
        return any(weight.requires_grad for weight in self.parameters())

    def keys(self, key: torch.Tensor) -> torch.Tensor:
        """The directions (batch, groups, n, r) of keys (batch, groups, n, w) that are kept."""
        return mapped(key, self.key)

    def values(self, value: torch.Tensor) -> torch.Tensor:
        return mapped(value, self.value)

    def taken(self, module: nn.Module, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values within the limits; keys and values of a `RankCache` are as it stores them."""
        if not self.whole and module.training and torch.is_grad_enabled() and not self.trainable:
            raise ValueError(
                "the model is in training mode within a rank limit, whose projections are not trained: call model.eval(), train "
                "the projections alone with limit.distil(...), or call limit.requires_grad_(True)."
            )
        given, self.given = self.given, None
        if (query.shape[1], query.shape[-1]) != (self.widths.heads, self.widths.qk):
            raise ValueError(
                f"the limit is for {self.widths.heads} heads of width {self.widths.qk}, and {type(module).__name__} has "
                f"{query.shape[1]} of width {query.shape[-1]}: it was made for another model."
            )
        if given is None or key is not given:
            if not self.fits(key, value):
                raise ValueError(
                    f"{type(module).__name__} has {key.shape[1]} key heads of width {key.shape[-1]} with values of width "
                    f"{value.shape[-1]}, and its limit is for {self.widths.groups} of widths {self.widths.qk} and {self.widths.value}. If "
                    "a RankCache is used, it was made for another model, or the model changes what the cache returns, or reads another "
                    "layer's: make one for this model, or use a DynamicCache."
                )
            key, value = self.keys(key), self.values(value)
        return mapped(query, self.query), key, value

    def narrow(self, module: nn.Module, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same with keys and values (batch, groups, n, width), with zeros behind the smaller ranks."""
        query, key, value = self.taken(module, query, key, value)
        return query, self.unpacked(key, self.key_ranks), self.unpacked(value, self.value_widths)

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        """Mixed values (batch, n, heads, s) at the width that the output projection reads."""
        if self.output is None:
            return mixed[..., : self.widths.value].contiguous()
        return mapped(mixed[..., : self.output.shape[1]].transpose(1, 2), self.output).transpose(1, 2).contiguous()

    @property
    def uneven(self) -> bool:
        """Whether key heads have different widths."""
        return len(set(self.key_ranks)) > 1 or len(set(self.value_widths)) > 1

    def packed(self, states: torch.Tensor, ranks: list[int]) -> torch.Tensor:
        """Keys or values (batch, groups, n, r) as a cache stores them: uneven ones without zeros, (batch, 1, n, sum of ranks)."""
        if not self.uneven:
            return states
        return torch.cat([states[:, group, :, :rank] for group, rank in enumerate(ranks)], dim=-1)[:, None]

    def unpacked(self, states: torch.Tensor, ranks: list[int]) -> torch.Tensor:
        """What `packed` gave, with its zeros; other states are returned as they are."""
        if states.shape[1] == len(ranks):
            return states
        parts = states[:, 0].split(ranks, dim=-1)
        return torch.stack([nn.functional.pad(part, (0, max(ranks) - part.shape[-1])) for part in parts], dim=1)

    def of_one_token(self, query, key, value, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
        """The mixed values (batch, 1, heads, s) of one new token of each text; keys and values may be packed.

        The query heads of a group become the rows of one head, because torch would repeat the keys and values of the whole
        cache where it has a mask or two widths.
        """
        batch, heads, _, width = query.shape
        query = query.reshape(batch, self.widths.groups, -1, width)
        if key.shape[1] == self.widths.groups:
            return attended(query, key, value, mask, scaling).reshape(batch, 1, heads, -1)
        parts = zip(query.split(1, 1), key.split(self.key_ranks, -1), value.split(self.value_widths, -1), strict=True)
        mixed = [attended(asking[..., : own.shape[-1]], own, read, mask, scaling) for asking, own, read in parts]
        most = max(part.shape[-1] for part in mixed)
        padded = [nn.functional.pad(part, (0, most - part.shape[-1])) for part in mixed]
        return torch.cat(padded, dim=1).reshape(batch, 1, heads, most)


def attended(query, key, value, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """The mixed values of few queries and many keys, written out on the CPU, where that is faster than torch's kernels."""
    if query.device.type != "cpu" or query.dtype.itemsize < 4:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    logits = (query * scaling) @ key.mT
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ value


def mapped(states: torch.Tensor, maps: torch.Tensor | None) -> torch.Tensor:
    """States (batch, heads, n, w) times the matrix (w, r) of each head, of `maps` (heads, w, r); None changes nothing."""
    if maps is None:
        return states
    if len(states) == 1:
        return torch.bmm(states[0], maps.to(states))[None]
    return torch.einsum("bhnw,hwr->bhnr", states, maps.to(states))  # matmul would copy the maps for each text


def frozen(weight: torch.Tensor | None) -> nn.Parameter | None:
    return (
        None
        if weight is None
        else nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
    )


def equally_wide(
    name: str | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Zeros behind narrower queries and keys or values, for attention functions that need equal widths or are faster with them.

    torch's attention on the CPU has a fast kernel for equal widths alone.
    """
    width = max(key.shape[-1], value.shape[-1])
    if key.shape[-1] == value.shape[-1] or not (
        "flash" in (name or "") or (name == "sdpa" and query.device.type == "cpu")
    ):
        return query, key, value
    return tuple(nn.functional.pad(states, (0, width - states.shape[-1])) for states in (query, key, value))


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
    name = module.__dict__[WHOLE]._attn_implementation
    query, key, value = limit.taken(module, query, key, value)
    if not limit.whole and name == "sdpa" and query.shape[2] == 1 and is_plain(attention_mask, kwargs):
        return limit.expand(limit.of_one_token(query, key, value, attention_mask, scaling)), None
    states = query, limit.unpacked(key, limit.key_ranks), limit.unpacked(value, limit.value_widths)
    states = states if limit.whole else equally_wide(name, *states)
    mixed, maps = attention_function(module, name)(module, *states, attention_mask, scaling=scaling, **kwargs)
    return limit.expand(mixed), maps


def is_plain(mask: torch.Tensor | None, options: Mapping[str, Any]) -> bool:
    """Whether attention of one token is nothing but a softmax with a mask that all heads share."""
    special = [options.get(name) is not None for name in ("position_bias", "cache", "softcap", "s_aux")]
    return (
        not any(special) and not options.get("dropout") and (mask is None or (mask.ndim == 4 and mask.shape[1] == 1))
    )


def attention_function(module: nn.Module, name: str | None) -> Callable[..., Any]:
    """The attention function of this name; for eager attention, that of the file that defines the module."""
    return eager_function(module) if name in (None, "eager", "paged|eager") else ALL_ATTENTION_FUNCTIONS[name]


AttentionInterface.register(NAME, limited_attention)
