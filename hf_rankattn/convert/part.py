"""The queries and keys of one attention module, and their conversion to another rank."""

from typing import Any

import numpy as np
import torch

from ..families.row import Family
from ..families.slots import Slot
from .factors import best_factors, root_of_moment, root_of_rows, with_prior
from .heads import Heads, Sides, Tensors, heads_of
from .moments import LayerMoments
from .own_rows import errors, refine
from .weighted import refine_factors


# the inputs of `best_factors`: roots of the second moments on both sides of a form, and the form
Roots = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Part:
    """The queries and keys of one attention module of the original, as tensors."""

    def __init__(self, heads: Heads, tensors: Tensors, num_heads: int, scale: float, entry: int, where: str):
        self.heads, self.tensors, self.num_heads = heads, tensors, num_heads
        self.scale, self.entry, self.where = scale, entry, where
        self.old_rank = heads.rank_of(tensors, num_heads)
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        for name, tensor in tensors.items():
            if tensor.device.type == "meta":
                raise ValueError(
                    f"{name} of {where} is on the meta device, as in an offloaded model: load the model without `device_map`, "
                    "or convert its checkpoint with `rankattn convert --stream`."
                )
            if not tensor.is_floating_point():
                raise ValueError(f"{name} of {where} is {tensor.dtype}: convert the model before it is quantised.")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of {where} holds NaN or Inf: no factors can be made of it.")

    @classmethod
    def of_slot(cls, family: Family, slot: Slot) -> "Part":
        module: Any = slot.module
        heads = heads_of(family)
        named = dict(module.named_parameters(remove_duplicate=False))
        if absent := [name for name in heads.names if name not in named]:
            raise ValueError(
                f"{slot.where} has no {absent[0]}, which every stock {family.name} model has: put it back (zeros for a bias) "
                "before the model is converted."
            )
        tensors = {name: named[name].detach() for name in heads.names}
        num_heads, scale = getattr(module, family.num_heads), float(getattr(module, family.scale))
        return cls(heads, tensors, num_heads, scale, slot.entry, slot.where)

    def sides(self) -> Sides:
        return self.heads.sides(self.tensors, self.num_heads)

    def weights_alone(self) -> Roots:
        """Roots of the moments that isotropic inputs have on both sides, and the form between them."""
        sides = self.sides()
        return root_of_rows(sides.query), root_of_rows(sides.key), sides.form

    def seen(self, moments: LayerMoments) -> Roots:
        """Roots of the moments that calibration texts have on both sides, and the form between them."""
        query_prior, key_prior, form = self.weights_alone()
        query, key = (m.to(form) for m in (moments.query, moments.key))
        return root_of_moment(with_prior(query, query_prior)), root_of_moment(with_prior(key, key_prior)), form

    def narrow(self, rank: int, seed: int, moments: LayerMoments | None = None) -> tuple[Tensors, float]:
        """The tensors of this module at `rank`, and the share of logit energy that they keep.

        Without moments the energy is that of the form on isotropic inputs; with moments that of the row-centred logits of
        each text.
        """
        if rank == self.old_rank:
            return {name: tensor.clone() for name, tensor in self.tensors.items()}, 1.0
        if rank > self.old_rank:
            return self.widened(rank, seed), 1.0
        roots = self.weights_alone() if moments is None else self.seen(moments)
        best = best_factors(*roots, rank)
        query, key, lost, total = best.query, best.key, best.lost, best.singular.square().sum()
        if moments is not None:
            pieces, form = moments.pieces(), roots[2]
            if moments.pairs is None:
                query, key, lost, total = refine(pieces, form, query, key, (moments.query, moments.key))
            else:
                query, key, lost, total = errors(pieces, form, *refine_factors(moments.pairs, query, key))
        share = 1 - lost.sum() / total.sum().clamp(min=torch.finfo(torch.float64).tiny)
        return self.heads.fold(self.tensors, query, key), float(share)

    def widened(self, rank: int, seed: int) -> Tensors:
        words = np.random.SeedSequence([seed, self.entry]).generate_state(2)
        generator = torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
        query = self.sides().query[:, : self.heads.hidden_size(self.tensors)]
        fresh = torch.randn(*query.shape[:2], rank - self.old_rank, generator=generator, dtype=torch.float32)
        fresh = fresh * float(query.square().mean().sqrt())
        return self.heads.widen(self.tensors, self.num_heads, rank, fresh)
