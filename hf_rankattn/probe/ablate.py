"""Remove parts of a model inside a `with` block: its layers are followed while they run, and nothing stays on exit."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..families.architectures import attending_layers, base_of, family_of, layers_of
from ..families.projections import submodule
from ..families.row import Family
from ..families.stream import FollowedLayer, Mark, Seen, Sum, mark_of, misfit, put_mark
from ..families.structure import choosing_tower, chosen_tower
from ..files.running import evaluating, uncompiled
from .batches import first_example, plain, run


PARTS = ("norm", "attention_skip", "identity_trick", "mlp_skip", "mlp")
Removed = dict[str, set[int]]
Active = Callable[[], bool]


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


def replace_linear_maps(family: Family, layer: nn.Module, active: Active, stack: ExitStack) -> None:
    """The identity trick: the MLP returns its activation function of the attended states, with `mlp` as in the row."""
    assert family.mlp is not None
    attended: list[torch.Tensor] = []

    def remember(module, args, output):
        attended[:] = [first(output)]

    def replace(module, args, output):
        states = attended.pop()
        if not active():
            return None
        alias = states.view_as(states)
        if mark := mark_of(states):  # the sums inside of the activation function are no residual sums
            put_mark(alias, Mark("mlp", mark.sums))
        return submodule(layer, family.mlp.activation)(alias)

    stack.callback(submodule(layer, family.attention).register_forward_hook(remember).remove)
    stack.callback(submodule(layer, family.mlp.down).register_forward_hook(replace).remove)


def refuse_misfit(layer: nn.Module, mark: Mark | None, sums: list[Sum], with_mlp: bool = False) -> None:
    if reason := misfit(mark, sums, with_mlp):
        raise ValueError(f"no parts can be removed from {type(layer).__name__}: {reason}.")


def misfits(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Why parts cannot be removed from layers, from one run on the first example of a batch; empty if they all can."""
    found: dict[int, str] = {}
    family, layers = family_of(model), layers_of(model)

    def look(number: int) -> Seen:
        return lambda _, mark, sums: found.update({number: misfit(mark, sums, with_mlp=not family.layers)})

    with evaluating(base_of(model)), ExitStack() as stack:
        for number in attending_layers(model):
            follow(layers[number], family, {}, look(number), stack)
        run(model, first_example(batch))
    return {number: reason for number, reason in sorted(found.items()) if reason}


def follow(layer: nn.Module, family: Family, removed: Mapping[str, Active], seen: Seen, stack: ExitStack) -> None:
    own, positions = family.own_attention(layer), 1 if family.batch_first else 0
    FollowedLayer(layer, removed, stack, seen, own, family.streams, positions, lean=bool(family.layers))


class Ablations:
    """What is removed from one model now: the union of all open blocks."""

    def __init__(self, tower: str | None) -> None:
        self.tower = tower
        self.requests: list[Removed] = []
        self.hooks = ExitStack()

    def union(self) -> Removed:
        removed: Removed = {
            name: set().union(*(request.get(name, set()) for request in self.requests)) for name in PARTS
        }
        for name in ("mlp_skip", "identity_trick"):  # parts of a sublayer that is removed as a whole
            removed[name] -= removed["mlp"]
        return removed

    def reinstall(self, model: PreTrainedModel) -> None:
        self.hooks.close()
        with choosing_tower(self.tower):
            family, applied = family_of(model), layers_of(model)
        removed = {name: layers for name, layers in self.union().items() if layers}
        shared = len(set(applied)) < len(applied)
        depth = Depth(base_of(model), applied, self.hooks) if shared and removed else None
        for index, layer in enumerate(dict.fromkeys(applied)):
            active = {name: running(wanted, index, depth, len(applied)) for name, wanted in removed.items()}
            if depth is None:
                active = {name: acts for name, acts in active.items() if acts()}
            if acts := active.pop("identity_trick", None):
                replace_linear_maps(family, layer, acts, self.hooks)
            if active:
                follow(layer, family, active, partial(refuse_misfit, with_mlp=not family.layers), self.hooks)


