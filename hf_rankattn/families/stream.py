"""The residual stream of a layer, followed while the layer runs: which sums add attention, and which add an MLP.

Layers add to the stream in their own code, in many arrangements: norms before, after or around each part, attention and MLP in
sequence or side by side, updates that are scaled. `ResidualStream` sees every function that torch calls inside a layer. It marks
the input of the layer as the stream, and each result by what it was computed from. A sum of the stream and an update is a
residual sum; there a skip or an update is left out, before anything is computed. Nothing is subtracted, and a layer without
removed parts runs its own code on its own tensors.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from .structure import attends


Kind = Literal["stream", "normed", "map", "attention", "cross-attention", "mlp", "both"]
STREAM: tuple[Kind, ...] = ("stream", "normed")
UPDATES: tuple[Kind, ...] = ("attention", "cross-attention", "mlp", "both")

ADDITIONS = {"add", "add_", "__add__", "__iadd__", "__radd__"}
PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum", "baddbmm"}
SCALINGS = {"mul", "multiply", "mul_", "__mul__", "__imul__", "__rmul__", "div", "__truediv__"}
NORMS = {"layer_norm", "rms_norm"}
# functions whose result is their first argument in another shape, place or type; dropout is off while a model is measured
UNCHANGED = {
    *(
        "alias",
        "bfloat16",
        "clamp",  # T5 in float16
        "clone",
        "contiguous",
        "detach",
        "double",
        "dropout",
        "feature_dropout",
        "flatten",
        "float",
    ),
    *("half", "movedim", "permute", "reshape", "reshape_as", "squeeze", "swapaxes", "t", "to", "transpose", "type"),
    *("type_as", "unflatten", "unsqueeze", "view", "view_as"),
}


class Mark(NamedTuple):
    """What a tensor inside a layer is, and how many residual sums the stream had seen when it was read."""

    kind: Kind
    sums: int
    # of the stream: the last update, while attention or MLP beside it may still be added
    update: torch.Tensor | None = None
    # of the stream: the MLP was left out of its last sum, which follows the rule of post-norm layers
    bare: bool = False


class Sum(NamedTuple):
    """One residual sum: what was added, to the stream or to its normed states, and whether other parts were added since
    the update read the stream."""

    update: Kind
    skip: Kind
    beside: bool


Seen = Callable[[nn.Module, Mark | None, list[Sum]], object]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)


def is_parameter(value: Any) -> bool:
    """Whether a factor or term is the same for all tokens."""
    return isinstance(value, int | float) or (
        isinstance(value, torch.Tensor) and (value.ndim < 2 or value.numel() == 1)
    )


def mark_of(tensor: Any) -> Mark | None:
    return getattr(tensor, "_residual_stream_mark", None)


def put_mark(tensor: torch.Tensor, mark: Mark | None) -> None:
    if mark is not None:
        tensor._residual_stream_mark = mark  # type: ignore[attr-defined]
    elif mark_of(tensor) is not None:
        del tensor._residual_stream_mark  # type: ignore[attr-defined]


class SharedSkipError(ValueError):
    """Attention and MLP of a layer share one skip connection."""


class ResidualStream(TorchFunctionMode):
    """Follows the stream through one run of a layer, without the parts in `removed`."""

    def __init__(self, removed: frozenset[str] = frozenset()):
        super().__init__()
        self.removed = removed
        self.sums: list[Sum] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = list(tensors_in([*args, *kwargs.values()]))
        marks = [mark_of(tensor) for tensor in given]
        if name in ADDITIONS and len(given) == 2 and None not in marks:
            return self.add(func, args, kwargs, given, marks)
        result = func(*args, **kwargs)
        mark = self.result_mark(name, given, marks, args, kwargs, result)
        if mark is not None:
            for tensor in tensors_in(result):
                if tensor.is_floating_point():
                    put_mark(tensor, mark)
        return result

    def result_mark(self, name: str, given, marks, args, kwargs, result) -> Mark | None:
        known = [mark for mark in marks if mark is not None]
        if not known:
            return None
        sums = min(mark.sums for mark in known)
        if name == "scaled_dot_product_attention":
            query, value = (
                args[place] if len(args) > place else kwargs[word] for place, word in ((0, "query"), (2, "value"))
            )
            query_mark = mark_of(query)
            kind: Kind = "cross-attention" if mark_of(value) is None else "attention"
            return Mark(kind, query_mark.sums if query_mark else sums)
        if name == "multi_head_attention_forward":
            value_mark = mark_of(args[2] if len(args) > 2 else kwargs["value"])
            return Mark("cross-attention" if value_mark is None else "attention", sums)
        if name == "softmax" and isinstance(result, torch.Tensor) and result.ndim >= 3:
            return Mark("map", sums)
        kinds = {mark.kind for mark in known}
        if "map" in kinds and name in PRODUCTS:
            other = [mark for mark in marks if mark is None or mark.kind != "map"]
            return Mark("cross-attention" if None in other else "attention", sums)
        if kinds == {"map"}:
            return Mark("map", sums)
        first = mark_of(given[0])
        if first is not None and name in UNCHANGED:
            return first
        if name in SCALINGS | ADDITIONS and len(known) == 1 and is_parameter(args[0] if first is None else args[-1]):
            return known[0]
        if first is not None and name in NORMS:
            return normed(first)
        for kind in ("attention", "cross-attention", "both"):
            if kind in kinds:
                return Mark(kind, sums)
        return Mark("mlp", sums)

    def add(self, func, args, kwargs, given, marks):
        streams = [mark.kind in STREAM for mark in marks]
        if sum(streams) == 1 and marks[streams.index(False)].kind in UPDATES:
            place = streams.index(True)
            return self.residual_sum(
                func, args, kwargs, given[place], marks[place], given[1 - place], marks[1 - place]
            )
        kinds = {mark.kind for mark in marks}
        if kinds == {"attention", "mlp"}:
            mark = Mark("both", min(mark.sums for mark in marks))
            if "mlp" in self.removed:
                attended = given[[entry.kind for entry in marks].index("attention")]
                put_mark(attended, mark)
                return attended
        else:
            mark = self.result_mark("add", given, marks, args, kwargs, None)
        result = func(*args, **kwargs)
        put_mark(result, mark)
        return result

    def residual_sum(self, func, args, kwargs, stream, skip: Mark, update, added: Mark):
        beside = added.kind == "both" or added.sums < skip.sums
        self.sums.append(Sum(added.kind, skip.kind, beside))
        sums = len(self.sums)
        if added.kind == "mlp" and "mlp" in self.removed:
            put_mark(stream, Mark("stream", sums, skip.update, bare=skip.kind == "normed"))
            return stream
        if added.kind == "mlp" and "mlp_skip" in self.removed:
            if beside:
                raise SharedSkipError("attention and MLP share one skip connection: remove `attention_skip`")
            result = update.contiguous()  # layers take views of sums
        elif added.kind in ("attention", "both") and "attention_skip" in self.removed:
            # an MLP beside attention that was added first stays
            result = update.contiguous() if not beside or skip.update is None else func(skip.update, update)
        else:
            if "mlp_skip" in self.removed and added.kind == "both":
                raise SharedSkipError("attention and MLP share one skip connection: remove `attention_skip`")
            result = func(*args, **kwargs)
        put_mark(result, Mark("stream", sums, update))
        return result


def normed(mark: Mark) -> Mark:
    return Mark("normed", mark.sums, mark.update) if mark.kind in STREAM else mark


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def misfit(mark: Mark | None, sums: list[Sum], with_mlp: bool = False) -> str:
    """Why the residual sums of a layer are not those of a layer with one attention module, and an MLP if `with_mlp`; empty if
    they are."""
    attended = sum(entry.update in ("attention", "both") for entry in sums)
    if attended == 0:
        return "it adds no softmax attention to the stream that it gets"
    if attended > 1:
        return f"it adds attention {attended} times"
    if mark is None or mark.kind not in STREAM:
        return "what it returns is not the sum of its input and of the updates that were found"
    if with_mlp and not any(entry.update in ("mlp", "both") for entry in sums):
        return "it adds no MLP to the stream, so the MLPs of the model are elsewhere"
    return ""


POINTWISE = (nn.Linear, Conv1D, nn.Dropout, nn.Identity)
POINTWISE_HOMES = ("torch.nn.modules.activation", "transformers.activations")


def mlps_of(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that treat each token alone, and so may run on one token if their output is not used."""
    for module in layer.children():
        if is_norm(module) or any(attends(part) for part in module.modules()):
            continue
        leaves = [leaf for leaf in module.modules() if next(leaf.children(), None) is None]
        other = [
            leaf for leaf in leaves if not isinstance(leaf, POINTWISE) and type(leaf).__module__ not in POINTWISE_HOMES
        ]
        linear = any(isinstance(leaf, nn.Linear | Conv1D) for leaf in leaves)
        if linear and not other or "moe" in type(module).__name__.lower():
            yield module
        elif linear and all(is_norm(leaf) for leaf in other):
            yield from mlps_of(module)


