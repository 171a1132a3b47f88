"""What attention modules give to and get from transformers' attention interface, shown to a probe while the model runs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..families.architectures import attention_of, family_of, layers_of
from ..families.stream import states_of, tensors_in


NAME = "rankattn"
# the attribute of an attention module within a rank limit; it stands in `__dict__`, so that the module has no new parameters
LIMIT = "rank_limit"


class Attended(NamedTuple):
    """One call of the interface, with queries (batch, heads, n, r), keys (batch, groups, n, r), values, and under eager
    attention the maps (batch, heads, n, n)."""

    module: nn.Module
    query: Any
    key: Any
    value: Any
    scale: float
    maps: torch.Tensor | None
    mask: torch.Tensor | None
    options: dict[str, Any]

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys (batch, heads, n, r) whose products are the logits; grouped keys are repeated."""
        if self.query is None:
            raise ValueError(
                f"{type(self.module).__name__} does not use transformers' attention interface: its maps can be measured, its "
                "queries and keys cannot."
            )
        return self.query * self.scale, self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], dim=1)

    def check_maps(self, layer: int) -> None:
        """Refuse maps that are not the softmax of these queries and keys under the mask."""
        query, key = self.factors()
        if query.shape[1] != key.shape[1] or query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"the queries and keys of layer {layer} differ in heads or widths: its logits cannot be measured."
            )
        logits = query @ key.mT
        if cap := self.options.get("softcap"):
            logits = torch.tanh(logits / cap) * cap
        if self.mask is not None:
            logits = logits + self.mask[..., : logits.shape[-1]]
        maps = logits.softmax(-1, dtype=torch.float32)
        found = None if self.maps is None or self.maps.shape != maps.shape else self.maps
        # the weight of a row that is elsewhere: single entries of long rows are small themselves
        allowed = 1e-2 if found is not None and found.dtype in (torch.float32, torch.float64) else 5e-2
        if found is None or not bool(((maps - found.float()).abs().sum(-1) < allowed).all()):
            raise ValueError(
                f"the maps of layer {layer} are not the softmax of its queries and keys: {type(self.module).__name__} adds a "
                "position bias or a sink to the logits. Its maps can be measured, its logits cannot."
            )


class Shown(NamedTuple):
    """Who looks on, and may return another output, and the implementation that computes attention."""

    look: Callable[[Attended], torch.Tensor | None]
    implementation: str


Look = Callable[[int, Attended], torch.Tensor | None]
PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum"}


class Maps(TorchFunctionMode):
    """Sees what attention modules multiply their values with that do not call the interface: results of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        weights = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if hasattr(tensor, "_is_map")]
        if name in PRODUCTS and weights:
            self.found.append(weights[0])
        elif name == "softmax" or weights:
            for tensor in tensors_in(result):
                if tensor.ndim >= 3:
                    tensor._is_map = True  # type: ignore[attr-defined]
        return result


_shown: ContextVar[Shown] = ContextVar("shown")


def eager_function(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of the file that defines the module."""
    for owner in type(module).__mro__:
        if function := getattr(sys.modules[owner.__module__], "eager_attention_forward", None):
            return function
    raise ValueError(f"{type(module).__name__} has no eager attention, which returns maps: they cannot be measured.")


def shown_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    look, implementation = _shown.get()
    output = maps = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    limit = module.__dict__.get(LIMIT)
    if limit is not None and implementation != "none":
        query, key, value = limit.narrow(module, query, key, value)
        scaling = scale
    if implementation != "none":
        function = eager_function(module) if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        try:
            output, maps = function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        except RuntimeError as error:
            if implementation != "eager":
                raise
            raise ValueError(
                f"the eager attention of {type(module).__name__}, which returns maps, fails: {error}"
            ) from error
    if limit is not None and output is not None:
        output = limit.expand(output)
    replaced = look(Attended(module, query, key, value, scale, maps, attention_mask, kwargs))
    if replaced is None and implementation == "none":  # the attention of another tower, or to another one
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output, maps = function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return output if replaced is None else replaced, maps


def shown_mask(*args, **kwargs):
    name = _shown.get().implementation
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa" if name == "none" else name](*args, **kwargs)