def running(wanted: set[int], index: int, depth: Depth | None, count: int) -> Callable[[], bool]:
    """Whether the layer that runs now is a wanted one; shared modules need a count of the layers for this."""
    if depth is None or len(wanted) == count:
        return lambda: depth is not None or index in wanted
    return lambda: depth.layer in wanted


# of each model and tower
_ablations: "weakref.WeakKeyDictionary[nn.Module, dict[str | None, Ablations]]" = weakref.WeakKeyDictionary()


@contextmanager
def ablate(
    model: PreTrainedModel,
    attention_skip: bool = False,
    mlp: bool | Literal["identity_trick"] = False,
    mlp_skip: bool = False,
    norm: bool = False,
    layers: Collection[int] | None = None,
    tower: str | None = None,
) -> Iterator[PreTrainedModel]:
    """Run a model without some of its parts; `True` means removed. On exit, the model is restored to the last bit.

    Args:
        model: A model whose layers add attention and MLPs to a residual stream, of any type.
        attention_skip (`bool`, *optional*):
            Remove the skip connection around attention. The norm after it stays. Where attention and MLP are side by side, this
            is the only skip, and `mlp_skip` is refused while the model runs.
        mlp (`bool`, *optional*):
            Remove the MLP with its skip and its norm. `"identity_trick"`, for ALBERT, replaces only its two linear maps
            by identities and keeps activation, skip and norm, as the published curves do.
        mlp_skip (`bool`, *optional*): Remove the skip connection around the MLP alone.
        norm (`bool`, *optional*): Remove the norms of the layers.
        layers (`Collection[int]`, *optional*): The layers to change, counted as they run; all by default.
        tower (`str`, *optional*): For a model with several lists of layers, which one: `"encoder"`, `"decoder"`, ...

    The sums of a layer are found while it runs, and the ones that are removed are not computed; nothing is subtracted
    afterwards. Blocks can be nested in any order, and remove the union of what they name. A removed MLP still runs on one
    token of each text where each token has its own, so its dropout draws fewer random numbers.

    Limits: the hooks are on the model itself, so every caller of the model runs without the removed parts. Use the model
    from one thread, and copy or pickle it outside of the block: a copy made inside keeps the hooks.

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
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "compiled code does not see new hooks: ablate the module that was compiled (model._orig_mod) and run that."
        )
    model = plain(model)
    tower = tower or chosen_tower()
    with choosing_tower(tower):
        family, applied = family_of(model), layers_of(model)
    wanted = set(range(len(applied)) if layers is None else layers)
    if foreign := sorted(wanted - set(range(len(applied)))):
        raise ValueError(f"the model has layers 0 to {len(applied) - 1}, got {foreign}.")
    if mlp not in (True, False, "identity_trick"):
        raise ValueError(f"`mlp` must be True, False or 'identity_trick', got {mlp!r}.")
    switches = {"norm": norm, "attention_skip": attention_skip, "mlp_skip": mlp_skip, "mlp": mlp}
    names = ["identity_trick" if value == "identity_trick" else name for name, value in switches.items() if value]
    if "identity_trick" in names and not family.identity_trick:
        raise ValueError(
            f"mlp='identity_trick' is for ALBERT, got a model of type {model.config.model_type}. Use mlp=True."
        )
    if names and getattr(model.config, "chunk_size_feed_forward", None):
        raise ValueError(
            "set config.chunk_size_feed_forward to 0 first: an MLP that runs in chunks cannot be removed."
        )
    base, request = base_of(model), dict.fromkeys(names, wanted)
    active = _ablations.setdefault(base, {}).setdefault(tower, Ablations(tower))
    with uncompiled(base):
        active.requests.append(request)
        try:
            active.reinstall(model)
            yield model
        finally:
            active.requests.remove(request)
            active.reinstall(model)
