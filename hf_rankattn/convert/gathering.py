"""Passes over the calibration batches: the moments of attention blocks, and the errors of candidates for them."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ..families.architectures import base_of
from ..families.slots import Slot
from ..files.running import Inputs, evaluating
from .calibration import calibration_batches, in_pieces, real_tokens, same_draws
from .factors import best_factors
from .heads import FusedHeads, LinearHeads, Tensors
from .moments import LayerMoments, MixedMoments, precise
from .part import Part


Batch = dict[str, torch.Tensor]
Watch = Callable[[Batch, ExitStack, Callable[[], None]], None]


class Finished(Exception):
    """Ends a forward pass when all blocks have been seen."""


def see_inputs(part: Part, block: nn.Module, receive: Callable[..., None], stack: ExitStack) -> None:
    """Calls `receive` with what queries and keys are made from: the states of both, or XLNet's `h`, `r` and `seg_mat`."""
    heads = part.heads
    if not isinstance(heads, LinearHeads):

        def relative(module, args, kwargs):
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            receive(given["h"], given["r"], given["seg_mat"])

        stack.callback(block.register_forward_pre_hook(relative, with_kwargs=True).remove)
        return
    seen: list[torch.Tensor] = []
    names = [heads.fused] if isinstance(heads, FusedHeads) else [heads.paths[kind] for kind in ("query", "key")]
    *asking, asked = (block.get_submodule(name) for name in names)
    for module in asking:
        stack.callback(module.register_forward_pre_hook(lambda _, args: seen.append(args[0])).remove)

    def meet(module, args):
        receive(seen.pop() if seen else args[0], args[0])

    stack.callback(asked.register_forward_pre_hook(meet).remove)


def see_mixed(part: Part, block: Any, receive: Callable[[torch.Tensor], None], stack: ExitStack) -> None:
    """Calls `receive` with the values (batch, n, heads * v) that attention has mixed, before the output projection."""
    if isinstance(part.heads, LinearHeads):
        output = block.get_submodule(part.heads.paths["output"])
        stack.callback(output.register_forward_pre_hook(lambda _, args: receive(args[0])).remove)
        return
    after = block.post_attention

    def post_attention(states, mixed, *args, **kwargs):
        receive(mixed.transpose(0, 1).flatten(2))
        return after(states, mixed, *args, **kwargs)

    block.post_attention = post_attention  # XLNet has no module there
    stack.callback(delattr, block, "post_attention")


def walk(model: PreTrainedModel, slots: Sequence[Slot], calibration: Inputs, watch: Watch) -> None:
    """Run the calibration through the model, below its head if no block is in it, up to the last application of the blocks at `slots`.

    `watch(batch, stack, done)` sets up what is to be seen in one pass, and calls `done` after each application of a block.
    """
    base: PreTrainedModel = base_of(model)
    if {slot.module for slot in slots} - set(base.modules()):
        base = model  # the decoder of ViT-MAE is its head
    applications = sum(slot.applications for slot in slots)
    left = 0

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Finished

    with evaluating(model):
        for batch in calibration_batches(base, calibration):
            # moments are sums over texts: on a CPU few texts at a time are as fast and take less memory
            for piece in in_pieces(batch, 2 if base.device.type == "cpu" else None):
                left = applications
                with ExitStack() as stack, suppress(Finished), same_draws():
                    watch(piece, stack, done)
                    base(**piece)


def adding(add: Callable[..., None], batch: Batch, done: Callable[[], None]) -> Callable[..., None]:
    def receive(*states):
        add(*states, batch)
        done()

    return receive


def gathered(
    model: PreTrainedModel, parts: Sequence[Part], slots: Sequence[Slot], calibration: Inputs, objective=None
) -> list[LayerMoments]:
    """The moments of the queries and keys of the blocks at `slots`, from one pass over the calibration."""
    found = [LayerMoments(part.sides(), part.scale, slot, objective) for part, slot in zip(parts, slots, strict=True)]

    def watch(batch: Batch, stack: ExitStack, done: Callable[[], None]) -> None:
        for moments, part, slot in zip(found, parts, slots, strict=True):
            add = moments.add_linear if isinstance(part.heads, LinearHeads) else moments.add_relative
            see_inputs(part, slot.module, adding(add, batch, done), stack)

    walk(model, slots, calibration, watch)
    return [moments.finish() for moments in found]


