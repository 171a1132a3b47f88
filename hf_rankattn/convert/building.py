"""The model that a conversion makes: its class, its config, and its weights."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..families.architectures import base_of
from ..families.row import Family
from ..families.slots import Slot, entries_of, owner, slots_of
from ..models.registration import rank_twin
from .heads import Tensors
from .part import Part, Widths


def converted_class(model: PreTrainedModel, family: Family) -> type[PreTrainedModel]:
    """The class that a model becomes: the rank class of a stock class, or its own class."""
    own = type(model)
    if hasattr(model.config, "head_geometry"):
        return own
    if family.stock_width is not None and getattr(transformers, own.__name__, None) is own:
        return own
    if family.stock_width is not None or (twin := rank_twin(own)) is None:
        raise ValueError(
            f"{own.__name__} is a class of its own, defined in {own.__module__}, and has no rank twin. Convert a stock "
            f"{model.config.model_type} class"
            + ("." if family.stock_width is not None else ", or derive yours from a rank class of that family.")
        )
    return twin


def narrowed_config(config, family: Family, parts: Iterable[Part], widths: list[Widths]):
    """The configuration of the converted model: its widths, and the old scale of the logits."""
    if family.stock_width is not None:
        new = copy.deepcopy(config)
        setattr(new, family.stock_width, widths[0].rank)
        return new
    config_class = rank_twin(type(config)) or type(config)
    stored = config.to_dict()
    scales = [scale for _, scale in sorted({part.entry: part.scale for part in parts}.items())]
    entries = [entry for entry, count in enumerate(entries_of(config, family)) for _ in range(count)]
    columns: dict[str, list] = {
        "qk_rank": [widths[entry].rank for entry in entries],
        "qk_scale": [scales[entry] for entry in entries],
        "v_head_dim": [widths[entry].value for entry in entries],
    }
    kept = all(part.old.value == widths[part.entry].value for part in parts)
    stored.pop("per_layer_config", None)
    layers: dict[int, dict[str, Any]] = {}
    for name, column in columns.items():
        if len(set(column)) == 1:
            # a value width that was not set stays unset
            unset = name == "v_head_dim" and stored.get(name) is None and kept
            stored[name] = None if unset else column[0]
            continue
        stored[name] = None
        for layer, value in enumerate(column):
            layers.setdefault(layer, {})[name] = value
    if layers:
        stored["per_layer_config"] = layers
    return config_class.from_dict(stored)


def empty_model(
    model: PreTrainedModel, family: Family, parts: list[Part], widths: list[Widths]
) -> tuple[PreTrainedModel, list[float]]:
    """The converted model on the meta device, and the scale of the logits in each of its blocks."""
    options = {"add_pooling_layer": False} if model is base_of(model) and getattr(model, "pooler", 0) is None else {}
    with torch.device("meta"):
        new = converted_class(model, family)(narrowed_config(model.config, family, parts, widths), **options)
    return new, [float(getattr(owner(slot.module, family), family.scale)) for slot in slots_of(new, family)]


def fill(new: PreTrainedModel, model: PreTrainedModel, slots: list[Slot], tensors: list[Tensors]) -> None:
    """Give the empty `new` model the `tensors` of its attention blocks, and copies of all other weights of the model."""
    replaced = {}
    places = {module: name for name, module in model.named_modules()}
    for slot, stored in zip(slots, tensors, strict=True):
        replaced.update({f"{places[slot.module]}.{name}": tensor for name, tensor in stored.items()})
    state = {
        name: replaced[name] if name in replaced else tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }
    new.load_state_dict(state, assign=True)
    for name, buffer in model.named_buffers():
        module, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(module), leaf, buffer.detach().clone())  # some are not in the state dict
    new.tie_weights()
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    for name, weight in new.named_parameters():
        weight.requires_grad_(name not in frozen)
    if getattr(model, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(model.generation_config)
    if new.config._attn_implementation != model.config._attn_implementation:
        new.set_attn_implementation(model.config._attn_implementation)
    new.train(model.training)