class FollowedLayer:
    """Hooks that follow the stream through every run of one layer.

    `removed` maps the parts that may be left out to functions that say whether the present run is without them. After each
    run, `seen` is called with the layer, the mark of its output, and its residual sums. `own` is an attention module whose
    output is attention, whatever it is computed by. `streams` is the number of streams among the arguments of the layer,
    and `positions` the axis of their tokens. If `lean`, removed MLPs run on one token, which is safe in layers that do not
    reshape their outputs.
    """

    def __init__(
        self,
        layer: nn.Module,
        removed: Mapping[str, Callable[[], bool]],
        stack: ExitStack,
        seen: Seen,
        own: nn.Module | None = None,
        streams: int = 1,
        positions: int = 1,
        lean: bool = False,
    ):
        self.layer, self.removed, self.seen, self.streams, self.positions = layer, removed, seen, streams, positions
        self.stream: ResidualStream | None = None
        self.entered: list[torch.Tensor] = []
        stack.callback(self.close)  # Ctrl-C leaves a layer without its hooks
        stack.callback(layer.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
        stack.callback(layer.register_forward_hook(self.leave, always_call=True).remove)
        for module in layer.modules():
            if module is not layer and is_norm(module):
                stack.callback(module.register_forward_pre_hook(self.before_norm).remove)
                stack.callback(module.register_forward_hook(self.after_norm).remove)
        if own is not None:
            stack.callback(own.register_forward_hook(self.after_own).remove)
        if lean and "mlp" in removed:
            for module in mlps_of(layer):
                stack.callback(module.register_forward_pre_hook(self.before_mlp).remove)

    def enter(self, module, args, kwargs) -> None:
        self.stream = ResidualStream(frozenset(name for name, active in self.removed.items() if active()))
        self.entered = list(tensors_in(args))[: self.streams] or [states_of(args, kwargs)]
        for states in self.entered:
            put_mark(states, Mark("stream", 0))
        self.stream.__enter__()

    def close(self) -> ResidualStream | None:
        """Stop following, and return the stream that was followed."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.__exit__(None, None, None)
        for states in self.entered:
            put_mark(states, None)
        self.entered = []
        return stream

    def leave(self, module, args, output) -> None:
        if (stream := self.close()) is None:
            return
        if output is None:  # the layer raised an error
            return
        states = next(tensors_in(output))
        mark = mark_of(states)
        put_mark(states, None)
        self.seen(self.layer, mark, stream.sums)

    def after_own(self, module, args, output) -> None:
        if self.stream is not None:
            put_mark(next(tensors_in(output)), Mark("attention", 0))

    def before_mlp(self, module, args):
        mark = mark_of(args[0]) if args else None
        if self.stream is None or mark is None or mark.kind not in STREAM or "mlp" not in self.stream.removed:
            return None
        # the output of one token is broadcast in the sum, which is not used
        one = args[0].narrow(min(self.positions, args[0].ndim - 2), 0, 1)
        put_mark(one, mark)
        return (one, *args[1:])

    def before_norm(self, module, args) -> None:
        self.given = mark_of(args[0]) if args else None

    def after_norm(self, module, args, output):
        mark, self.given = self.given, None
        if self.stream is None or mark is None or not isinstance(output, torch.Tensor):
            return None
        own = mark.kind in STREAM or module in self.layer.children()
        if mark.bare or (own and "norm" in self.stream.removed):
            put_mark(args[0], normed(mark._replace(bare=False)))
            return args[0]
        put_mark(output, normed(mark))
        return None


def states_of(args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The states that a layer gets: its first tensor, or the argument `hidden_states`."""
    return next(tensors_in([*args, kwargs.get("hidden_states"), dict(kwargs)]))
