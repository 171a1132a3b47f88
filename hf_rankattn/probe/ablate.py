"""Take parts of a model away for a while: by hooks on its modules, restored to the last bit."""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from .architectures import (
    Edit,
    Feed,
    Idle,
    PassInput,
    Return,
    ZeroInput,
    ZeroOutput,
    base_of,
    family_of,
    layers_of,
    submodule,
)
from .batches import owned, plain, uncompiled


# What is removed where, in the order in which hooks are put on, and so act: the skip around an MLP leaves what the trick
# made of it, and what removes the whole sublayer has the last word.
ORDER = ("norm", "attention_skip", "identity_trick", "mlp_skip", "mlp")
Removed = dict[str, set[int]]


class Hook:
    """A hook that stays with its model: a copy of the model, made while parts are away, is whole."""

    def __init__(self, call: Callable):
        self.call = call

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo):
        return nothing

    def __reduce__(self):
        return no_hook, ()


def nothing(*args, **kwargs) -> None:
    """The hook of a copy."""


def no_hook() -> Callable:
    return nothing


class Depth:
    """Which layer is running, where one module runs several times in one forward pass."""

    def __init__(self, base: nn.Module, layers: list[nn.Module], stack: ExitStack):
        self.layer = -1
        stack.callback(base.register_forward_pre_hook(Hook(self.start), prepend=True).remove)
        for layer in dict.fromkeys(layers):
            stack.callback(layer.register_forward_pre_hook(Hook(self.enter), prepend=True).remove)

    def start(self, module, args) -> None:
        self.layer = -1

    def enter(self, module, args) -> None:
        self.layer += 1


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def install(edit: Edit, layer: nn.Module, positions: int, active: Callable[[], bool], stack: ExitStack) -> None:
    """Put the hooks of one edit on one layer, whose states have tokens on axis `positions`, to act while `active()`."""
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
        if isinstance(edit, Idle):  # the sum with what it returns spreads one token over all, and is not used
            if not args or args[0].ndim != 3:  # a call that no layer makes
                return None
            return (args[0][:, :1] if positions else args[0][:1], *args[1:]), kwargs
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
        assert isinstance(edit, Return)
        function = submodule(layer, edit.function) if edit.function else None
        return last.pop("output") if function is None else function(last.pop("output"))

    if isinstance(edit, Feed | Return):
        source = modules[0]
        assert source is not None
        stack.callback(source.register_forward_hook(Hook(remember)).remove)
    if isinstance(edit, Feed | ZeroInput | Idle):
        stack.callback(module.register_forward_pre_hook(Hook(replace_argument), with_kwargs=True).remove)
    else:
        stack.callback(module.register_forward_hook(Hook(replace_output)).remove)


class Ablations:
    """All that is removed from one model now: blocks inside of blocks remove what each of them names."""

    def __init__(self) -> None:
        self.requests: list[Removed] = []
        self.hooks = ExitStack()

    def union(self) -> Removed:
        removed: Removed = {
            name: set().union(*(request.get(name, set()) for request in self.requests)) for name in ORDER
        }
        for name in ("mlp_skip", "identity_trick"):  # parts of what is gone as a whole
            removed[name] -= removed["mlp"]
        return removed

    def reinstall(self, model: PreTrainedModel) -> None:
        self.hooks.close()
        family, applied = family_of(model), layers_of(model)
        removed = {name: layers for name, layers in self.union().items() if layers}
        shared = len(set(applied)) < len(applied)
        depth = Depth(base_of(model), applied, self.hooks) if shared and removed else None
        for index, layer in enumerate(dict.fromkeys(applied)):
            for name, wanted in removed.items():
                for edit in family.edits[name]:
                    active = running(wanted, index, depth, len(applied))
                    install(edit, layer, 1 if family.batch_first else 0, active, self.hooks)


def running(wanted: set[int], index: int, depth: Depth | None, count: int) -> Callable[[], bool]:
    """Whether the layer that runs is a wanted one; only a module that runs several times has to count for that."""
    if depth is None or len(wanted) == count:
        return lambda: depth is not None or index in wanted
    return lambda: depth.layer in wanted


_ablations: "weakref.WeakKeyDictionary[nn.Module, Ablations]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


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

    Parts are removed by zeroing or capturing on submodules, never by subtracting what was added. Blocks may stand in each
    other, in any order. The model itself is changed while the block is open, for whoever runs it. An MLP that is removed
    still runs, on one token of each text, so that it costs next to nothing; what it returns is thrown away, and its
    dropout draws fewer numbers.

    Example:

    ```python
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import ablate, relative_residual

    >>> shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = BertModel(BertConfig(**shape)).eval()
    >>> batch = {"input_ids": torch.arange(1, 33)[None]}
    >>> whole = model(**batch).last_hidden_state
    >>> with ablate(model, attention_skip=True, mlp=True):
    ...     alone = model(**batch).last_hidden_state
    >>> bool(relative_residual(alone) < 1e-3 < relative_residual(whole))
    True
    >>> torch.equal(model(**batch).last_hidden_state, whole)
    True
    ```
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "compiled code does not see what is removed: ablate the module that was compiled (model._orig_mod) and run that."
        )
    model = plain(model)
    family, applied = family_of(model), layers_of(model)
    wanted = set(range(len(applied)) if layers is None else layers)
    if foreign := sorted(wanted - set(range(len(applied)))):
        raise ValueError(f"the model has layers 0 to {len(applied) - 1}, got {foreign}.")
    if mlp not in (True, False, "identity_trick"):
        raise ValueError(f"`mlp` must be True, False or 'identity_trick', got {mlp!r}.")
    switches = {"norm": norm, "attention_skip": attention_skip, "mlp_skip": mlp_skip, "mlp": mlp}
    names = ["identity_trick" if value == "identity_trick" else name for name, value in switches.items() if value]
    for name in names:
        if name not in family.edits:
            reason = family.notes.get(name, "this family has no such part")
            can = ", ".join(family.edits)
            raise ValueError(f"`{name}` cannot be removed from {family.name}: {reason}. What can be: {can}.")
    if names and model.config.chunk_size_feed_forward:
        raise ValueError("set config.chunk_size_feed_forward to 0 first: a layer in chunks has no one MLP to remove.")
    base, request = base_of(model), dict.fromkeys(names, wanted)
    with owned(base), uncompiled(base):
        with _lock:
            active = _ablations.setdefault(base, Ablations())
        active.requests.append(request)
        try:
            active.reinstall(model)
            yield model
        finally:
            active.requests.remove(request)
            active.reinstall(model)
