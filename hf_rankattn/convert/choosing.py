"""The widths of each layer: those that were asked for, or chosen from spectra, from errors, or by damage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..families.row import Family
from ..families.slots import Slot
from ..files.running import Inputs
from .building import empty_model, fill
from .by_damage import LastStates, damage_curve, ranks_for_damage, tried_ranks
from .factors import best_factors
from .gathering import gathered, gathered_values, written_errors
from .moments import MixedMoments
from .part import Part, Roots, Widths
from .ranks import ranks_for_budget, ranks_for_energy


KINDS = ("qk_rank", "v_head_dim")


def chosen_widths(
    model: PreTrainedModel,
    family: Family,
    parts: list[Part],
    slots: list[Slot],
    given: tuple,
    budget: dict[str, Any],
    calibration: Inputs | None,
    progress: Callable[[int], Any],
) -> list[Widths]:
    """The widths of each layer (of each group): the given ones, the old ones, or those that `"auto"` chooses.

    `budget` has `energy`, `mean_rank` and `ranks` as in [`convert_rank`]; `progress(done)` counts the cuts that are tried.
    """
    if family.stock_width is not None:
        return one_width(family, parts, given)
    energy, mean_rank, ranks = budget["energy"], budget["mean_rank"], budget["ranks"]
    old = old_widths(parts)
    free = free_kinds(given)
    columns = asked_widths(given, old)
    if mean_rank is not None and (ranks == "damage" or 1 in free):
        if calibration is None:
            raise ValueError(
                "v_head_dim='auto' with `mean_rank` compares the errors in the residual stream on texts: give some as "
                "`calibration`, or choose by `energy`."
            )
        where = (model, family, parts, slots)
        tried = (
            damages(*where, free, mean_rank, calibration, progress)
            if ranks == "damage"
            else errors_in_stream(*where, calibration)
        )
        items = [(entry, kind) for entry in range(len(old)) for kind in free]
        curves = [damage_curve(tried[entry, kind], old[entry][kind]) for entry, kind in items]
        for (entry, kind), width in zip(items, ranks_for_damage(curves, mean_rank), strict=True):
            columns[kind][entry] = width
        return [Widths(*pair) for pair in zip(*columns, strict=True)]
    if 0 in free:
        columns[0] = ranks_by_spectra(model, parts, slots, energy, mean_rank, calibration)
    if 1 in free:
        columns[1] = widths_by_spectra(model, parts, slots, energy, calibration)
    return [Widths(*pair) for pair in zip(*columns, strict=True)]


def old_widths(parts: Sequence[Part]) -> list[Widths]:
    return [widths for _, widths in sorted({part.entry: part.old for part in reversed(parts)}.items())]


def asked_widths(given: Sequence, old: Sequence[Widths]) -> list[list[int]]:
    """The query-key ranks and the value widths that are asked for, and the old ones where they are kept or chosen later."""
    return [
        [width[kind] for width in old] if asked in (None, "auto") else spread(KINDS[kind], asked, len(old))
        for kind, asked in enumerate(given)
    ]


def free_kinds(given: Sequence) -> list[int]:
    """The kinds of widths, 0 for queries and keys and 1 for values, that are to be chosen."""
    return [kind for kind in (0, 1) if given[kind] == "auto"]


def cuts_tried(parts: Sequence[Part], given: tuple, mean_rank: float | None, ranks: str) -> int:
    """The number of cuts that a choice by damage tries; a `ValueError` if the mean is above all widths."""
    if mean_rank is None:
        return 0
    if mean_rank > (widest := max(width[kind] for width in old_widths(parts) for kind in free_kinds(given))):
        raise ValueError(f"`mean_rank`={mean_rank} is more than the heads have, which is {widest}.")
    if ranks != "damage":
        return 0
    return sum(len(tried_ranks(mean_rank, width[kind])) for width in old_widths(parts) for kind in free_kinds(given))


def one_width(family: Family, parts: list[Part], given: tuple) -> list[Widths]:
    """The widths of a stock model whose config holds one number for queries, keys and values of all layers."""
    old = sorted({width for part in parts for width in part.old})
    if given[0] != given[1] or not isinstance(given[0], int):
        asked = ", ".join(f"{name}={value!r}" for name, value in zip(("qk_rank", "v_head_dim"), given, strict=True))
        raise ValueError(
            f"a stock {family.name} config holds one width for queries, keys and values of all layers, `{family.stock_width}` "
            f"(here {', '.join(map(str, old))}), and got {asked}. Give one integer for both: "
            f"qk_rank={old[0] // 2 or 1}, v_head_dim={old[0] // 2 or 1}."
        )
    return [Widths(*given) for _ in parts]


def ranks_by_spectra(model, parts, slots, energy, mean_rank, calibration) -> list[int]:
    """The query-key rank of each layer (of each group) by the spectra of its logits."""
    if calibration is None:
        roots = [part.weights_alone() for part in parts]
    else:
        moments = gathered(model, parts, slots, calibration)
        roots = [part.seen(found) for part, found in zip(parts, moments, strict=True)]
    spectra = [logit_spectrum(part, root) for part, root in zip(parts, roots, strict=True)]
    return ranks_from_spectra(spectra, [width.rank for width in old_widths(parts)], energy, mean_rank)


def widths_by_spectra(model, parts, slots, energy, calibration) -> list[int]:
    """The value width of each layer (of each group) that keeps the share `energy` of what its heads write."""
    mixed = [None] * len(parts) if calibration is None else gathered_values(model, parts, slots, calibration)
    spectra = [value_spectrum(part, seen) for part, seen in zip(parts, mixed, strict=True)]
    return ranks_from_spectra(spectra, [width.value for width in old_widths(parts)], energy, None)


def logit_spectrum(part: Part, roots: Roots) -> tuple[int, torch.Tensor]:
    """The entry of a block, and the singular values of its logits."""
    return part.entry, best_factors(*roots, rank=1).singular * part.scale


def value_spectrum(part: Part, mixed: MixedMoments | None) -> tuple[int, torch.Tensor]:
    """The entry of a block, and the singular values of what its heads write."""
    return part.entry, best_factors(*part.values_seen(mixed), rank=1).singular


def errors_in_stream(model, family, parts, slots, calibration) -> dict[tuple[int, int], dict[int, float]]:
    """The error of what each entry writes into the residual stream, by kind and width."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for part, written in zip(parts, written_errors(model, parts, slots, calibration), strict=True):
        for kind, errors in enumerate(written):
            own = found.setdefault((part.entry, kind), {})
            for width, error in errors.items():
                own[width] = own.get(width, 0.0) + error
    return found