AttentionInterface.register(NAME, shown_attention)
# an attention function without a registered mask function gets no mask, and would attend to padding
AttentionMaskInterface.register(NAME, shown_mask)


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that the modules of a model read, those of its towers included."""
    found = [getattr(module, "config", None) for module in model.modules()]
    unique = {id(config): config for config in [model.config, *found] if isinstance(config, PreTrainedConfig)}
    return list(unique.values())


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention implementation inside a block.

    It is set in the configs, because `set_attn_implementation` refuses classes without source, such as those of a notebook. A
    module within a rank limit keeps the attention of the limit, which runs the implementation of the model.
    """
    limited = {id(module.config) for module in model.modules() if LIMIT in module.__dict__} if name != NAME else set()
    configs = [config for config in configs_of(model) if id(config) not in limited]
    before = [(config, config._attn_implementation) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, old in before:
            config._attn_implementation = old


@contextmanager
def showing(model: PreTrainedModel, look: Callable[[Attended], torch.Tensor | None], name: str) -> Iterator[None]:
    """Within the block, attention is computed as under the implementation `name`, and `look` is called with every call.

    Under the name `"none"` it is not computed, and `look` returns what takes its place.
    """
    with implementation(model, NAME):
        token = _shown.set(Shown(look, name))
        try:
            yield
        finally:
            _shown.reset(token)


class LayerWatch:
    """Passes on the self-attention of the layers of a model, with the number of the layer, in the order in which they run."""

    def __init__(self, model: PreTrainedModel, look: Look, stack: ExitStack):
        self.look, self.layer, self.running, self.seen = look, -1, False, 0
        # the maps of modules that do not call the interface are wanted under eager attention alone
        self.maps: Maps | None = None
        stack.callback(self.leave_attention, None, None, None)  # Ctrl-C leaves a module without its hooks
        layers = dict.fromkeys(layers_of(model))
        attentions = {layer: attention_of(model, layer) for layer in layers}
        self.own = {
            module for attention in attentions.values() if attention is not None for module in attention.modules()
        }
        for layer in layers:
            attention = attentions[layer]
            stack.callback(layer.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(self.leave_layer(attention)).remove)
            if attention is not None and not family_of(model).layers:
                stack.callback(attention.register_forward_pre_hook(self.enter_attention).remove)
                stack.callback(attention.register_forward_hook(self.leave_attention, always_call=True).remove)

    def enter(self, module, args, kwargs) -> None:
        if self.running:
            raise ValueError(
                f"layer {self.layer} runs another layer inside: only layers that run one after the other are measured."
            )
        self.layer, self.running, self.seen = self.layer + 1, True, 0
        self.found: list[torch.Tensor] = []
        states = states_of(args, kwargs)
        self.examples, self.tokens = (1 if states.ndim == 2 else len(states)), states.shape[-2]

    def enter_attention(self, module, args) -> None:
        self.maps = Maps()
        self.maps.__enter__()

    def leave_attention(self, module, args, output) -> None:
        if (maps := self.maps) is not None:
            self.maps = None
            maps.__exit__(None, None, None)
            self.found += maps.found

    def leave_layer(self, attention: nn.Module | None) -> Callable[..., None]:
        def leave(module, args, output) -> None:
            self.running, name = False, _shown.get().implementation
            if attention is not None and self.seen == 0 and len(self.found) == 1 and name == "eager":
                maps = self.found[0]
                if maps.ndim == 3 and len(maps) % self.examples == 0:  # (batch * heads, n, n)
                    maps = maps.unflatten(0, (self.examples, -1))
                self.check_size(attention, maps)
                self.look(self.layer, Attended(attention, None, None, None, 1.0, maps, None, {}))
                self.seen = 1
            self.found = []
            if self.seen == 0 and name == "none":  # attention that is not computed has other marks
                return
            if self.seen != (attention is not None):
                raise ValueError(
                    f"layer {self.layer} ({type(module).__name__}) called the attention interface {self.seen} times for its own "
                    f"tokens, and {int(attention is not None)} was expected: its attention cannot be measured."
                )

        return leave

    def check_size(self, attention: nn.Module, rows: torch.Tensor) -> None:
        """Refuse attention within windows, whose rows are not those of an example; `rows` are (batch, heads, n, ...)."""
        if rows.ndim != 4 or len(rows) != self.examples:
            raise ValueError(
                f"{type(attention).__name__} in layer {self.layer} attends in parts {tuple(rows.shape)}, and the batch has "
                f"{self.examples} examples: attention within windows is not measured."
            )

    def __call__(self, attended: Attended) -> torch.Tensor | None:
        if not self.running or attended.module not in self.own:
            return None
        self.check_size(attended.module, attended.query)
        self.seen += 1
        return self.look(self.layer, attended)


@contextmanager
def showing_layers(model: PreTrainedModel, look: Look, name: str) -> Iterator[None]:
    """[`showing`] for the self-attention of the layers alone: `look` is called with the number of the layer."""
    with ExitStack() as stack:
        stack.enter_context(showing(model, LayerWatch(model, look, stack), name))
        yield
