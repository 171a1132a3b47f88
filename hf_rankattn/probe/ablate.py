"""Remove parts of a model inside a `with` block: hooks on its modules, removed on exit."""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..families.architectures import base_of, family_of, layers_of
from ..families.projections import submodule
from ..families.row import Edit, Feed, Idle, PassInput, Return, ZeroInput, ZeroOutput
from ..files.running import uncompiled
from .batches import plain


# The order in which hooks are added, and so run: the edit of the skip around an MLP sees the result of the identity trick, and
# the edit that removes the whole sublayer is the last.
ORDER = ("norm", "attention_skip", "identity_trick", "mlp_skip", "mlp")
Removed = dict[str, set[int]]


class Depth:
    """Counts the layers of a forward pass, because a shared module runs several times in one pass."""

    def __init__(self, base: nn.Module, layers: list[nn.Module], stack: ExitStack):
        self.layer = -1
        stack.callback(base.register_forward_pre_hook(self.start, prepend=True).remove)
        for layer in dict.fromkeys(layers):
            stack.callback(layer.register_forward_pre_hook(self.enter, prepend=True).remove)

    def start(self, module, args) -> None:
        self.layer = -1

    def enter(self, module, args) -> None:
        self.layer += 1


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def install(edit: Edit, layer: nn.Module, positions: int, active: Callable[[], bool], stack: ExitStack) -> None:
    """Add the hooks of one edit to a layer. Its states have tokens on axis `positions`; the hooks act while `active()`."""
    targets = [edit.source, edit.target] if isinstance(edit, Feed | Return) else [edit.module]
    modules = [submodule(layer, path) for path in targets]
    if any(module is None for module in modules):
        return  # this part is switched off in the config
    source, module = modules[0], modules[-1]
    last: dict[str, torch.Tensor] = {}

    def remember(_, args, output):
        last["output"] = first(output)

    def replace_argument(_, args, kwargs):
        if not active():
            return None
        if isinstance(edit, Feed):
            return (last.pop("output"), *args[1:]), kwargs
        if isinstance(edit, Idle):  # the output of one token is broadcast in the sum, which is not used
            return (args[0].narrow(positions, 0, 1), *args[1:]), kwargs
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
        states = last.pop("output")
        return submodule(layer, edit.function)(states) if edit.function else states

    if isinstance(edit, Feed | Return):
        stack.callback(source.register_forward_hook(remember).remove)
    if isinstance(edit, Feed | ZeroInput | Idle):
        stack.callback(module.register_forward_pre_hook(replace_argument, with_kwargs=True).remove)
    else:
        stack.callback(module.register_forward_hook(replace_output).remove)


class Ablations:
    """What is removed from one model now: the union of all open blocks."""

    def __init__(self) -> None:
        self.requests: list[Removed] = []
        self.hooks = ExitStack()

    def union(self) -> Removed:
        removed: Removed = {
            name: set().union(*(request.get(name, set()) for request in self.requests)) for name in ORDER
        }
        for name in ("mlp_skip", "identity_trick"):  # parts of a sublayer that is removed as a whole
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
    """Whether the layer that runs now is a wanted one; shared modules need a count of the layers for this."""
    if depth is None or len(wanted) == count:
        return lambda: depth is not None or index in wanted
    return lambda: depth.layer in wanted


_ablations: "weakref.WeakKeyDictionary[nn.Module, Ablations]" = weakref.WeakKeyDictionary()


@contextmanager
def ablate(
    model: PreTrainedModel,
    attention_skip: bool = False,
    mlp: bool | Literal["identity_trick"] = False,
    mlp_skip: bool = False,
    norm: bool = False,
    layers: Collection[int] | None = None,
) -> Iterator[PreTrainedModel]:
    """Run a model without some of its parts; `True` means removed. On exit, the model is restored to the last bit.

    Args:
        model: A model of a family in the table of architectures.
        attention_skip (`bool`, *optional*): Remove the skip connection around attention. The norm after it stays.
        mlp (`bool`, *optional*):
            Remove the MLP with its skip and its norm. `"identity_trick"`, for ALBERT, replaces only its two linear maps
            by identities and keeps activation, skip and norm, as the published curves do.
        mlp_skip (`bool`, *optional*): Remove the skip connection around the MLP alone.
        norm (`bool`, *optional*): Remove the norms of the layers.
        layers (`Collection[int]`, *optional*): The layers to change, counted as they run; all by default.

    Hooks on submodules zero or replace tensors; nothing is removed by subtracting it afterwards. Blocks can be nested in any
    order, and remove the union of what they name. A removed MLP still runs on one token of each text, so its dropout draws
    fewer random numbers.

    Limits: the hooks are on the model itself, so every caller of the model runs without the removed parts. Use the model
    from one thread, and copy or pickle it outside of the block: a copy made inside keeps the hooks.

    Example:

    ```python
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import ablate, relative_residual

    >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)).eval()
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
            "compiled code does not see new hooks: ablate the module that was compiled (model._orig_mod) and run that."
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
        if reason := family.cannot_remove(name):
            raise ValueError(
                f"`{name}` cannot be removed from {model.config.model_type}: {reason}. These can be removed: "
                f"{', '.join(family.edits)}."
            )
    if names and model.config.chunk_size_feed_forward:
        raise ValueError(
            "set config.chunk_size_feed_forward to 0 first: a layer in chunks has no single MLP to remove."
        )
    base, request = base_of(model), dict.fromkeys(names, wanted)
    active = _ablations.setdefault(base, Ablations())
    with uncompiled(base):
        active.requests.append(request)
        try:
            active.reinstall(model)
            yield model
        finally:
            active.requests.remove(request)
            active.reinstall(model)
