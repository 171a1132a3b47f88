"""The attention blocks of the families that can be converted, in a model and in the weight names of a checkpoint."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .architectures import TABLE, is_causal, layer_groups, layers_of
from .projections import submodule
from .row import Family
from .structure import CROSS


CONVERTIBLE = tuple(family for family in TABLE if family.rank_types or family.stock_width is not None)


def family_of_type(model_type: str | None, what: str) -> Family:
    """The row of a model type that can be converted, or a `ValueError` that lists those rows."""
    for family in CONVERTIBLE:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in CONVERTIBLE for name in family.model_types)
    raise ValueError(f"{what} is of model type {model_type!r}, which cannot be converted; these can: {supported}.")


@dataclass(frozen=True)
class Slot:
    """One attention block with its output projection: its parent, its name there, the entry of the list of widths that it
    follows, and the masks of its queries and keys in a batch."""

    parent: nn.Module
    name: str
    where: str
    entry: int
    applications: int = 1
    causal: bool = False
    rows: str = "attention_mask"
    keys: str = "attention_mask"

    @property
    def module(self) -> nn.Module:
        return getattr(self.parent, self.name)

    @property
    def cross(self) -> bool:
        """Whether keys are read from other tokens than queries."""
        return self.rows != self.keys


def block_paths(family: Family) -> list[str]:
    return [path for path in (family.projections.block()[0], family.cross_attention) if path]


def owner(block: nn.Module, family: Family) -> Any:
    """The module of a block that holds the queries, the number of heads and the factor on the logits."""
    inner = family.projections.block()[1]
    return submodule(block, inner[0].rpartition(".")[0]) if inner and "." in inner[0] else block


def slots_of(model: PreTrainedModel, family: Family) -> Iterator[Slot]:
    """The attention blocks of a model in the order in which they run first, shared ones once."""
    if not family.layers:
        yield from slots_of_structure(model, family)
        return
    (groups, order), layers = layer_groups(model), layers_of(model)
    kind = "layer" if family.groups is None else "group"
    for entry in dict.fromkeys(order):
        for layer in groups[entry]:
            for path in block_paths(family):
                *parents, name = path.split(".")
                parent: nn.Module | None = layer
                for step in parents:
                    parent = getattr(parent, step, None)
                if parent is not None and hasattr(parent, name):
                    cross = path == family.cross_attention
                    where = f"{'cross-attention of ' if cross else ''}{kind} {entry}"
                    causal = is_causal(model) and not cross
                    keys = "encoder_attention_mask" if cross else "attention_mask"
                    yield Slot(parent, name, where, entry, layers.count(layer), causal, keys=keys)


def slots_of_structure(model: PreTrainedModel, family: Family) -> Iterator[Slot]:
    """Every module that has the four projections of the family; a decoder of T5 reads an encoder."""
    names, modules = family.projections.block()[1], dict(model.named_modules())
    found = [path for path, module in modules.items() if all(hasattr(module, name) for name in names)]
    for entry, path in enumerate(found):
        parent, _, name = path.rpartition(".")
        decoder = bool(getattr(modules[path], "is_decoder", False))
        cross = CROSS.search(path) is not None
        rows = "decoder_attention_mask" if decoder else "attention_mask"
        yield Slot(
            modules[parent], name, path, entry, 1, decoder and not cross, rows, "attention_mask" if cross else rows
        )


def entries_of(config, family: Family) -> list[int]:
    """The number of layers that follow each entry of a list of widths: one, or those of an ALBERT group."""
    if family.groups is None:
        return [1] * config.num_hidden_layers
    order = family.groups(config)
    return [order.count(group) for group in range(config.num_hidden_groups)]


def weight_names(family: Family) -> re.Pattern:
    """Matches the name of a weight of an attention block, with the groups `module`, `layer` (the entry) and `tensor`."""
    outer, _, inner = family.layers.partition(".*.")
    layers = rf"{re.escape(outer)}\.(?P<layer>\d+)" + (rf"\.{re.escape(inner)}\.\d+" if inner else "")
    blocks = "|".join(map(re.escape, block_paths(family)))
    return re.compile(rf"(?P<module>(?:.*\.)?{layers}\.(?:{blocks}))\.(?P<tensor>.+)")
