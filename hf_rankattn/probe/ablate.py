"""Take parts of a model away for a while: by hooks on its modules, restored to the last bit."""

import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from .architectures import (
    Edit,
    Feed,
    PassInput,
    Return,
    ZeroInput,
    ZeroOutput,
    base_of,
    family_of,
    layers_of,
    submodule,
)
from .batches import plain


_owners: "weakref.WeakKeyDictionary[nn.Module, list[int]]" = weakref.WeakKeyDictionary()
_owners_lock = threading.Lock()


class Depth:
    """Which layer is running: shared modules run several times in one forward pass."""

    def __init__(self, base: nn.Module, layers: list[nn.Module], stack: ExitStack):
        self.layer = -1
        self.hook(stack, base.register_forward_pre_hook(self.start, prepend=True))
        for layer in dict.fromkeys(layers):
            self.hook(stack, layer.register_forward_pre_hook(self.enter, prepend=True))

    @staticmethod
    def hook(stack: ExitStack, handle) -> None:
        stack.callback(handle.remove)

    def start(self, module, args) -> None:
        self.layer = -1

    def enter(self, module, args) -> None:
        self.layer += 1


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def install(edit: Edit, layer: nn.Module, active, stack: ExitStack) -> None:
    """Put the hooks of one edit on one layer; they act while `active()` says so."""
    targets = [edit.source, edit.target] if isinstance(edit, Feed | Return) else [edit.module]
    modules = [submodule(layer, path) for path in targets]
    if any(module is None for module in modules):
        return  # switched off in this model: nothing to take away
    module = modules[-1]
    assert module is not None
    last: dict[str, torch.Tensor] = {}

    def remember(_, args, output):
        last["output"] = first(output)

    def replace_argument(_, args, kwargs):
        if not active():
            return None
        if isinstance(edit, Feed):
            return (last.pop("output"), *args[1:]), kwargs
        assert isinstance(edit, ZeroInput)
        changed = list(args)
        changed[edit.argument] = torch.zeros_like(changed[edit.argument])
        return tuple(changed), kwargs

    def replace_output(_, args, output):
        if not active():
            return None
        if isinstance(edit, PassInput):
            return args[edit.argument]
        if isinstance(edit, ZeroOutput):
            return torch.zeros_like(output)
        function = submodule(layer, edit.function) if edit.function else None
        return last.pop("output") if function is None else function(last.pop("output"))

    if isinstance(edit, Feed | Return):
        source = modules[0]
        assert source is not None
        stack.callback(source.register_forward_hook(remember).remove)
    if isinstance(edit, Feed | ZeroInput):
        stack.callback(module.register_forward_pre_hook(replace_argument, with_kwargs=True).remove)
    else:
        assert isinstance(edit, PassInput | Return | ZeroOutput)
        stack.callback(module.register_forward_hook(replace_output).remove)


@contextmanager
def owned(model: nn.Module) -> Iterator[None]:
    """Let one thread at a time ablate a model; the same thread may do so again inside."""
    thread = threading.get_ident()
    with _owners_lock:
        owners = _owners.setdefault(model, [])
        if owners and owners[-1] != thread:
            raise ValueError(
                "another thread is ablating this model: hooks of both would mix. Use a copy of the model."
            )
        owners.append(thread)
    try:
        yield
    finally:
        with _owners_lock:
            owners.pop()


@contextmanager
def ablate(
    model: PreTrainedModel,
    attention_skip: bool = False,
    mlp: bool | Literal["identity_trick"] = False,
    mlp_skip: bool = False,
    norm: bool = False,
    layers: Collection[int] | None = None,
) -> Iterator[PreTrainedModel]:
    """Run a model without some of its parts; `True` means removed. On leaving, the model is as it was.

    Args:
        model: A model of a family in the table of architectures.
        attention_skip (`bool`, *optional*): Remove the skip connection around attention. The norm after it stays.
        mlp (`bool`, *optional*):
            Remove the MLP with its skip and its norm. `"identity_trick"`, for ALBERT, replaces only its two linear maps
            by identities and leaves activation, skip and norm, as the published curves do.
        mlp_skip (`bool`, *optional*): Remove the skip connection around the MLP alone.
        norm (`bool`, *optional*): Remove the norms of the layers.
        layers (`Collection[int]`, *optional*): The layers to change, counted as they run; all by default.

    Parts are removed by zeroing or capturing on submodules, never by subtracting what was added.
    """
    model = plain(model)
    family, applied = family_of(model), layers_of(model)
    wanted = set(range(len(applied)) if layers is None else layers)
    if foreign := sorted(wanted - set(range(len(applied)))):
        raise ValueError(f"the model has layers 0 to {len(applied) - 1}, got {foreign}.")
    # the MLP comes last: where it shares a module with a norm, what removes the whole sublayer has the last word
    switches = {"norm": norm, "attention_skip": attention_skip, "mlp_skip": mlp_skip, "mlp": mlp}
    names = ["identity_trick" if value == "identity_trick" else name for name, value in switches.items() if value]
    for name in names:
        if name not in family.edits:
            reason = family.notes.get(name, "this family has no such part")
            can = ", ".join(family.edits)
            raise ValueError(f"`{name}` cannot be removed from {family.name}: {reason}. What can be: {can}.")
    if names and model.config.chunk_size_feed_forward:
        raise ValueError("set config.chunk_size_feed_forward to 0 first: a layer in chunks has no one MLP to remove.")
    with owned(model), ExitStack() as stack:
        depth = Depth(base_of(model), applied, stack)
        for layer in dict.fromkeys(applied):
            for name in names:
                for edit in family.edits[name]:
                    install(edit, layer, lambda: depth.layer in wanted, stack)
        yield model
