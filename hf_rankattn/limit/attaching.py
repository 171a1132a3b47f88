"""Attention modules within limits: how they are entered and left, and the pass in which limits are fitted."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..families.architectures import attending_layers, attention_of, base_of, family_of, layers_of
from ..families.structure import choosing_tower
from ..files.running import evaluating
from ..probe.batches import run
from ..probe.interface import LIMIT
from .fitting import Seen
from .heads import NAME, WHOLE, HeadLimits, Turns


class Fitting:
    """Stands in the place of a layer's limits during the calibration: it fits them when the layer calls its attention."""

    def __init__(
        self, place: int, fit: Callable[[int, Seen], HeadLimits], real: torch.Tensor | None, applied: bool = True
    ):
        self.place, self.fit, self.real, self.applied = place, fit, real, applied
        self.limit: HeadLimits | None = None

    def see(
        self, module: nn.Module, query, key, value, mask, scaling: float, options: Mapping[str, Any]
    ) -> HeadLimits:
        if self.limit is not None:
            raise ValueError(
                f"{type(module).__name__} calls its attention more than once for one layer: its rank cannot be limited."
            )
        seen = Seen.of_call(module, query, key, value, mask, scaling, options, self.real)
        self.tokens = int(seen.real.sum())
        self.limit = self.fit(self.place, seen)
        return self.limit if self.applied else HeadLimits.unlimited(self.limit.widths)


def run_within(model: PreTrainedModel, limits: Sequence[Any], batch: Mapping[str, torch.Tensor], tower) -> None:
    """One forward pass in which every layer is fitted and then limited."""
    stack = entered(model, limits, tower)
    try:
        with evaluating(base_of(model)):
            run(model, batch)
    finally:
        stack.close()
    for fitting, number in zip(limits, attending_layers(model), strict=True):
        if fitting.limit is None:
            attention = attention_of(model, layers_of(model)[number])
            raise ValueError(
                f"layer {number} ({type(attention).__name__}) did not call transformers' attention interface on the calibration batch, so "
                "its rank cannot be limited."
            )


def entered(model: PreTrainedModel, limits: Sequence[Any], tower: str | None = None) -> ExitStack:
    """Lets the attention of each layer run within its limits until the stack is closed."""
    if family_of(model).show_query_key is not None:  # XLNet, and RankEncoder unless it is eager
        if not model._supports_attention_backend:
            raise ValueError(
                f"{type(model).__name__} computes its attention itself, without transformers' attention interface: its rank cannot be "
                "limited. Use convert_rank, or train it with another `qk_rank`."
            )
        if model.config._attn_implementation != "eager":
            raise ValueError(
                f"{type(model).__name__} has a fused attention of its own beside transformers' attention interface: call "
                "model.set_attn_implementation('eager') before its rank is limited."
            )
    with choosing_tower(tower):
        base, layers, numbers = base_of(model), layers_of(model), attending_layers(model)
        attentions = {number: attention_of(model, layers[number]) for number in numbers}
    if len(numbers) != len(limits):
        raise ValueError(f"the limit is for {len(limits)} layers with attention, and the model has {len(numbers)}.")
    by_module: dict[nn.Module, list[Any]] = {}
    for number, limit in zip(numbers, limits, strict=True):
        by_module.setdefault(attentions[number], []).append(limit)
    with ExitStack() as stack:
        for attention, own in by_module.items():
            limit = own[0] if len(own) == 1 else Turns(own)
            if isinstance(limit, Turns):
                stack.callback(base.register_forward_pre_hook(limit.first).remove)
                stack.callback(attention.register_forward_pre_hook(limit.next).remove)
            put(attention, limit, stack)
        return stack.pop_all()


def put(attention: nn.Module, limit: Any, stack: ExitStack) -> None:
    """Give the modules of one attention a config of their own, which names the limited attention function."""
    modules: list[Any] = [
        module for module in attention.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    if not modules:
        raise ValueError(
            f"{type(attention).__name__} has no config, so it does not use transformers' attention interface: its rank cannot be limited."
        )
    for module in modules:
        if LIMIT in module.__dict__:
            raise ValueError(
                "the model is within a rank limit already, and limits do not nest: call remove() on what limit_rank returned, or leave its block."
            )
        whole = module.config
        # a copy, so that masks and other modules still follow the config of the model
        limited = copy.copy(whole)
        limited._attn_implementation_internal = NAME
        stack.callback(restore, module, whole)
        module.__dict__[LIMIT], module.__dict__[WHOLE] = limit, whole
        module.config = limited


def restore(module: Any, whole: PreTrainedConfig) -> None:
    module.config = whole
    module.__dict__.pop(LIMIT, None)
    module.__dict__.pop(WHOLE, None)
