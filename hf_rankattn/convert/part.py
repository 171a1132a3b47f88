"""The heads of one attention block, and their conversion to other widths."""

from typing import Any, NamedTuple

import numpy as np
import torch

from ..families.row import Family
from ..families.slots import Slot, owner
from .factors import best_factors, root_of_moment, root_of_rows, with_prior
from .heads import Heads, Sides, Tensors, heads_of
from .moments import LayerMoments, MixedMoments
from .own_rows import errors, refine
from .weighted import refine_factors


# the inputs of `best_factors`: roots of the second moments on both sides of a form, and the form
Roots = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
TINY = torch.finfo(torch.float64).tiny


class Widths(NamedTuple):
    """The query-key rank and the value width of the heads of one layer."""

    rank: int
    value: int


class Part:
    """The heads of one attention block of the original, as tensors."""

    def __init__(self, heads: Heads, stored: Tensors, num_heads: int, scale: float, entry: int, where: str):
        self.heads, self.num_heads = heads, num_heads
        self.scale, self.entry, self.where = scale, entry, where
        for name, tensor in stored.items():
            if tensor.device.type == "meta":
                raise ValueError(
                    f"{name} of {where} is on the meta device, as in an offloaded model: load the model without `device_map`, "
                    "or convert its checkpoint with `rankattn convert --stream`."
                )
            if not tensor.is_floating_point():
                raise ValueError(f"{name} of {where} is {tensor.dtype}: convert the model before it is quantised.")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of {where} holds NaN or Inf, so it has no factors. Check the weights.")
        self.tensors = heads.read(stored, num_heads)
        self.old = Widths(heads.rank_of(self.tensors, num_heads), heads.width_of(self.tensors, num_heads))
        self.parameters = sum(tensor.numel() for tensor in stored.values())

    @classmethod
    def of_slot(cls, family: Family, slot: Slot) -> "Part":
        heads = heads_of(family)
        named = dict(slot.module.named_parameters(remove_duplicate=False))
        if absent := [name for name in heads.names if name not in named]:
            raise ValueError(
                f"{slot.where} has no {absent[0]}, which every stock {family.name} model has: put it back (zeros for a bias) "
                "before the model is converted."
            )
        stored = {name: named[name].detach() for name in (*heads.names, *heads.optional) if name in named}
        attention: Any = owner(slot.module, family)
        num_heads, scale = getattr(attention, family.num_heads), float(getattr(attention, family.scale))
        return cls(heads, stored, num_heads, scale, slot.entry, slot.where)

    def sides(self) -> Sides:
        return self.heads.sides(self.tensors, self.num_heads)

    def value_sides(self) -> Sides:
        return self.heads.value_sides(self.tensors, self.num_heads)

    def weights_alone(self) -> Roots:
        """Roots of the moments that isotropic inputs have on both sides of the logits, and the form between them."""
        sides = self.sides()
        return root_of_rows(sides.query), root_of_rows(sides.key), sides.form

    def seen(self, moments: LayerMoments) -> Roots:
        """Roots of the moments that calibration texts have on both sides of the logits, and the form between them."""
        query_prior, key_prior, form = self.weights_alone()
        query, key = (m.to(form) for m in (moments.query, moments.key))
        return root_of_moment(with_prior(query, query_prior)), root_of_moment(with_prior(key, key_prior)), form

    def values_seen(self, mixed: MixedMoments | None) -> Roots:
        """Roots of the moments of the mixed values (without `mixed`, of isotropic inputs) and of the rows that write them."""
        sides = self.value_sides()
        value, output = root_of_rows(sides.query), root_of_rows(sides.key)
        if mixed is not None:
            value = root_of_moment(with_prior(mixed.moment.to(value), value))
        return value, output, sides.form

    def narrow_logits(
        self, rank: int, seed: int, moments: LayerMoments | None = None, descend: bool = True
    ) -> tuple[Tensors, float]:
        """The tensors at another query-key rank, and the share of logit energy that they keep.

        Without moments the energy is that of the form on isotropic inputs; with moments that of the row-centred logits of
        each text. Without `descend`, the pooled closed form is not refined.
        """
        if rank == self.old.rank:
            return self.tensors, 1.0
        if rank > self.old.rank:
            return self.heads.widen(
                self.tensors, self.fresh(rank - self.old.rank, self.sides().query, [seed, self.entry])
            ), 1.0
        roots = self.weights_alone() if moments is None else self.seen(moments)
        best = best_factors(*roots, rank)
        query, key, lost, total = best.query, best.key, best.lost, best.singular.square().sum()
        if moments is not None and descend:
            pieces, form = moments.pieces(), roots[2]
            if moments.pairs is None:
                query, key, lost, total = refine(pieces, form, query, key, (moments.query, moments.key))
            else:
                query, key, lost, total = errors(pieces, form, *refine_factors(moments.pairs, query, key))
        share = 1 - lost.sum() / total.sum().clamp(min=TINY)
        return self.heads.fold(self.tensors, query, key), float(share)

    def narrow_values(
        self, tensors: Tensors, width: int, seed: int, mixed: MixedMoments | None = None
    ) -> tuple[Tensors, float]:
        """`tensors` with values of another width, and the share of the energy of what the heads write that they keep.

        The values are those of the original; `tensors` may have other queries and keys.
        """
        if width == self.old.value:
            return tensors, 1.0
        if width > self.old.value:
            fresh = self.fresh(width - self.old.value, self.value_sides().query, [seed, self.entry, 1])
            return self.heads.widen_values(tensors, fresh), 1.0
        best = best_factors(*self.values_seen(mixed), width)
        share = 1 - best.lost.sum() / best.singular.square().sum().clamp(min=TINY)
        return self.heads.fold_values(tensors, best.query, best.key), float(share)

    def fresh(self, more: int, side: torch.Tensor, seed: list[int]) -> torch.Tensor:
        """Random weights (heads, d, more) of the size of those of a side (heads, d + 1, w)."""
        words = np.random.SeedSequence(seed).generate_state(2)
        generator = torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
        side = side[:, : self.heads.hidden_size(self.tensors)]
        fresh = torch.randn(*side.shape[:2], more, generator=generator, dtype=torch.float32)
        return fresh * float(side.square().mean().sqrt())

    def stored(self, tensors: Tensors, new_scale: float | None = None) -> Tensors:
        """The parameters of a block, under its own names. A scale that the new block cannot hold is folded into queries."""
        if new_scale is not None and new_scale != self.scale:
            tensors = self.heads.rescale(tensors, self.scale / new_scale)
        # tensors that did not change share memory with the original
        return {name: tensor.clone() for name, tensor in self.heads.write(tensors).items()}

    def in_old_place(self, tensors: Tensors) -> Tensors:
        """Narrower queries and keys in a block of the old widths: the dimensions that they lost are zero."""
        more = self.old.rank - self.heads.rank_of(tensors, self.num_heads)
        if more:
            like = next(iter(tensors.values()))
            zeros = like.new_zeros(self.num_heads, self.heads.hidden_size(tensors), more)
            tensors = self.heads.widen(tensors, zeros)
        return self.heads.write(tensors)
