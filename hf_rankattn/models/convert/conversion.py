"""A stock or rank model at another query-key rank: `convert_rank`."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...probe.architectures import base_of
from ...probe.batches import Inputs, evaluating
from .calibration import calibration_batches, in_pieces
from .distil import distil
from .factors import best_factors, lost_energy, root_of_moment, root_of_rows, with_prior
from .families import Family, Slot, entries_of, family_of_type, rank_class_of, slots_of
from .heads import Heads, Sides, Tensors
from .moments import LayerMoments
from .ranks import check_request, ranks_for_budget, ranks_for_energy
from .weighted import refine_factors


logger = logging.get_logger(__name__)
Progress = Callable[[int, int], Any]
Objective = Literal["logits", "attention"]


class LayerReport(NamedTuple):
    """What became of one layer (of one ALBERT group): ranks, the share of logit energy kept, and weights saved."""

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
            A rank of at least the old one changes no logit; a larger one is warned of.
        calibration (*optional*):
            One batch (a dict of tensors), a list of batches, or a DataLoader; it is walked through once for each layer, so
            a generator will not do. Without it, each head's `W_Q W_K^T`, biases folded in, is truncated by its singular
            values. With it, the squared error of the row-centred logits on its tokens is made smallest, layer by layer
            on the model converted so far. Padding is left out.
        energy (`float`, *optional*): With `"auto"`, the share of logit energy that every layer keeps; 0.95 by default.
        mean_rank (`float`, *optional*): With `"auto"`, the mean of the ranks; layers that need more get more.
        objective (`str`, *optional*, defaults to `"logits"`):
            `"attention"` weights errors by the attention they meet, which has no closed form and takes longer, for BERT
            and ALBERT with calibration.
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
    return convert_model(
        model,
        qk_rank,
        calibration=calibration,
        energy=energy,
        mean_rank=mean_rank,
        objective=objective,
        distil_steps=distil_steps,
        seed=seed,
    ).model


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
    total = len(parts) * (1 + (calibration is not None)) + distil_steps
    ranks = chosen_ranks(model, parts, slots, qk_rank, energy, mean_rank, calibration)
    say_widening(parts, ranks)
    folded = []
    for done, part in enumerate(parts):
        folded.append(part.narrow(ranks[part.entry], part.weights_alone(), seed))
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
            distil(
                new, model, calibration, distil_steps, seed=seed, progress=lambda step: progress(done + step, total)
            )
    return Conversion(new, reports(parts, ranks, kept))


def checked_family(model: PreTrainedModel) -> Family:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"`model` must be a transformers model, got a {type(model).__name__}.")
    family = family_of_type(getattr(model.config, "model_type", None), type(model).__name__)
    rank_class_of(model, family)
    refuse_qk_norm(model.config)
    return family


def refuse_qk_norm(config) -> None:
    if hasattr(config, "head_geometry") and any(
        config.head_geometry(layer).qk_norm for layer in range(config.num_hidden_layers)
    ):
        raise ValueError(
            "a model with qk_norm=True divides each query and key by its length, so its logits are not a bilinear form and "
            "have no best factors of another rank. Train a model of that rank with qk_norm instead."
        )


def check_calibration(family: Family, calibration, objective: str, distil_steps: int) -> None:
    if objective not in ("logits", "attention"):
        raise ValueError(f"`objective` must be 'logits' or 'attention', got {objective!r}.")
    if isinstance(distil_steps, bool) or not isinstance(distil_steps, int) or distil_steps < 0:
        raise ValueError(f"`distil_steps` must be a whole number of at least 0, got {distil_steps!r}.")
    if calibration is None:
        if objective == "attention" or distil_steps:
            raise ValueError(
                "objective='attention' and `distil_steps` need texts: give batches as `calibration`, or leave them out."
            )
        return
    if objective == "attention" and family.name == "XLNet":
        raise ValueError(
            "objective='attention' is for BERT and ALBERT: XLNet's keys differ by pair of tokens, and the tensor it needs "
            "would be larger than the model. Use objective='logits'."
        )
    if not isinstance(calibration, Mapping) and iter(calibration) is calibration:
        raise ValueError(
            "`calibration` is walked through once for each layer, and this iterator can be walked through only once: give a "
            "list of batches, a DataLoader, or an iterable that starts anew each time."
        )


class Roots(NamedTuple):
    """What [`best_factors`] needs: roots of the second moments on both sides of a form, and the form."""

    query: torch.Tensor
    key: torch.Tensor
    form: torch.Tensor


class Part:
    """The queries and keys of one attention module of the original, as tensors, and how they are narrowed."""

    def __init__(self, heads: Heads, tensors: Tensors, num_heads: int, scale: float, entry: int, where: str):
        self.heads, self.tensors, self.num_heads = heads, tensors, num_heads
        self.scale, self.entry, self.where = scale, entry, where
        self.old_rank = heads.rank_of(tensors, num_heads)
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise ValueError(f"{name} of {where} is {tensor.dtype}: convert the model before it is quantised.")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of {where} holds NaN or Inf: no factors can be made of it.")

    @classmethod
    def of_slot(cls, family: Family, slot: Slot) -> "Part":
        module: Any = slot.module
        named = dict(module.named_parameters())
        tensors = {name: named[name].detach() for name in family.heads.names}
        num_heads = module.n_head if family.name == "XLNet" else module.num_attention_heads
        scale = module.scale if family.name == "XLNet" else module.scaling
        return cls(family.heads, tensors, num_heads, float(scale), slot.entry, slot.where)

    def sides(self) -> Sides:
        return self.heads.sides(self.tensors, self.num_heads)

    def weights_alone(self) -> Roots:
        """Roots of the moments that isotropic inputs have on both sides, and the form between them."""
        sides = self.sides()
        return Roots(root_of_rows(sides.query), root_of_rows(sides.key), sides.form)

    def seen(self, moments: LayerMoments) -> Roots:
        """Roots of the moments that calibration texts have on both sides, and the form between them."""
        query_prior, key_prior, form = self.weights_alone()
        query, key = (m.to(form) for m in (moments.query, moments.key))
        return Roots(
            root_of_moment(with_prior(query, query_prior)),
            root_of_moment(with_prior(key, key_prior)),
            form,
        )

    def narrow(self, rank: int, roots: Roots, seed: int, pairs: torch.Tensor | None = None) -> tuple[Tensors, float]:
        """The tensors of this module at `rank`, and the share of logit energy that they keep."""
        if rank == self.old_rank:
            return {name: tensor.clone() for name, tensor in self.tensors.items()}, 1.0
        if rank > self.old_rank:
            return self.widened(rank, seed), 1.0
        best = best_factors(*roots, rank)
        query, key = best.query, best.key
        lost = best.lost
        if pairs is not None:
            query, key = refine_factors(pairs, query, key)
            lost = lost_energy(*roots, query, key)
        total = best.singular.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
        return self.heads.fold(self.tensors, query, key), float(1 - lost.sum() / total)

    def widened(self, rank: int, seed: int) -> Tensors:
        words = np.random.SeedSequence([seed, self.entry]).generate_state(2)
        generator = torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
        query = self.sides().query[:, : self.heads.hidden_size(self.tensors)]
        fresh = torch.randn(*query.shape[:2], rank - self.old_rank, generator=generator) * float(query.std())
        return self.heads.widen(self.tensors, self.num_heads, rank, fresh)


def chosen_ranks(model, parts: list[Part], slots: list[Slot], qk_rank, energy, mean_rank, calibration) -> list[int]:
    """One rank per layer (per group), given or chosen from the spectra of the model as it is."""
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
        raise ValueError(
            f"`qk_rank` has {len(qk_rank)} entries, the model has {count} layers with weights of their own."
        )
    return [int(rank) for rank in qk_rank]


def ranks_from_spectra(spectra, old_ranks: list[int], energy: float | None, mean_rank: float | None) -> list[int]:
    """Ranks from `(entry, singular values)` of every attention module; modules of one entry count together."""
    count = 1 + max(entry for entry, _ in spectra)
    joined = [torch.cat([singular for entry, singular in spectra if entry == index]) for index in range(count)]
    widest = max(old_ranks)
    if mean_rank is None:
        # at the rank the heads have, nothing is lost, whatever the spectra say
        return [min(rank, widest) for rank in ranks_for_energy(joined, 0.95 if energy is None else energy)]
    if mean_rank > widest:
        raise ValueError(
            f"`mean_rank`={mean_rank} is more than the heads have, which is {widest}: there is nothing to cut."
        )
    return ranks_for_budget([singular[:, :widest] for singular in joined], mean_rank)


def say_widening(parts: list[Part], ranks: list[int]) -> None:
    if wider := sorted({(part.old_rank, ranks[part.entry]) for part in parts if ranks[part.entry] > part.old_rank}):
        old, new = wider[0]
        logger.warning(
            f"qk_rank={new} is above the rank {old} that the heads have: the model is widened, not cut. Its logits stay as "
            "they are; the new dimensions start with random queries and zero keys."
        )


def scales_of(parts: Iterable[Part]) -> list[float]:
    """The factor on the logits of each layer (of each group)."""
    return [scale for _, scale in sorted({part.entry: part.scale for part in parts}.items())]


def narrowed_config(config, family: Family, scales: list[float], ranks: list[int]):
    """The configuration of the rank twin: new ranks, and the scale that the logits have had."""
    config_class = type(config) if hasattr(config, "head_geometry") else family.rank_config
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
            # a width that was left open stays open
            stored[name] = None if name == "v_head_dim" and stored.get(name) is None else column[0]
            continue
        stored[name] = None
        for layer, value in enumerate(column):
            layers.setdefault(layer, {})[name] = value
    if layers:
        stored["per_layer_config"] = layers
    return config_class.from_dict(stored)


def built(model: PreTrainedModel, family: Family, slots: list[Slot], config, folded) -> PreTrainedModel:
    """The rank twin with copies of all weights of the model, and the folded ones in their place."""
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
    """Raised inside a forward pass when all that was wanted of it has been seen."""


def gathered(
    model: PreTrainedModel, parts: list[Part], slots: list[Slot], calibration: Inputs, paired: bool = False
) -> list[LayerMoments]:
    """The moments of some attention modules of `model`, each at `slots`, in one walk through the calibration.

    The forward pass ends when the last of them has been seen.
    """
    base = base_of(model)
    causal = bool(getattr(base.config, "is_decoder", False)) or getattr(base.config, "attn_type", "bi") == "uni"
    gatherers = [LayerMoments(part.heads, part.sides(), part.scale, causal, part.where, paired) for part in parts]
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
            # moments are sums over texts: a CPU is as fast with few at a time, and their activations take less room
            for piece in in_pieces(batch, 2 if base.device.type == "cpu" else None):
                current.update(batch=piece, left=applications)
                try:
                    base(**piece)
                except Finished:
                    pass
    return [gatherer.finish() for gatherer in gatherers]


@contextmanager
def originals_in_place(new_slots: list[Slot], slots: list[Slot]) -> Iterator[list[nn.Module]]:
    """The new model with the attention of the original in every layer; yields its own modules, to be put back one by one."""
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
    """Narrow the layers in order, each on what reaches it through those before; yields (index, share of energy kept)."""
    new_slots = list(slots_of(new, family))
    with evaluating(model), originals_in_place(new_slots, slots) as own:
        for index, (part, slot) in enumerate(zip(parts, new_slots, strict=True)):
            rank = ranks[slot.entry]
            share = 1.0
            if rank < part.old_rank:
                (moments,) = gathered(new, [part], [slot], calibration, paired=objective == "attention")
                tensors, share = part.narrow(rank, part.seen(moments), seed, moments.pairs)
                del moments  # before the next layer's are gathered, as those of one layer may be large
                with torch.no_grad():
                    for name, tensor in tensors.items():
                        own[index].get_parameter(name).copy_(tensor)
            setattr(slot.parent, slot.name, own[index])
            yield index, share


def reports(parts: list[Part], ranks: list[int], kept: Iterable[float]) -> list[LayerReport]:
    """One report per entry; the modules of an entry count alike in its share of energy."""
    shares: dict[int, list[float]] = {}
    saved: dict[int, int] = {}
    old: dict[int, int] = {}
    for part, share in zip(parts, kept, strict=True):
        entry = part.entry
        shares.setdefault(entry, []).append(share)
        old[entry] = part.old_rank
        saved[entry] = saved.get(entry, 0) + part.parameters * (part.old_rank - ranks[entry]) // part.old_rank
    return [
        LayerReport(entry, old[entry], ranks[entry], sum(shares[entry]) / len(shares[entry]), saved[entry])
        for entry in sorted(shares)
    ]
