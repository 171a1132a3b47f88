"""The three families that can be converted: where their attention lives, in a model and in a checkpoint."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import transformers
from torch import nn
from transformers import PreTrainedModel

from ... import models
from ...probe.architectures import base_of, layers_of
from .heads import Heads, LinearHeads, RelativeHeads


@dataclass(frozen=True)
class Family:
    """One row a family; `attentions` are paths inside a layer, `keys` finds the layer and the tensor in a weight's name."""

    name: str
    model_types: tuple[str, str]
    heads: Heads
    attentions: tuple[str, ...]
    keys: re.Pattern

    @property
    def rank_config(self):
        return getattr(models, f"Rank{self.name}Config")


FAMILIES = (
    Family(
        name="Bert",
        model_types=("bert", "rank_bert"),
        heads=LinearHeads(),
        attentions=("attention.self", "crossattention.self"),
        keys=re.compile(
            r"(?P<module>(?:.*\.)?encoder\.layer\.(?P<layer>\d+)\.(?:cross)?attention\.self)\.(?P<tensor>.+)"
        ),
    ),
    Family(
        name="Albert",
        model_types=("albert", "rank_albert"),
        heads=LinearHeads(),
        attentions=("attention",),
        keys=re.compile(
            r"(?P<module>(?:.*\.)?encoder\.albert_layer_groups\.(?P<layer>\d+)\.albert_layers\.\d+\.attention)\.(?P<tensor>.+)"
        ),
    ),
    Family(
        name="XLNet",
        model_types=("xlnet", "rank_xlnet"),
        heads=RelativeHeads(),
        attentions=("rel_attn",),
        keys=re.compile(r"(?P<module>(?:.*\.)?layer\.(?P<layer>\d+)\.rel_attn)\.(?P<tensor>.+)"),
    ),
)


def family_of_type(model_type: str | None, what: str) -> Family:
    """The row of a model type, or a `ValueError` that lists the rows there are."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"{what} is of model type {model_type!r}, which cannot be converted; these can: {supported}.")


def rank_class_of(model: PreTrainedModel, family: Family) -> type[PreTrainedModel]:
    """The rank class that a model of a stock or a rank class becomes."""
    own = type(model)
    if hasattr(model.config, "head_geometry"):
        return own
    if getattr(transformers, own.__name__, None) is not own:
        raise ValueError(
            f"{own.__name__} is a class of its own, defined in {own.__module__}: what it adds has no rank twin. Convert a "
            f"stock {family.name} class, or derive yours from a Rank{family.name} class."
        )
    return getattr(models, f"Rank{own.__name__}")


@dataclass(frozen=True)
class Slot:
    """One attention module, the module it hangs in, and the entry of the list of ranks that it follows."""

    parent: nn.Module
    name: str
    where: str
    entry: int
    applications: int

    @property
    def module(self) -> nn.Module:
        return getattr(self.parent, self.name)


def slots_of(model: PreTrainedModel, family: Family) -> Iterator[Slot]:
    """The attention modules of a model in the order in which they run first, shared ones once."""
    layers = layers_of(model)
    seen: dict[nn.Module, int] = {}
    for layer in layers:
        if layer in seen:
            continue
        seen[layer] = len(seen)
        entry = seen[layer]
        if family.name == "Albert":
            entry //= base_of(model).config.inner_group_num
        for path in family.attentions:
            *parents, name = path.split(".")
            parent: nn.Module | None = layer
            for step in parents:
                parent = getattr(parent, step, None)
            if parent is not None and hasattr(parent, name):
                cross = "cross-attention of " if path.startswith("cross") else ""
                kind = "group" if family.name == "Albert" else "layer"
                yield Slot(parent, name, f"{cross}{kind} {entry}", entry, layers.count(layer))


def entries_of(config, family: Family) -> list[int]:
    """The number of layers that follow each entry of a list of ranks: one each, and for ALBERT those of a group."""
    if family.name != "Albert":
        return [1] * config.num_hidden_layers
    per_group = config.num_hidden_layers / config.num_hidden_groups
    return [
        sum(int(layer / per_group) == group for layer in range(config.num_hidden_layers))
        for group in range(config.num_hidden_groups)
    ]
