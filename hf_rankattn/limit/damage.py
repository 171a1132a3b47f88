"""What narrower heads do to the output of a model, estimated for every key head and width from one backward pass."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..convert.by_damage import damage_curve, ranks_for_damage
from ..convert.calibration import in_pieces
from ..convert.factors import best_factors, root_of_moment, root_of_rows, with_prior
from ..files.running import evaluating, training_only
from ..probe.batches import real_tokens
from .fitting import EVEN, Seen, moments_of_logits
from .heads import HeadLimits, Widths


# values are cut at these parts of their width and at powers of two below; for queries and keys all ranks come at once
PARTS = 8
PIECE = 4


class KeyHead:
    """Nested factors of one key head, best for pooled rows, and the damage of each width that has been summed so far."""

    def __init__(self, seen: Seen, group: int, output: torch.Tensor | None):
        width, v = seen.key.shape[-1], seen.value.shape[-1]
        device = seen.key.device
        eye = torch.eye(width, dtype=torch.float64, device=device)[None]
        sides = (root_of_moment(with_prior(moment[None], eye)) for moment in moments_of_logits(seen, group, EVEN))
        query_root, key_root = sides
        best = best_factors(query_root, key_root, eye, width)
        self.heads, self.query, self.key = seen.heads_of(group), best.query[0].float(), best.key[0].float()
        self.lost_keys = torch.zeros(width, dtype=torch.float64, device=device)

        moment = torch.zeros(seen.shared, v, v, dtype=torch.float64, device=device)
        for text in range(len(seen.query)):
            mixed = seen.maps(text, group) @ seen.value[text, group]
            moment += (mixed.mT @ mixed).double()
        eye = torch.eye(v, dtype=torch.float64, device=device)[None]
        roots = root_of_moment(with_prior(moment, eye.expand(seen.shared, -1, -1)))
        rows = eye[0] if output is None else output.to(moment).flatten(0, 1)
        pooled = root_of_rows(roots.mT.flatten(0, 1))[None], root_of_rows(rows)[None]
        basis = best_factors(*pooled, eye, v).query[0]
        self.ways: dict[int, torch.Tensor] = {}
        self.width = v
        small = (2**power for power in range(v.bit_length()) if 2**power < v // PARTS)
        for narrow in sorted({1, *small, *(max(v * part // PARTS, 1) for part in range(1, PARTS))} - {v}):
            kept = torch.linalg.qr(basis[:, :narrow]).Q
            back = torch.linalg.lstsq((roots.mT @ kept).cpu(), roots.mT.cpu(), driver="gelsd").solution
            self.ways[narrow] = (kept @ back.to(kept)).float()
        self.lost_values = dict.fromkeys(self.ways, 0.0)

    def add_keys(self, query: torch.Tensor, slope: torch.Tensor) -> None:
        """Rows of queries and of the slopes of the loss with respect to them, (heads of the group, rows, w).

        The slope of a query is a sum of its keys, so the form between both is the change of the loss to first order, and what narrower
        heads leave of it is a sum over the dimensions that are kept.
        """
        kept = ((query @ self.query) * (slope @ self.key)).double().cumsum(-1)
        whole = (query * slope).double().sum(-1, keepdim=True)
        self.lost_keys += (whole - kept).square().sum((0, 1)) / 2

    def add_values(self, mixed: torch.Tensor, slope: torch.Tensor) -> None:
        for width, way in self.ways.items():
            change = mixed - mixed @ way
            self.lost_values[width] += float((change * slope).double().sum(-1).square().sum()) / 2

    def curves(self) -> tuple[np.ndarray, np.ndarray]:
        lost = dict(enumerate(self.lost_keys[:-1].tolist(), start=1))
        if not np.isfinite([*lost.values(), *self.lost_values.values()]).all():
            raise ValueError("the slopes of the loss hold NaN or Inf on the calibration: run the model in float32.")
        values = self.width
        return damage_curve(lost, len(self.lost_keys)), damage_curve(self.lost_values, values)


class Sloping(HeadLimits):
    """Limits nothing, and sends the slopes of the loss with respect to queries and mixed values of one layer to its key heads."""

    def __init__(self, widths: Widths, key_heads: list[KeyHead]):
        super().__init__(widths, [widths.qk] * widths.groups, [widths.value] * widths.groups)
        self.key_heads = key_heads
        self.real: torch.Tensor | None = None

    def rows(self, states: torch.Tensor, head: KeyHead) -> torch.Tensor:
        """The real rows of the heads of a group, (heads of the group, rows, w), of states (batch, heads, n, w)."""
        own = states[:, head.heads].transpose(0, 1).float()
        return own.flatten(1, 2) if self.real is None else own[:, self.real.bool()]

    def listening(
        self, states: torch.Tensor, by_head: Callable[[torch.Tensor], torch.Tensor], add: str
    ) -> torch.Tensor:
        nothing = torch.zeros_like(states, requires_grad=True)

        def hear(slope: torch.Tensor) -> None:
            for head in self.key_heads:
                getattr(head, add)(self.rows(by_head(states.detach()), head), self.rows(by_head(slope), head))

        nothing.register_hook(hear)
        return states + nothing

    def taken(self, module: nn.Module, query, key, value):
        return self.listening(query, lambda states: states, "add_keys"), key, value

    def expand(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.listening(mixed, lambda states: states.transpose(1, 2), "add_values")


def random_loss(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], real, generator) -> torch.Tensor:
    """A loss whose squared change is, on average, twice the divergence of the outputs: the negative logarithm of the probability of
    outputs that are drawn from the model; for a model without probabilities, a random product with its last states.
    """
    output = model(**batch, return_dict=True)
    scores = output.get("logits")
    if scores is None:
        scores = output.get("last_hidden_state")
    if scores is None:
        raise ValueError(
            f"{type(model).__name__} returns neither logits nor last hidden states, by which 'auto' judges widths: give the model below "
            "its head, or widths."
        )
    if real is not None and scores.ndim == 3 and scores.shape[:2] == real.shape:
        scores = scores[real.bool()]
    scores = scores.float()
    if "logits" not in output or scores.shape[-1] < 2:
        noise = torch.randn(scores.shape, generator=generator).to(scores)
        return (scores * noise).sum() / scores.detach().square().mean().sqrt()
    chances = scores.flatten(0, -2).log_softmax(-1)
    drawn = torch.multinomial(chances.detach().exp().cpu(), 1, generator=generator).to(chances.device)
    return -chances.gather(-1, drawn).sum()


def add_slopes(
    model: PreTrainedModel, slopings: Sequence[Sloping], batch: Mapping[str, torch.Tensor], seed: int
) -> None:
    """One backward pass over the calibration, a few texts at a time; the parameters get no gradients."""
    generator = torch.Generator().manual_seed(seed)
    with evaluating(model), training_only((), model):
        for piece in in_pieces(dict(batch), PIECE):
            real = real_tokens(model, piece)
            for sloping in slopings:
                sloping.real = real
            with torch.enable_grad():
                random_loss(model, piece, real, generator).backward()


def widths_by_damage(
    layers: Sequence[list[KeyHead]], budgets: tuple[float | None, float | None, float | None]
) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    """The query-key ranks and the value widths of all key heads with the smallest sum of damages.

    `budgets` are the mean width of queries and keys, that of values, and that of both kinds together.
    """
    curves = [head.curves() for heads in layers for head in heads]
    keys, values = ([curve[kind] for curve in curves] for kind in (0, 1))
    of_keys, of_values, of_both = budgets
    found: list[list[int] | None] = [
        None if of_keys is None else ranks_for_damage(keys, of_keys),
        None if of_values is None else ranks_for_damage(values, of_values),
    ]
    if of_both is not None:
        both = ranks_for_damage([*keys, *values], of_both)
        found = [both[: len(keys)], both[len(keys) :]]
    counts = [len(heads) for heads in layers]
    return tuple(None if widths is None else by_layer(widths, counts) for widths in found)  # type: ignore[return-value]


def by_layer(widths: list[int], counts: list[int]) -> list[list[int]]:
    rest = iter(widths)
    return [[next(rest) for _ in range(count)] for count in counts]
