"""The attention modules of the families that have a rank twin, in a model and in the weight names of a checkpoint."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from .architectures import TABLE, layer_groups, layers_of
from .row import Family


CONVERTIBLE = tuple(family for family in TABLE if family.rank_twin is not None)


def family_of_type(model_type: str | None, what: str) -> Family:
    """The row of a model type that has a rank twin, or a `ValueError` that lists those rows."""
    for family in CONVERTIBLE:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in CONVERTIBLE for name in family.model_types)
    raise ValueError(f"{what} is of model type {model_type!r}, which cannot be converted; these can: {supported}.")


@dataclass(frozen=True)
class Slot:
    """One attention module: its parent, its name there, and the entry of the list of ranks that it follows."""

    parent: nn.Module
    name: str
    where: str
    entry: int
    applications: int

    @property
    def module(self) -> nn.Module:
        return getattr(self.parent, self.name)


def attention_paths(family: Family) -> list[str]:
    return [path for path in (family.attention, family.cross_attention) if path is not None]


def slots_of(model: PreTrainedModel, family: Family) -> Iterator[Slot]:
    """The attention modules of a model in the order in which they run first, shared modules once."""
    (groups, order), layers = layer_groups(model), layers_of(model)
    kind = "layer" if family.groups is None else "group"
    for entry in dict.fromkeys(order):
        for layer in groups[entry]:
            for path in attention_paths(family):
                *parents, name = path.split(".")
                parent: nn.Module | None = layer
                for step in parents:
                    parent = getattr(parent, step, None)
                if parent is not None and hasattr(parent, name):
                    cross = "cross-attention of " if path == family.cross_attention else ""
                    yield Slot(parent, name, f"{cross}{kind} {entry}", entry, layers.count(layer))


def entries_of(config, family: Family) -> list[int]:
    """The number of layers that follow each entry of a list of ranks: one, or those of an ALBERT group."""
    if family.groups is None:
        return [1] * config.num_hidden_layers
    order = family.groups(config)
    return [order.count(group) for group in range(config.num_hidden_groups)]


def weight_names(family: Family) -> re.Pattern:
    """Matches the name of a weight of an attention module, with the groups `module`, `layer` (the entry) and `tensor`."""
    outer, _, inner = family.layers.partition(".*.")
    layers = rf"{re.escape(outer)}\.(?P<layer>\d+)" + (rf"\.{re.escape(inner)}\.\d+" if inner else "")
    attention = "|".join(map(re.escape, attention_paths(family)))
    return re.compile(rf"(?P<module>(?:.*\.)?{layers}\.(?:{attention}))\.(?P<tensor>.+)")
