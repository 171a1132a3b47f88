"""A model with other widths of its heads: `convert_rank`."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..families.architectures import layers_of
from ..families.projections import FusedProjections
from ..families.row import Family
from ..families.slots import Slot, family_of_type, slots_of
from ..files.running import Inputs, evaluating
from ..models.budget import check_finite_weights
from .building import converted_class, empty_model, fill
from .choosing import chosen_widths, cuts_tried
from .distil import distil
from .gathering import gathered, gathered_values
from .heads import Tensors, heads_of
from .part import Part, Widths
from .ranks import check_choice, check_request


logger = logging.get_logger(__name__)
Progress = Callable[[int, int], Any]
Objective = Literal["logits", "attention"]
Choice = Literal["spectra", "damage"]
Width = int | Sequence[int] | Literal["auto"] | None


class LayerReport(NamedTuple):
    """The widths of one layer (of one ALBERT group), the weights it saves, and the shares of energy that it keeps: of its
    logits, and of what its heads write."""

    layer: int
    old_rank: int
    rank: int
    energy_kept: float
    parameters_saved: int
    old_v_head_dim: int
    v_head_dim: int
    value_energy_kept: float

    def as_dict(self) -> dict[str, int | float]:
        return self._asdict()


class Conversion(NamedTuple):
    """The converted model, and one [`LayerReport`] per layer (per group)."""

    model: PreTrainedModel
    layers: list[LayerReport]


def convert_rank(
    model: PreTrainedModel,
    qk_rank: Width = None,
    v_head_dim: Width = None,
    *,
    calibration: Inputs | None = None,
    energy: float | None = None,
    mean_rank: float | None = None,
    ranks: Choice = "spectra",
    objective: Objective = "logits",
    distil_steps: int = 0,
    distil_batches: Inputs | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """The same model with other widths of its heads, as close to the original as these widths allow.

    A model of a family with a rank twin (BERT, RoBERTa, ALBERT, XLNet, GPT-2, ...) becomes a rank model. A model whose stock
    config holds one width for queries, keys and values (ViT and its relatives, T5) stays a stock model, and takes one width
    for both arguments. The error for any other model lists the model types.

    Args:
        model: A stock or rank model, of any task class. It does not change.
        qk_rank (`int`, list of `int`, or `"auto"`, *optional*):
            The new query-key rank: one for all layers, one per layer (ALBERT: per group), or chosen from the spectra of the
            logits. A rank of at least the old one changes no logit; a larger rank gives a warning. None keeps the old rank.
        v_head_dim (`int`, list of `int`, or `"auto"`, *optional*):
            The new value width, in the same way. A head writes `A V W_O`. The error of what it writes is minimised in closed
            form, from the second moment of the mixed values `A V` and the rows of `W_O`.
        calibration (*optional*):
            One batch (a dict of tensors), a list of batches, or a DataLoader; it is read once or twice per layer, so a
            generator is refused. Without it, each head's `W_Q W_K^T` and `W_V W_O`, with biases, are truncated by their
            singular values. With it, the errors on these texts are minimised, layer by layer on the model converted so far,
            queries and keys first. For logits this is the variance over the keys of a row of the change of its logits,
            summed over rows, lowered by alternating least squares from a closed form. Padding is left out.
        energy (`float`, *optional*): With `"auto"`, the share of energy that every layer keeps; 0.95 by default.
        mean_rank (`float`, *optional*):
            With `"auto"`, the mean of the widths; layers that need more get more. If both widths are `"auto"`, they share one
            budget, and the error of both is what changes in the residual stream; this needs calibration.
        ranks (`str`, *optional*, defaults to `"spectra"`):
            What `mean_rank` is spread by: the spectra of the logits (for values, the errors in the residual stream), or
            `"damage"`, what cuts of single layers change in the last hidden states on up to 32 calibration texts. This takes
            about seven forward passes per layer and kind.
        objective (`str`, *optional*, defaults to `"logits"`):
            `"attention"` weights the keys of a row by their attention, which takes longer. It needs calibration, and attention
            without position terms in its logits (not XLNet, T5 and BEiT).
        distil_steps (`int`, *optional*, defaults to 0):
            Steps of training of what was cut, towards the hidden states of the original.
        distil_batches (*optional*):
            Batches for these steps: a list (read in a shuffled order), a DataLoader, or an iterator that does not end. Without
            it, they are the calibration batches, which are few: give 2,000 texts or more.
        seed (`int`, *optional*, defaults to 0):
            For the new dimensions of a larger width and the order of the texts of distillation; nothing else is random.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=64, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2))
    >>> narrow = convert_rank(model, 4, 8, calibration={"input_ids": torch.arange(1, 65)[None]})
    >>> type(narrow).__name__, narrow.config.qk_rank, narrow.config.v_head_dim, narrow.config.qk_scale
    ('RankBertModel', 4, 8, 0.25)
    """
    budget: dict[str, Any] = {"energy": energy, "mean_rank": mean_rank, "ranks": ranks}
    fit: dict[str, Any] = {"calibration": calibration, "objective": objective, "distil_steps": distil_steps}
    fit["distil_batches"] = distil_batches
    return convert_model(model, qk_rank, v_head_dim, **budget, **fit, seed=seed).model


@torch.inference_mode(False)
def convert_model(
    model: PreTrainedModel,
    qk_rank: Width = None,
    v_head_dim: Width = None,
    *,
    calibration: Inputs | None = None,
    energy: float | None = None,
    mean_rank: float | None = None,
    ranks: Choice = "spectra",
    objective: Objective = "logits",
    distil_steps: int = 0,
    distil_batches: Inputs | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Conversion:
    """[`convert_rank`] with a report; `progress(done, total)` is called after each layer and each step of training."""
    model = getattr(model, "_orig_mod", model)
    family = checked_family(model)
    given = (qk_rank, v_head_dim)
    check_request(*given, energy, mean_rank)
    check_choice(ranks, *given, mean_rank, calibration)
    check_calibration(family, calibration, objective, distil_steps)
    if distil_batches is not None and not distil_steps:
        raise ValueError("`distil_batches` are for distillation: give `distil_steps` as well, or leave them out.")
    slots = list(slots_of(model, family))
    parts = [Part.of_slot(family, slot) for slot in slots]
    check_sharing(model, family, slots)
    check_finite_weights(model, f"the given {type(model).__name__}")
    done = cuts_tried(parts, given, mean_rank, ranks)
    total = done + len(parts) * (1 + (calibration is not None)) + distil_steps
    budget = {"energy": energy, "mean_rank": mean_rank, "ranks": ranks}
    where = (model, family, parts, slots)
    widths = chosen_widths(*where, given, budget, calibration, lambda tried: progress(tried, total))
    say_widening(parts, widths)
    new, scales = empty_model(model, family, parts, widths)
    tensors, kept = [], []
    for part, scale in zip(parts, scales, strict=True):
        rank, value = widths[part.entry]
        narrow, logits = part.narrow_logits(rank, seed)
        narrow, values = part.narrow_values(narrow, value, seed)
        tensors.append(part.stored(narrow, scale))
        kept.append((logits, values))
        done += 1
        progress(done, total)
    fill(new, model, slots, tensors)
    if calibration is not None:
        for index, shares in calibrated(
            model, new, family, parts, slots, widths, scales, calibration, objective, seed
        ):
            kept[index] = shares
            done += 1
            progress(done, total)
    if distil_steps:
        texts: Any = calibration if distil_batches is None else distil_batches
        distil(new, model, texts, distil_steps, seed=seed, progress=lambda n: progress(done + n, total))
    check_finite_weights(new, "the converted model")
    sizes = [sum(tensor.numel() for tensor in stored.values()) for stored in tensors]
    return Conversion(new, reports(parts, widths, kept, sizes))


def check_sharing(model: PreTrainedModel, family: Family, slots: list[Slot]) -> None:
    """Refuse a model without layers, and shared weights that the config of the new model cannot describe."""
    if not slots:
        raise ValueError(f"the given {type(model).__name__} has no attention layers, so it has no rank to change.")
    owners: dict[torch.Tensor, str] = {}
    layers = layers_of(model) if family.layers else []
    if family.groups is None and len(set(layers)) < len(layers):
        raise ValueError("some layers of the model are the same module: replace them by copies (copy.deepcopy).")
    for slot in slots:
        for name, weight in slot.module.named_parameters(remove_duplicate=False):
            own = f"{name} of {slot.where}"
            if name in heads_of(family).names and (other := owners.setdefault(weight, own)) != own:
                raise ValueError(f"{other} and {own} are one parameter, but each gets its own factors: untie them.")


def checked_family(model: PreTrainedModel) -> Family:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"`model` must be a transformers model, got a {type(model).__name__}.")
    family = family_of_type(getattr(model.config, "model_type", None), type(model).__name__)
    converted_class(model, family)
    refuse_qk_norm(model.config)
    if isinstance(family.projections, FusedProjections) and getattr(model.config, "add_cross_attention", False):
        raise ValueError(f"the cross-attention of {family.name} (`add_cross_attention`) cannot be converted.")
    return family


def refuse_qk_norm(config) -> None:
    layers = range(config.num_hidden_layers) if hasattr(config, "head_geometry") else ()
    if any(config.head_geometry(layer).qk_norm for layer in layers):
        raise ValueError(
            "a model with qk_norm=True normalises queries and keys, so its logits are not a bilinear form and have no best "
            "factors of another rank. Train a model of that rank with qk_norm instead."
        )


def check_calibration(family: Family, calibration, objective: str, distil_steps: int) -> None:
    if objective not in ("logits", "attention"):
        raise ValueError(f"`objective` must be 'logits' or 'attention', got {objective!r}.")
    if isinstance(distil_steps, bool) or not isinstance(distil_steps, int) or distil_steps < 0:
        raise ValueError(f"`distil_steps` must be a whole number of at least 0, got {distil_steps!r}.")
    if calibration is None:
        if objective == "attention" or distil_steps:
            raise ValueError(
                "objective='attention' and `distil_steps` need texts: give some as `calibration`, or leave both out."
            )
        return
    if objective == "attention" and family.positions is not None:
        raise ValueError(
            f"objective='attention' is not for {family.name}, which adds {family.positions} to its logits: the attention on "
            "the texts cannot be computed from queries and keys. Use objective='logits'."
        )
    if not isinstance(calibration, Mapping) and iter(calibration) is calibration:
        raise ValueError(
            "`calibration` is read once per layer, and this iterator can be read only once: give a list of batches, or a "
            "DataLoader."
        )


def say_widening(parts: Iterable[Part], widths: list[Widths]) -> None:
    pairs = [(part.old, widths[part.entry]) for part in parts]
    if wider := sorted({(old.rank, new.rank) for old, new in pairs if new.rank > old.rank}):
        logger.warning(
            f"qk_rank={wider[0][1]} is above the rank {wider[0][0]} that the heads have: the model is widened, not cut. Its "
            "logits do not change; the new dimensions start with random queries and zero keys."
        )
    if wider := sorted({(old.value, new.value) for old, new in pairs if new.value > old.value}):
        logger.warning(
            f"v_head_dim={wider[0][1]} is above the width {wider[0][0]} that the values have: the model is widened, not cut. "
            "Its outputs do not change; the new values start random, and nothing reads them."
        )


@contextmanager
def originals_in_place(new_slots: list[Slot], slots: list[Slot]) -> Iterator[list[nn.Module]]:
    """The new model with the attention blocks of the original; yields its own blocks, to restore one by one."""
    own = [slot.module for slot in new_slots]
    try:
        for slot, original in zip(new_slots, slots, strict=True):
            setattr(slot.parent, slot.name, original.module)
        yield own
    finally:
        for slot, module in zip(new_slots, own, strict=True):
            setattr(slot.parent, slot.name, module)


@contextmanager
def cut_in_place(slot: Slot, part: Part, tensors: Tensors) -> Iterator[None]:
    """The original block at a slot with the queries and keys of `tensors`, whose missing dimensions are zero."""
    original = slot.module
    block = copy.deepcopy(original)
    with torch.no_grad():
        for name, tensor in part.in_old_place(tensors).items():
            block.get_parameter(name).copy_(tensor)
    setattr(slot.parent, slot.name, block)
    try:
        yield
    finally:
        setattr(slot.parent, slot.name, original)


def calibrated(
    model, new, family: Family, parts: list[Part], slots: list[Slot], widths, scales, calibration, objective, seed
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Narrow the layers in order, each on the outputs of the narrowed ones before: queries and keys, then values.

    Yields the index of a block and the shares of energy that it keeps.
    """
    new_slots = list(slots_of(new, family))
    with evaluating(model), originals_in_place(new_slots, slots) as own:
        for index, (part, slot) in enumerate(zip(parts, new_slots, strict=True)):
            rank, value = widths[part.entry]
            moments = mixed = None
            if rank < part.old.rank:
                (moments,) = gathered(new, [part], [slot], calibration, objective)
            tensors, logits = part.narrow_logits(rank, seed, moments)
            del moments  # they can be large: free them before those of the next layer are gathered
            if value < part.old.value:
                with cut_in_place(slot, part, tensors if rank < part.old.rank else part.tensors):
                    (mixed,) = gathered_values(new, [part], [slot], calibration)
            tensors, values = part.narrow_values(tensors, value, seed, mixed)
            with torch.no_grad():
                for name, tensor in part.stored(tensors, scales[index]).items():
                    own[index].get_parameter(name).copy_(tensor)
            setattr(slot.parent, slot.name, own[index])
            yield index, (logits, values)


def reports(
    parts: list[Part], widths: list[Widths], kept: Sequence[tuple[float, float]], sizes: Sequence[int]
) -> list[LayerReport]:
    """One report per entry; its shares of energy are means over its blocks."""
    found = []
    for entry in sorted({part.entry for part in parts}):
        own = [index for index, part in enumerate(parts) if part.entry == entry]
        logits, values = (sum(kept[index][kind] for index in own) / len(own) for kind in (0, 1))
        saved = sum(parts[index].parameters - sizes[index] for index in own)
        old, new = parts[own[-1]].old, widths[entry]
        found.append(LayerReport(entry, old.rank, new.rank, logits, saved, old.value, new.value, values))
    return found
