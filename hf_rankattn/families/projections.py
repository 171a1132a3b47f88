"""The query, key, value and output tensors of a layer, in the four layouts that models have."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


def submodule(root: nn.Module, path: str) -> Any:
    """The module or attribute at a dotted path, or None where a part of the model is switched off."""
    module: Any = root
    for name in path.split("."):
        module = getattr(module, name)
        if module is None:
            return None
    return module


def split_block(*paths: str) -> tuple[str, tuple[str, ...]]:
    """The path of the module that holds all `paths`, and the paths from there.

    >>> split_block("attention.self.query", "attention.output.dense")
    ('attention', ('self.query', 'output.dense'))
    """
    parts = [path.split(".") for path in paths]
    shared = 0
    while len({tuple(part[: shared + 1]) for part in parts}) == 1 < min(len(part) - shared for part in parts):
        shared += 1
    return ".".join(parts[0][:shared]), tuple(".".join(part[shared:]) for part in parts)


class Values(NamedTuple):
    """How a layer reads and writes: (groups * v, hidden) and (hidden, heads * v) as in `y = x W^T + b`, with biases."""

    value: torch.Tensor
    value_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None


QueryKey = tuple[torch.Tensor, torch.Tensor]  # W_Q and W_K of every head, each (heads, hidden, width)


@dataclass(frozen=True)
class LinearProjections:
    """Four linear modules, by their paths from the layer. Grouped keys are repeated for the queries that share them."""

    query: str
    key: str
    value: str
    output: str
    # an attribute: a factor on the heads before the output projection
    output_scale: str | None = None

    def block(self) -> tuple[str, tuple[str, ...]]:
        return split_block(self.query, self.key, self.value, self.output)

    def query_key(self, layer: nn.Module, config: Any) -> QueryKey:
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        queries = submodule(layer, self.query).weight.unflatten(0, (heads, -1)).transpose(1, 2)
        keys = submodule(layer, self.key).weight.unflatten(0, (groups, -1)).transpose(1, 2)
        return queries, keys.repeat_interleave(heads // groups, dim=0)

    def values(self, layer: nn.Module) -> Values:
        value, output = submodule(layer, self.value), submodule(layer, self.output)
        scale = 1 if self.output_scale is None else submodule(layer, self.output_scale)
        return Values(value.weight, value.bias, output.weight if scale == 1 else output.weight * scale, output.bias)


@dataclass(frozen=True)
class FusedProjections:
    """GPT-2: queries, keys and values side by side in one matrix, (hidden, heads * (2 qk_rank + v_head_dim))."""

    fused: str
    output: str

    def block(self) -> tuple[str, tuple[str, ...]]:
        return split_block(self.fused, self.output)

    def widths(self, layer: nn.Module) -> list[int]:
        """The columns of all queries, keys and values; the output has a row for each column of the values."""
        values = submodule(layer, self.output).weight.shape[0]
        query = (submodule(layer, self.fused).weight.shape[1] - values) // 2
        return [query, query, values]

    def query_key(self, layer: nn.Module, config: Any) -> QueryKey:
        query, key, _ = submodule(layer, self.fused).weight.split(self.widths(layer), dim=1)
        query, key = (x.unflatten(1, (config.num_attention_heads, -1)).transpose(0, 1) for x in (query, key))
        return query, key

    def values(self, layer: nn.Module) -> Values:
        fused, output, widths = submodule(layer, self.fused), submodule(layer, self.output), self.widths(layer)
        return Values(
            fused.weight.split(widths, dim=1)[2].t(), fused.bias.split(widths)[2], output.weight.t(), output.bias
        )


@dataclass(frozen=True)
class RelativeProjections:
    """XLNet: parameters (hidden, heads, width) of the attention module, without biases; no module is the output."""

    attention: str
    output: None = None

    def block(self) -> tuple[str, tuple[str, ...]]:
        return self.attention, ()

    def query_key(self, layer: nn.Module, config: Any) -> QueryKey:
        attention = submodule(layer, self.attention)
        return attention.q.transpose(0, 1), attention.k.transpose(0, 1)

    def values(self, layer: nn.Module) -> Values:
        attention = submodule(layer, self.attention)
        return Values(attention.v.flatten(1).t(), None, attention.o.flatten(1), None)


@dataclass(frozen=True)
class LatentProjections:
    """DeepSeek: queries, keys and values through latents; the gains of the norms between are part of the weights."""

    attention: str
    output: str

    def block(self) -> tuple[str, tuple[str, ...]]:
        return self.attention, ()

    def query_key(self, layer: nn.Module, config: Any) -> QueryKey:
        attention = submodule(layer, self.attention)
        heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        if attention.q_lora_rank is None:
            queries = attention.q_proj.weight
        else:
            queries = (attention.q_b_proj.weight * attention.q_a_layernorm.weight) @ attention.q_a_proj.weight
        down = attention.kv_a_proj_with_mqa.weight
        up = attention.kv_b_proj.weight.unflatten(0, (heads, -1))[:, :nope] * attention.kv_a_layernorm.weight
        rotary = down[latent:].expand(heads, -1, -1)
        keys = torch.cat([up @ down[:latent], rotary], dim=1)
        return queries.unflatten(0, (heads, -1)).transpose(1, 2), keys.transpose(1, 2)

    def values(self, layer: nn.Module) -> Values:
        attention, output = submodule(layer, self.attention), submodule(layer, self.output)
        latent = attention.kv_lora_rank
        up = attention.kv_b_proj.weight.unflatten(0, (attention.num_heads, -1))[:, attention.qk_nope_head_dim :]
        up = up.flatten(0, 1) * attention.kv_a_layernorm.weight
        down = attention.kv_a_proj_with_mqa
        bias = None if down.bias is None else up @ down.bias[:latent]
        return Values(up @ down.weight[:latent], bias, output.weight, output.bias)


Projections = LinearProjections | FusedProjections | RelativeProjections | LatentProjections


def unit_norm(states: torch.Tensor) -> torch.Tensor:
    """Rows of length one as `qk_norm` computes them, in float32 at least."""
    wide = states if states.dtype == torch.float64 else states.float()
    return nn.functional.normalize(wide, dim=-1).to(states.dtype)


def show_relative(attention: Any, record: Callable, stack: ExitStack) -> None:
    """XLNet's attention does not use the attention interface. Its content term is `q + r_w_bias` against k, both
    (n, batch, heads, r)."""
    core = attention.rel_attn_core
    normed = getattr(attention, "log_temperature", None) is not None
    shown = False

    def enter(*_):
        nonlocal shown
        shown = False

    def rel_attn_core(q_head, k_head_h, *args, **kwargs):
        nonlocal shown
        if not shown:  # the second stream reads the keys of the first
            shown = True
            query, key = (unit_norm(q_head), unit_norm(k_head_h)) if normed else (q_head, k_head_h)
            query = (query + attention.r_w_bias).permute(1, 2, 0, 3)
            record(query * attention.scale, key.permute(1, 2, 0, 3))
        return core(q_head, k_head_h, *args, **kwargs)

    stack.callback(attention.register_forward_pre_hook(enter).remove)
    attention.rel_attn_core = rel_attn_core
    stack.callback(delattr, attention, "rel_attn_core")


def show_projected(attention: Any, record: Callable, stack: ExitStack) -> None:
    """RankEncoder's fused and hard attention do not use the attention interface: queries and keys are computed again."""

    def show(module, args, kwargs):
        states = args[0] if args else kwargs["hidden_states"]
        query, key = (
            projection(states).unflatten(-1, (module.num_attention_heads, module.qk_rank)).transpose(1, 2)
            for projection in (module.query, module.key)
        )
        if module.log_temperature is not None:
            temperature = module.log_temperature.exp()[:, None, None].to(query.dtype)
            query, key = unit_norm(query) * temperature, unit_norm(key)
        record(query * module.scaling, key)

    stack.callback(attention.register_forward_pre_hook(show, with_kwargs=True).remove)