def damages(
    model, family, parts, slots, free, mean_rank, calibration, progress
) -> dict[tuple[int, int], dict[int, float]]:
    """What cuts of one kind in one entry change in the last hidden states, by kind and width."""
    old, done = old_widths(parts), 0
    moments = gathered(model, parts, slots, calibration) if 0 in free else [None] * len(parts)
    mixed = gathered_values(model, parts, slots, calibration) if 1 in free else [None] * len(parts)
    judge = LastStates(model, calibration)
    found: dict[tuple[int, int], dict[int, float]] = {}
    for entry in range(len(old)):
        for kind in free:
            own = found.setdefault((entry, kind), {})
            for width in tried_ranks(mean_rank, old[entry][kind]):
                widths = list(old)
                widths[entry] = Widths(width, old[entry].value) if kind == 0 else Widths(old[entry].rank, width)
                new, scales = empty_model(model, family, parts, widths)
                tensors = []
                for part, seen, values, scale in zip(parts, moments, mixed, scales, strict=True):
                    rank, value = widths[part.entry]
                    # the closed form: the descent from it changes the damage little
                    narrow, _ = part.narrow_logits(rank, 0, seen, descend=False)
                    tensors.append(part.stored(part.narrow_values(narrow, value, 0, values)[0], scale))
                fill(new, model, slots, tensors)
                own[width] = judge.damage(new)
                done += 1
                progress(done)
    return found


def spread(name: str, given: int | Sequence[int], count: int) -> list[int]:
    """One width for each of `count` layers (groups)."""
    if not isinstance(given, list | tuple):
        return [int(given)] * count  # type: ignore[arg-type]
    if len(given) != count:
        raise ValueError(f"`{name}` has {len(given)} entries, the model has {count} layers with their own weights.")
    return [int(width) for width in given]


def by_entry(spectra: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """The singular values of the blocks of each entry together."""
    count = 1 + max(entry for entry, _ in spectra)
    return [torch.cat([singular for entry, singular in spectra if entry == index]) for index in range(count)]


def ranks_from_spectra(spectra, old_ranks: list[int], energy: float | None, mean_rank: float | None) -> list[int]:
    """Ranks from `(entry, singular values)` of every attention block; those of one entry count together."""
    found, widest = by_entry(spectra), max(old_ranks)
    if mean_rank is None:
        ranks = ranks_for_energy(found, 0.95 if energy is None else energy)
        # at the rank of the heads nothing is lost, and spectra of XLNet are longer
        return [min(rank, old) for rank, old in zip(ranks, old_ranks, strict=True)]
    if mean_rank > widest:
        raise ValueError(f"`mean_rank`={mean_rank} is more than the heads have, which is {widest}.")
    return ranks_for_budget([values[:, :old] for values, old in zip(found, old_ranks, strict=True)], mean_rank)