def gathered_values(
    model: PreTrainedModel, parts: Sequence[Part], slots: Sequence[Slot], calibration: Inputs
) -> list[MixedMoments]:
    """The moments of the mixed values of the blocks at `slots`, from one pass over the calibration."""
    found = [
        MixedMoments(part.num_heads, part.old.value, slot, model.device)
        for part, slot in zip(parts, slots, strict=True)
    ]

    def watch(batch: Batch, stack: ExitStack, done: Callable[[], None]) -> None:
        for moments, part, slot in zip(found, parts, slots, strict=True):
            see_mixed(part, slot.module, adding(moments.add, batch, done), stack)

    walk(model, slots, calibration, watch)
    return [moments.finish() for moments in found]


class Written(NamedTuple):
    """The squared error of what the blocks of one entry write into the residual stream, by query-key rank and value width."""

    by_rank: dict[int, float]
    by_value: dict[int, float]


def written_errors(
    model: PreTrainedModel, parts: Sequence[Part], slots: Sequence[Slot], calibration: Inputs, points: int = 8
) -> list[Written]:
    """The errors that narrower heads of one kind in one block cause in what it writes, at `points` widths of each kind.

    The narrower heads are fitted to the original model, and the error is measured on its own activations, over real tokens.
    """
    # the pooled closed form is near the optimum where all rows of a text see the same keys
    descend = any(slot.causal for slot in slots) or not all(isinstance(part.heads, LinearHeads) for part in parts)
    moments = gathered(model, parts, slots, calibration, "logits" if descend else None)
    mixed = gathered_values(model, parts, slots, calibration)
    changed: list[dict[int, Tensors]] = []
    lost: list[dict[int, torch.Tensor]] = []
    found: list[Written] = []
    for part, seen, values in zip(parts, moments, mixed, strict=True):
        ranks, widths = ({1, *(old * point // points for point in range(1, points))} - {0, old} for old in part.old)
        narrow = {rank: part.narrow_logits(rank, 0, seen, descend=descend)[0] for rank in ranks}
        changed.append({rank: part.in_old_place(tensors) for rank, tensors in narrow.items()})
        sides, roots = part.value_sides(), part.values_seen(values)
        losses = {}
        for width in widths:
            best = best_factors(*roots, width)
            losses[width] = joined(sides.key @ (sides.form - best.query @ best.key.mT).mT)
        lost.append(losses)
        found.append(Written(dict.fromkeys(ranks, 0.0), dict.fromkeys(widths, 0.0)))
    del moments

    def watch(batch: Batch, stack: ExitStack, done: Callable[[], None]) -> None:
        for part, slot, narrow, losses, written in zip(parts, slots, changed, lost, found, strict=True):
            compare(part, slot, batch, narrow, losses, written, done, stack)

    walk(model, slots, calibration, watch)
    return found


def joined(rows: torch.Tensor) -> torch.Tensor:
    """Rows (heads, d, v) of the output projection as one matrix (d, heads * v)."""
    return rows.transpose(0, 1).flatten(1)


def compare(
    part: Part,
    slot: Slot,
    batch: Batch,
    narrow: dict[int, Tensors],
    losses: dict[int, torch.Tensor],
    written: Written,
    done: Callable[[], None],
    stack: ExitStack,
) -> None:
    """Runs the block again with the tensors of each rank of `narrow`, and adds the errors of what it writes to `written`."""
    seen: list[torch.Tensor] = []
    running = False
    output = joined(part.value_sides().key)

    def size(change: torch.Tensor, weight: torch.Tensor) -> float:
        return float((change @ weight.T.to(change)).square().sum())

    def again(module, args, kwargs, _):
        nonlocal running
        if running:
            return
        running = True
        try:
            mixed = seen.pop()
            real = real_tokens(batch, tuple(mixed.shape[:2]), slot.rows).to(mixed.device)
            mixed = precise(mixed[real])
            for width, loss in losses.items():
                written.by_value[width] += size(mixed, loss)
            # a cache would be extended by each run
            options = {**kwargs, "past_key_values": None} if "past_key_values" in kwargs else kwargs
            for rank, tensors in narrow.items():
                functional_call(module, tensors, args, options)
                written.by_rank[rank] += size(precise(seen.pop()[real]) - mixed, output)
        finally:
            running = False
        done()

    see_mixed(part, slot.module, seen.append, stack)
    stack.callback(slot.module.register_forward_hook(again, with_kwargs=True).remove)
