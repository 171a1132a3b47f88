"""A stock or rank model at another query-key rank: `convert_rank`."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import models
from ..families.architectures import base_of, layers_of
from ..families.row import Family
from ..families.slots import Slot, entries_of, family_of_type, slots_of
from ..files.running import Inputs, evaluating
from ..models.budget import check_finite_weights
from .calibration import calibration_batches, in_pieces
from .distil import distil
from .factors import best_factors
from .heads import heads_of
from .moments import LayerMoments
from .part import Part
from .ranks import check_request, ranks_for_budget, ranks_for_energy


logger = logging.get_logger(__name__)
Progress = Callable[[int, int], Any]
Objective = Literal["logits", "attention"]


class LayerReport(NamedTuple):
    """The ranks of one layer (of one ALBERT group), the share of logit energy it keeps, and the weights it saves."""

    layer: int
    old_rank: int
    rank: int
    energy_kept: float
    parameters_saved: int

    def as_dict(self) -> dict[str, int | float]:
        return self._asdict()


class Conversion(NamedTuple):
    """The converted model, and one [`LayerReport`] per layer (per group)."""

    model: PreTrainedModel
    layers: list[LayerReport]


def convert_rank(
    model: PreTrainedModel,
    qk_rank: int | Sequence[int] | Literal["auto"],
    *,
    calibration: Inputs | None = None,
    energy: float | None = None,
    mean_rank: float | None = None,
    objective: Objective = "logits",
    distil_steps: int = 0,
    seed: int = 0,
) -> PreTrainedModel:
    """The same model with another query-key rank, as close to the original as that rank allows.

    Args:
        model: A stock or rank model of BERT, ALBERT or XLNet, of any task class. It is left as it is.
        qk_rank (`int`, list of `int`, or `"auto"`):
            The new rank: one for all layers, one per layer (ALBERT: per group), or chosen from the spectra of the logits.
            A rank of at least the old one changes no logit; a larger rank gives a warning.
        calibration (*optional*):
            One batch (a dict of tensors), a list of batches, or a DataLoader; it is read once per layer, so a generator is
            refused. Without it, each head's `W_Q W_K^T`, with biases, is truncated by its singular values. With it, the error
            of each text's row-centred logits on its own rows is minimised, layer by layer on the model converted so far:
            the variance over the keys of a row of the change of its logits, summed over rows, by alternating least squares
            from a closed form. Padding is left out.
        energy (`float`, *optional*): With `"auto"`, the share of logit energy that every layer keeps; 0.95 by default.
        mean_rank (`float`, *optional*): With `"auto"`, the mean of the ranks; layers that need more get more.
        objective (`str`, *optional*, defaults to `"logits"`):
            `"attention"` weights the keys of a row by their attention, which takes longer, for BERT and ALBERT with
            calibration.
        distil_steps (`int`, *optional*, defaults to 0):
            Steps of training towards the hidden states of the original, on the calibration batches and variations of them.
        seed (`int`, *optional*, defaults to 0):
            For the new dimensions of a larger rank and the texts of distillation; nothing else is random.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=64, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2))
    >>> narrow = convert_rank(model, 4, calibration={"input_ids": torch.arange(1, 65)[None]})
    >>> type(narrow).__name__, narrow.config.qk_rank, narrow.config.qk_scale
    ('RankBertModel', 4, 0.25)
    """
    budget: dict[str, Any] = {"energy": energy, "mean_rank": mean_rank}
    fit: dict[str, Any] = {"calibration": calibration, "objective": objective, "distil_steps": distil_steps}
    return convert_model(model, qk_rank, **budget, **fit, seed=seed).model


@torch.inference_mode(False)
def convert_model(
    model: PreTrainedModel,
    qk_rank,
    *,
    calibration: Inputs | None = None,
    energy: float | None = None,
    mean_rank: float | None = None,
    objective: Objective = "logits",
    distil_steps: int = 0,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Conversion:
    """[`convert_rank`] with a report; `progress(done, total)` is called after each layer and each step of training."""
    model = getattr(model, "_orig_mod", model)
    family = checked_family(model)
    check_request(qk_rank, energy, mean_rank)
    check_calibration(family, calibration, objective, distil_steps)
    slots = list(slots_of(model, family))
    parts = [Part.of_slot(family, slot) for slot in slots]
    check_sharing(model, family, slots)
    check_finite_weights(model, f"the given {type(model).__name__}")
    total = len(parts) * (1 + (calibration is not None)) + distil_steps
    ranks = chosen_ranks(model, parts, slots, qk_rank, energy, mean_rank, calibration)
    say_widening(parts, ranks)
    folded = []
    for done, part in enumerate(parts):
        folded.append(part.narrow(ranks[part.entry], seed))
        progress(done + 1, total)
    new = built(model, family, slots, narrowed_config(model.config, family, scales_of(parts), ranks), folded)
    kept = [share for _, share in folded]
    if calibration is not None:
        done = len(parts)
        for index, share in calibrated(model, new, family, parts, slots, ranks, calibration, objective, seed):
            kept[index] = share
            done += 1
            progress(done, total)
        if distil_steps:
            done = total - distil_steps
            distil(new, model, calibration, distil_steps, seed=seed, progress=lambda n: progress(done + n, total))
    check_finite_weights(new, "the converted model")
    return Conversion(new, reports(parts, ranks, kept))


def check_sharing(model: PreTrainedModel, family: Family, slots: list[Slot]) -> None:
    """Refuse a model without layers, and shared weights that the config of the rank twin cannot describe."""
    if not slots:
        raise ValueError(f"the given {type(model).__name__} has no attention layers, so it has no rank to change.")
    owners: dict[torch.Tensor, str] = {}
    layers = layers_of(model)
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
    rank_class_of(model, family)
    refuse_qk_norm(model.config)
    return family


def rank_class_of(model: PreTrainedModel, family: Family) -> type[PreTrainedModel]:
    """The rank class that a model of a stock or a rank class becomes."""
    own = type(model)
    if hasattr(model.config, "head_geometry"):
        return own
    if getattr(transformers, own.__name__, None) is not own:
        raise ValueError(
            f"{own.__name__} is a class of its own, defined in {own.__module__}, and has no rank twin. Convert a stock "
            f"{family.name} class, or derive yours from a {family.rank_twin} class."
        )
    return getattr(models, f"Rank{own.__name__}")


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
            "objective='attention' is for BERT and ALBERT: XLNet has one key per pair of tokens, and their moments would be "
            "larger than the model. Use objective='logits'."
        )
    if not isinstance(calibration, Mapping) and iter(calibration) is calibration:
        raise ValueError(
            "`calibration` is read once per layer, and this iterator can be read only once: give a list of batches, or a "
            "DataLoader."
        )


def chosen_ranks(model, parts: list[Part], slots: list[Slot], qk_rank, energy, mean_rank, calibration) -> list[int]:
    """One rank per layer (per group): the given one, or one chosen from the spectra of the original."""
    if qk_rank != "auto":
        return spread_ranks(qk_rank, 1 + max(part.entry for part in parts))
    if calibration is None:
        roots = [part.weights_alone() for part in parts]
    else:
        moments = gathered(model, parts, slots, calibration)
        roots = [part.seen(found) for part, found in zip(parts, moments, strict=True)]
    return ranks_from_spectra(
        [(part.entry, best_factors(*root, 1).singular * part.scale) for part, root in zip(parts, roots, strict=True)],
        [part.old_rank for part in parts],
        energy,
        mean_rank,
    )


def spread_ranks(qk_rank: int | Sequence[int], count: int) -> list[int]:
    """One rank for each of `count` layers (groups)."""
    if not isinstance(qk_rank, list | tuple):
        return [int(qk_rank)] * count  # type: ignore[arg-type]
    if len(qk_rank) != count:
        raise ValueError(f"`qk_rank` has {len(qk_rank)} entries, the model has {count} layers with their own weights.")
    return [int(rank) for rank in qk_rank]


def ranks_from_spectra(spectra, old_ranks: list[int], energy: float | None, mean_rank: float | None) -> list[int]:
    """Ranks from `(entry, singular values)` of every attention module; modules of one entry count together."""
    count = 1 + max(entry for entry, _ in spectra)
    joined = [torch.cat([singular for entry, singular in spectra if entry == index]) for index in range(count)]
    ranks_of = {entry: rank for (entry, _), rank in zip(spectra, old_ranks, strict=True)}
    widest = max(old_ranks)
    if mean_rank is None:
        ranks = ranks_for_energy(joined, 0.95 if energy is None else energy)
        # at the rank of the heads nothing is lost, and spectra of XLNet are longer
        return [min(rank, ranks_of[entry]) for entry, rank in enumerate(ranks)]
    if mean_rank > widest:
        raise ValueError(f"`mean_rank`={mean_rank} is more than the heads have, which is {widest}.")
    return ranks_for_budget([singular[:, : ranks_of[entry]] for entry, singular in enumerate(joined)], mean_rank)


def say_widening(parts: list[Part], ranks: list[int]) -> None:
    if wider := sorted({(part.old_rank, ranks[part.entry]) for part in parts if ranks[part.entry] > part.old_rank}):
        old, new = wider[0]
        logger.warning(
            f"qk_rank={new} is above the rank {old} that the heads have: the model is widened, not cut. Its logits do not "
            "change; the new dimensions start with random queries and zero keys."
        )


def scales_of(parts: Iterable[Part]) -> list[float]:
    """The factor on the logits of each layer (of each group)."""
    return [scale for _, scale in sorted({part.entry: part.scale for part in parts}.items())]


def narrowed_config(config, family: Family, scales: list[float], ranks: list[int]):
    """The configuration of the rank twin: new ranks, and the old scale of the logits."""
    config_class = type(config) if hasattr(config, "head_geometry") else getattr(models, f"{family.rank_twin}Config")
    stored = config.to_dict()
    old = config_class.from_dict(stored)
    entries = [entry for entry, count in enumerate(entries_of(config, family)) for _ in range(count)]
    columns: dict[str, list] = {
        "qk_rank": [ranks[entry] for entry in entries],
        "qk_scale": [scales[entry] for entry in entries],
        "v_head_dim": [old.head_geometry(layer).v_head_dim for layer in range(old.num_hidden_layers)],
    }
    stored.pop("per_layer_config", None)
    layers: dict[int, dict[str, Any]] = {}
    for name, column in columns.items():
        if len(set(column)) == 1:
            # a value width that was not set stays unset
            stored[name] = None if name == "v_head_dim" and stored.get(name) is None else column[0]
            continue
        stored[name] = None
        for layer, value in enumerate(column):
            layers.setdefault(layer, {})[name] = value
    if layers:
        stored["per_layer_config"] = layers
    return config_class.from_dict(stored)


def built(model: PreTrainedModel, family: Family, slots: list[Slot], config, folded) -> PreTrainedModel:
    """The rank twin with the folded tensors, and copies of all other weights of the model."""
    options = {"add_pooling_layer": False} if model is base_of(model) and getattr(model, "pooler", 0) is None else {}
    with torch.device("meta"):
        new = rank_class_of(model, family)(config, **options)
    replaced = {}
    places = {module: name for name, module in model.named_modules()}
    for slot, (tensors, _) in zip(slots, folded, strict=True):
        replaced.update({f"{places[slot.module]}.{name}": tensor for name, tensor in tensors.items()})
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
    return new.train(model.training)


class Finished(Exception):
    """Ends a forward pass when all moments of a batch are gathered."""


def gathered(
    model: PreTrainedModel,
    parts: list[Part],
    slots: list[Slot],
    calibration: Inputs,
    objective: Objective | None = None,
) -> list[LayerMoments]:
    """The moments of the attention modules at `slots`, from one pass over the calibration.

    Each forward pass ends after the last of these modules.
    """
    base = base_of(model)
    causal = bool(getattr(base.config, "is_decoder", False)) or getattr(base.config, "attn_type", "bi") == "uni"
    gatherers = [LayerMoments(part.heads, part.sides(), part.scale, causal, part.where, objective) for part in parts]
    current: dict[str, Any] = {}

    def watch(gatherer: LayerMoments):
        def hook(module, args, kwargs):
            gatherer(module, args, kwargs, current["batch"])
            current["left"] -= 1
            if not current["left"]:
                raise Finished

        return hook

    applications = sum(slot.applications for slot in slots)
    with evaluating(model), ExitStack() as stack:
        for gatherer, slot in zip(gatherers, slots, strict=True):
            stack.callback(slot.module.register_forward_pre_hook(watch(gatherer), with_kwargs=True).remove)
        for batch in calibration_batches(base, calibration):
            # moments are sums over texts: on a CPU few texts at a time are as fast and take less memory
            for piece in in_pieces(batch, 2 if base.device.type == "cpu" else None):
                current.update(batch=piece, left=applications)
                with suppress(Finished):
                    base(**piece)
    return [gatherer.finish() for gatherer in gatherers]


@contextmanager
def originals_in_place(new_slots: list[Slot], slots: list[Slot]) -> Iterator[list[nn.Module]]:
    """The new model with the attention of the original in every layer; yields its own modules, to restore one by one."""
    own = [slot.module for slot in new_slots]
    try:
        for slot, original in zip(new_slots, slots, strict=True):
            setattr(slot.parent, slot.name, original.module)
        yield own
    finally:
        for slot, module in zip(new_slots, own, strict=True):
            setattr(slot.parent, slot.name, module)


def calibrated(
    model, new, family: Family, parts: list[Part], slots: list[Slot], ranks: list[int], calibration, objective, seed
) -> Iterator[tuple[int, float]]:
    """Narrow the layers in order, each on the outputs of the narrowed ones before; yields (index, energy kept)."""
    new_slots = list(slots_of(new, family))
    with evaluating(model), originals_in_place(new_slots, slots) as own:
        for index, (part, slot) in enumerate(zip(parts, new_slots, strict=True)):
            rank = ranks[slot.entry]
            share = 1.0
            if rank < part.old_rank:
                (moments,) = gathered(new, [part], [slot], calibration, objective)
                tensors, share = part.narrow(rank, seed, moments)
                del moments  # they can be large: free them before those of the next layer are gathered
                with torch.no_grad():
                    for name, tensor in tensors.items():
                        own[index].get_parameter(name).copy_(tensor)
            setattr(slot.parent, slot.name, own[index])
            yield index, share


def reports(parts: list[Part], ranks: list[int], kept: Iterable[float]) -> list[LayerReport]:
    """One report per entry; its share of energy is the mean over its modules."""
    pairs, found = list(zip(parts, kept, strict=True)), []
    for entry in sorted({part.entry for part in parts}):
        shares = [share for part, share in pairs if part.entry == entry]
        own = [part for part in parts if part.entry == entry]
        saved = sum(part.parameters * (part.old_rank - ranks[entry]) // part.old_rank for part in own)
        found.append(LayerReport(entry, own[-1].old_rank, ranks[entry], sum(shares) / len(shares), saved))
    return found
