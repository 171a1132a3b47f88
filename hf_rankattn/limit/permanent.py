"""A limit that becomes the weights of a model: for the families that can be converted."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..convert.building import empty_model, fill
from ..convert.checkpoint import load, stock_heads
from ..convert.conversion import check_sharing, checked_family
from ..convert.part import Part, Widths
from ..families.row import Family
from ..families.slots import slots_of
from ..files.atomic import fresh_folder
from ..files.checkpoints import readable
from ..files.companions import checkpoint_folder, copy_companions
from ..hub.sharing import MODEL_FOLDER, card_of
from .heads import HeadLimits


@torch.no_grad()
@torch.inference_mode(False)
def permanent(limit: Any) -> PreTrainedModel:
    """The model of a limit with narrower weights in place of the projections; the limit and its model do not change.

    Where the key heads of a layer have different ranks, the layer gets the largest.
    """
    with limit.paused():
        model = limit.model
        family = checked_family(model)
        slots = list(slots_of(model, family))
        check_sharing(model, family, slots)
        parts = [Part.of_slot(family, slot) for slot in slots]
        heads = list(limit.heads)
        if len(parts) != len(heads) or any(slot.applications > 1 for slot in slots):
            raise ValueError(
                f"the limit has projections for {len(heads)} layers, and {type(model).__name__} has {len(parts)} attention blocks with "
                "weights of their own: layers that share weights, and cross-attention, cannot keep a limit. Use convert_rank."
            )
        widths = [Widths(max(head.key_ranks), max(head.value_widths)) for head in heads]
        check_widths(family, widths)
        new, scales = empty_model(model, family, parts, widths)
        tensors = [folded(part, head, scale) for part, head, scale in zip(parts, heads, scales, strict=True)]
        fill(new, model, slots, tensors)
    return new


def check_widths(family: Family, widths: list[Widths]) -> None:
    numbers = {width for pair in widths for width in pair}
    if family.stock_width is not None and len(numbers) > 1:
        raise ValueError(
            f"{family.name} holds one width for queries, keys and values of all layers in `{family.stock_width}`, and the limit has "
            f"{', '.join(map(str, sorted(numbers)))}: give limit_rank one integer for both."
        )


def folded(part: Part, head: HeadLimits, scale: float) -> dict[str, torch.Tensor]:
    """The weights of one attention block with the projections of its heads in them."""
    tensors, shared = part.tensors, head.widths.heads // head.widths.groups
    if head.query is not None and head.key is not None:
        tensors = part.heads.fold(
            tensors, head.query.cpu().double(), head.key.cpu().double().repeat_interleave(shared, 0)
        )
    if head.value is not None and head.output is not None:
        value = head.value.cpu().double().repeat_interleave(shared, 0)
        tensors = part.heads.fold_values(tensors, value, head.output.cpu().double().mT)
    return part.stored(tensors, scale)


def write_permanent(source: str, name: str | Path, out: str | Path, overwrite: bool = False) -> PreTrainedModel:
    """Write the checkpoint `source` with the limit `name` in its weights, a card, and the files beside the weights of the source."""
    from .limiting import RankLimit

    with fresh_folder(out, overwrite, **MODEL_FOLDER) as staging:
        model = load(source)
        with readable(source):
            folder = checkpoint_folder(source, getattr(model.config, "_commit_hash", None))
        limit = RankLimit.from_pretrained(model, name)
        new = permanent(limit)
        copy_companions(folder, staging)
        new.save_pretrained(staging)
        how = f"Cut from {Path(source).name} to a rank limit of `hf_rankattn` that was fitted before. No damage was measured then."
        stock = None if hasattr(new.config, "head_geometry") else stock_heads(new, max(limit.heads[0].key_ranks))
        card_of(new, Path(out).resolve().name, how=how, stock_heads=stock).save(staging / "README.md")
    return new
