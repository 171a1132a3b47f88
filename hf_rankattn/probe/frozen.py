"""A model on one batch with its maps and norm scales frozen: a chain of sublayers that are linear in the stream."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ..families.architectures import attention_of, base_of, family_of, layers_of, listed
from ..families.projections import Projections, Values, submodule
from ..families.row import Family
from ..files.running import evaluating
from ..measure.norms import working
from ..models.rank_encoder.modeling_rank_encoder import L2Norm
from .ablate import first
from .batches import plain_output
from .interface import LIMIT, implementation
from .weights import present


@dataclass(frozen=True)
class FrozenNorm:
    """A norm with frozen scales, one per token: (x - mean) * inverse * gain + bias, which is affine in x."""

    inverse: torch.Tensor
    center: bool
    gain: torch.Tensor | None
    bias: torch.Tensor | None

    def apply_(self, states: torch.Tensor) -> torch.Tensor:
        """The linear part, in place."""
        if self.center:
            states.sub_(states.mean(-1, keepdim=True))
        states.mul_(self.inverse)
        return states if self.gain is None else states.mul_(self.gain)


def freeze_norm(module: nn.Module | None, before: torch.Tensor, after: torch.Tensor) -> FrozenNorm | None:
    """The norm that maps `before` (batch, n, d) to `after`; None where it did nothing or was removed."""
    if module is None or before is after or torch.equal(before, after):
        return None
    return norm_on(module, before)


def norm_on(module: nn.Module, before: torch.Tensor) -> FrozenNorm:
    """A norm with the scales that it has on states (batch, n, d)."""
    states = working(before)
    with present(module):  # offloaded weights are gone after the norm has run
        learned = (getattr(module, name, None) for name in ("weight", "bias", "scale"))
        gain, bias, scale = (None if value is None else working(value.detach()) for value in learned)
    if isinstance(module, L2Norm):
        inverse = torch.rsqrt(states.square().sum(-1, keepdim=True) + module.eps**2)
        return FrozenNorm(inverse, False, scale, None)
    if isinstance(module, nn.LayerNorm):
        variance = states.var(-1, keepdim=True, correction=0)
        return FrozenNorm(torch.rsqrt(variance + module.eps), True, gain, bias)
    if "RMSNorm" in type(module).__name__:
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        epsilon = torch.finfo(before.dtype).eps if epsilon is None else epsilon
        return FrozenNorm(torch.rsqrt(states.square().mean(-1, keepdim=True) + epsilon), False, gain, None)
    raise ValueError(f"a {type(module).__name__} cannot be frozen: only LayerNorm, RMSNorm and L2Norm can.")


@dataclass(frozen=True)
class FrozenStep:
    """One sublayer. States x (batch, n, d) become `norm(skip * x + update) + source`, with a frozen norm."""

    name: str
    skip: bool
    norm: FrozenNorm | None
    source: torch.Tensor | None

    def carry_(self, states: torch.Tensor) -> torch.Tensor:
        """The linear part of what follows the sum, in place."""
        return states if self.norm is None else self.norm.apply_(states)


@dataclass(frozen=True)
class FrozenAttention(FrozenStep):
    """A sublayer of attention; its update is `sum_h P_h scale (before x) W_h`, with one scale per token."""

    maps: torch.Tensor
    values: Values
    before: FrozenNorm | None
    scale: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        return self.maps.shape[1]

    def context(self, states: torch.Tensor) -> torch.Tensor:
        """`P_h x W_V,h` of all heads, (batch, heads, n, v)."""
        if self.before is not None:
            states = self.before.apply_(states.clone())
        width = self.values.output.shape[1] // self.heads
        value = linear(states, self.values.value)
        value = (value if self.scale is None else value * self.scale).unflatten(-1, (-1, width)).transpose(1, 2)
        if value.shape[1] != self.heads:
            value = value.repeat_interleave(self.heads // value.shape[1], dim=1)
        return self.maps @ value

    def attend(self, states: torch.Tensor) -> torch.Tensor:
        """The sum of all heads, without biases."""
        return linear(self.context(states).transpose(1, 2).flatten(2), self.values.output)

    def attend_heads(self, states: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """The output of each head, (heads, batch, n, d)."""
        output = self.values.output.unflatten(1, (self.heads, -1))[:, heads]
        return torch.einsum("bhnv,dhv->hbnd", self.context(states)[:, heads], output)


class Walker(Protocol):
    """Follows the stream through a frozen model, sublayer by sublayer, while the model runs."""

    def start(self, states: torch.Tensor) -> None: ...

    def step(self, step: FrozenStep, stream: torch.Tensor) -> None:
        """`stream` is the actual input of the sublayer."""


def constant_row(
    values: Values, maps: torch.Tensor, before: FrozenNorm | None, scale: torch.Tensor | None
) -> torch.Tensor | None:
    """What attention adds for any input: a map keeps a row that all tokens share, because its rows sum to one."""
    bias, heads = values.value_bias, maps.shape[1]
    if before is not None and before.bias is not None:
        shared = linear(before.bias, values.value)
        bias = shared if bias is None else bias + shared
    if bias is None:
        return None if values.output_bias is None else values.output_bias.expand(len(maps), maps.shape[2], -1).clone()
    output = values.output.unflatten(1, (heads, -1))
    bias = bias.unflatten(0, (-1, output.shape[-1]))
    rows = torch.einsum("hv,dhv->hd", bias.repeat_interleave(heads // len(bias), dim=0), output)
    # row sums are one up to rounding; using them makes the sum of all paths equal to the output to the last digits
    passed = maps.sum(-1) if scale is None else (maps @ scale[:, None]).squeeze(-1)
    constant = passed.transpose(1, 2) @ rows
    return constant if values.output_bias is None else constant.add_(values.output_bias)


def read_values(layer: nn.Module, projections: Projections) -> Values:
    with present(layer):
        values = projections.values(layer)
    if any(value is not None and not value.is_floating_point() for value in values):
        raise ValueError(
            f"the weights of {type(layer).__name__} are quantised, and packed integers cannot be applied to a part of "
            "the stream. Use the model before it was quantised, or model.dequantize()."
        )
    return Values(*(None if value is None else working(value.detach()) for value in values))  # type: ignore[arg-type]


def decomposable(model: PreTrainedModel) -> Family:
    """The row of a model that can be decomposed into paths, or a `ValueError` with the reason why it cannot."""
    family = listed(model, "paths and bounds")
    if getattr(model.config, "chunk_size_feed_forward", 0):
        raise ValueError("set config.chunk_size_feed_forward to 0 first: the MLP of a layer must run as a whole.")
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError("cross-attention reads another stream: only models without it can be decomposed into paths.")
    if any(LIMIT in module.__dict__ for module in model.modules()):
        raise ValueError(
            "the model is within a rank limit, which does not change its weights, and paths are computed from the weights: call remove() on the limit, or "
            "use limit.paused()."
        )
    return family


class Recorder:
    """Hooks that call a walker with each sublayer after it has run, and keep nothing else."""

    def __init__(self, model: PreTrainedModel, walker: Walker, stack: ExitStack):
        self.family, self.walker, self.layer = family_of(model), walker, -1
        self.seen: dict[str, torch.Tensor] = {}
        rows = self.family
        for layer in dict.fromkeys(layers_of(model)):
            self.watch(layer, rows.attended, "attended", stack)
            attention = attention_of(model, layer)
            if rows.maps == "dropout":
                stack.callback(attention.dropout.register_forward_pre_hook(self.drop).remove)
            else:
                stack.callback(attention.register_forward_hook(self.attend_in(layer)).remove)
            self.watch(layer, rows.updated, "updated", stack)
            if rows.value_norm is not None:
                inside = submodule(layer, rows.value_norm)
                stack.callback(inside.register_forward_pre_hook(self.enter_values).remove)
            norms = {rows.attention_norm: self.leave_attention_norm, rows.mlp_norm: self.leave_mlp_norm}
            for path, leave in norms.items():
                if (norm := submodule(layer, path)) is not None:
                    stack.callback(norm.register_forward_hook(self.in_layer(leave, layer)).remove)
            stack.callback(layer.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(self.leave).remove)
        last = rows.final_norm and submodule(base_of(model), rows.final_norm)
        if last:
            stack.callback(last.register_forward_hook(self.finish).remove)

    def watch(self, layer: nn.Module, path: str, name: str, stack: ExitStack) -> None:
        def remember(module, args, output) -> None:
            self.seen[name] = first(output)

        if (module := submodule(layer, path)) is not None:
            stack.callback(module.register_forward_hook(remember).remove)

    @staticmethod
    def in_layer(leave: Callable, layer: nn.Module) -> Callable:
        return lambda module, args, output: leave(layer, module, args[0], output)

    def states(self, states: torch.Tensor) -> torch.Tensor:
        return working(states if self.family.batch_first else states.transpose(0, 1))

    def enter(self, module, args, kwargs) -> None:
        self.layer += 1
        self.seen.clear()
        self.seen["stream"] = args[0] if args else kwargs["hidden_states"]
        if self.layer == 0:
            self.walker.start(self.states(self.seen["stream"]))

    def attend_in(self, layer: nn.Module) -> Callable:
        def attend(module, args, output) -> None:
            if output[1] is None:
                raise ValueError(
                    f"{type(module).__name__} returned no maps under eager attention, so its paths are unknown."
                )
            self.seen["maps"] = output[1]
            if "late" in self.seen:
                norm = submodule(layer, self.family.attention_norm)
                self.attention(layer, norm, self.seen.pop("late"), output[0])

        return attend

    def drop(self, module, args) -> None:
        # XLNet's attention calls its dropout with the maps first, and then with its output
        self.seen.setdefault("maps", args[0])

    def enter_values(self, module, args) -> None:
        self.seen["scale"] = norm_on(module, args[0]).inverse

    def leave_attention_norm(self, layer, norm, before, after) -> None:
        if self.family.pre_norm(layer):
            self.seen["before"], self.seen["normed"] = before, after
        elif "maps" in self.seen:
            self.attention(layer, norm, before, after)
        else:  # ALBERT's norm is a part of its attention, whose maps are returned later
            self.seen["late"] = before

    def leave_mlp_norm(self, layer, norm, before, after) -> None:
        if self.family.pre_norm(layer):
            self.attention(layer, None, before, before)
        else:
            self.seen["sum"], self.seen["after"] = before, after

    def attention(self, layer, norm, total, after) -> None:
        """The step of attention, when the sum `total` and, in post-norm, its norm are known."""
        seen, pre_norm = self.seen, self.family.pre_norm(layer)
        maps = working(seen.pop("maps"))
        attended, total, after = (self.states(x) for x in (seen.pop("attended"), total, after))
        values = read_values(layer, self.family.projections)
        before = None
        if pre_norm:
            module = submodule(layer, self.family.attention_norm)
            before = freeze_norm(module, self.states(seen.pop("before")), self.states(seen.pop("normed")))
        frozen = freeze_norm(norm, total, after)
        scale = seen.pop("scale", None)
        source = finished(constant_row(values, maps, before, scale), frozen)
        # without a skip the sum is equal to the update, to the last bit
        skip = not torch.equal(total, attended)
        stream = self.states(seen.pop("stream"))
        step = FrozenAttention(f"attention.{self.layer}", skip, frozen, source, maps, values, before, scale)
        self.walker.step(step, stream)
        seen["middle"] = total if pre_norm else after

    def leave(self, layer, args, output) -> None:
        seen, states, pre_norm = self.seen, first(output), self.family.pre_norm(layer)
        if "middle" not in seen:  # pre-norm without an MLP: the layer returns the sum
            self.attention(layer, None, states, states)
        states, middle = self.states(states), seen["middle"]
        if not torch.equal(states, middle):  # else the MLP is switched off or removed
            norm = None if pre_norm else submodule(layer, self.family.mlp_norm)
            total = states if pre_norm else self.states(seen["sum"])
            after = states if pre_norm else self.states(seen["after"])
            # a removed MLP has the output of one token; only NaN can make the states differ then
            updated, frozen = self.states(seen["updated"]).expand_as(total), freeze_norm(norm, total, after)
            skip = not torch.equal(total, updated)
            step = FrozenStep(f"mlp.{self.layer}", skip, frozen, finished(updated.clone(), frozen))
            self.walker.step(step, middle)
        seen.clear()

    def finish(self, module, args, output) -> None:
        before, after = self.states(args[0]), self.states(output)
        frozen = freeze_norm(module, before, after)
        if frozen is not None:
            source = None if frozen.bias is None else frozen.bias.expand_as(before).clone()
            self.walker.step(FrozenStep("norm", True, frozen, source), before)


def finished(source: torch.Tensor | None, norm: FrozenNorm | None) -> torch.Tensor | None:
    """A source after the norm, with the bias of the norm; changes its argument."""
    if norm is None:
        return source
    if source is None:
        return None if norm.bias is None else norm.bias.expand(*norm.inverse.shape[:-1], -1).clone()
    norm.apply_(source)
    return source if norm.bias is None else source.add_(norm.bias)


def walk(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], walker: Walker) -> Any:
    """Run the base model on a batch, calling the walker for each sublayer; returns the output of the base model."""
    decomposable(model)
    if foreign := sorted({"target_mapping", "perm_mask", "mems", "past_key_values"} & set(batch)):
        raise ValueError(f"paths go through one stream, from its first layer: leave out {', '.join(foreign)}.")
    if "input_ids" in batch and batch["input_ids"].ndim != 2:
        raise ValueError(f"`input_ids` must be (batch, n), got {tuple(batch['input_ids'].shape)}.")
    base = base_of(model)
    with evaluating(base), implementation(model, "eager"), ExitStack() as stack:
        Recorder(model, walker, stack)
        return base(**batch, **plain_output(base))
