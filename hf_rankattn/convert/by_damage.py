"""Widths chosen by the errors that cuts of single layers cause, such as those of the last hidden states."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from ..families.architectures import base_of
from ..files.running import Inputs, evaluating
from .calibration import calibration_batches, in_pieces, real_tokens
from .damage import Embeddings, task_of


# the ranks at which a layer is cut, as shares of the mean rank
TRIED = (0.25, 0.5, 1, 1.5, 2)
# a forward pass over these texts is needed for each rank that is tried
TEXTS, PIECES = 32, 8


def tried_ranks(mean_rank: float, old_rank: int) -> list[int]:
    """The ranks at which a layer of `old_rank` is cut, to spread a budget of this mean.

    >>> tried_ranks(8, 32), tried_ranks(2, 3)
    ([2, 4, 8, 12, 16], [1, 2])
    """
    return sorted({rank for share in TRIED if (rank := max(round(share * mean_rank), 1)) < old_rank})


def damage_curve(tried: dict[int, float], old_rank: int) -> np.ndarray:
    """The damage at ranks 1 to `old_rank`, from the damage at some ranks.

    It is 0 at the old rank, and infinite below the smallest rank that was tried. Between two ranks its logarithm is
    interpolated linearly, since damage falls about exponentially; above the largest the damage falls linearly.
    Damage that rises with the rank is noise: the value of the smaller rank is kept.

    >>> damage_curve({1: 4.0, 3: 1.0}, 4).tolist()
    [4.0, 2.0, 1.0, 0.0]
    """
    ranks = sorted(tried)
    curve = np.full(old_rank, np.inf)
    if ranks:
        least = np.minimum.accumulate([max(tried[rank], np.finfo(float).tiny) for rank in ranks])
        curve[ranks[0] - 1 :] = np.exp(np.interp(np.arange(ranks[0], old_rank + 1), ranks, np.log(least)))
        curve[ranks[-1] - 1 :] = np.linspace(least[-1], 0, old_rank - ranks[-1] + 1)
    curve[-1] = 0.0
    return curve


def ranks_for_damage(curves: Sequence[np.ndarray], mean_rank: float) -> list[int]:
    """The ranks of mean `mean_rank` at most with the smallest sum of damages; `curves[layer][rank - 1]` is a damage.

    By dynamic programming over the layers, so no other choice has a smaller sum, whatever the curves are.

    >>> ranks_for_damage([np.array([9.0, 1.0, 0.0]), np.array([3.0, 1.0, 0.0])], mean_rank=2)
    [2, 2]
    """
    budget = int(mean_rank * len(curves) + 1e-9)
    least = np.zeros(budget + 1)  # the smallest damage of the layers so far, for each budget that they may spend
    choices = []
    for curve in curves:
        costs = np.full((len(curve), budget + 1), np.inf)
        for rank in range(1, min(len(curve), budget) + 1):
            costs[rank - 1, rank:] = least[:-rank] + curve[rank - 1]
        choices.append(costs.argmin(0))
        least = costs.min(0)
    ranks: list[int] = []
    for choice in reversed(choices):
        ranks.append(int(choice[budget]) + 1)
        budget -= ranks[-1]
    return ranks[::-1]


class LastStates:
    """The last hidden states of a model on a few calibration texts, with which those of cut models are compared.

    For a bare encoder the mean state of each text counts, which is its embedding; for a model with a head the state of every
    token.
    """

    def __init__(self, model: PreTrainedModel, calibration: Inputs):
        base = base_of(model)
        self.pooled = task_of(model) is Embeddings
        batches = calibration_batches(base, calibration)
        pieces = [piece for batch in batches for piece in in_pieces(batch, TEXTS // PIECES)]
        # spread over the calibration, which can begin with one kind of text and end with another
        count = min(PIECES, len(pieces))
        self.batches = [pieces[place * len(pieces) // count] for place in range(count)]
        self.original = [self.states(model, batch) for batch in self.batches]

    def states(self, model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The states (batch, n, d) with zeros for padding, or their means (batch, d)."""
        with evaluating(model):
            states = base_of(model)(**batch).last_hidden_state.double()
        real = real_tokens(batch, tuple(states.shape[:2])).to(states.device)[..., None]
        return (states * real).sum(1) / real.sum(1).clamp(min=1) if self.pooled else states * real

    def damage(self, model: PreTrainedModel) -> float:
        """The squared change of the states, as a share of their energy."""
        changes = [
            (self.states(model, batch) - states).square().sum()
            for batch, states in zip(self.batches, self.original, strict=True)
        ]
        return float(sum(changes) / sum(states.square().sum() for states in self.original))
