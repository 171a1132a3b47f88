"""The widths of each layer, chosen from the spectra of its logits or from the errors of what it writes."""

from collections.abc import Sequence
from numbers import Integral

import torch

from ..models.rank_attention import WIDEST


def ranks_for_energy(spectra: Sequence[torch.Tensor], energy: float) -> list[int]:
    """The smallest rank of each layer that keeps this share of its logit energy, from its singular values (heads, w).

    >>> ranks_for_energy([torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]])], energy=0.8)
    [1, 2]
    """
    ranks = []
    for singular in spectra:
        kept = singular.double().square().sum(0).cumsum(0)
        enough = kept >= energy * kept[-1] * (1 - 1e-12)
        ranks.append(int(enough.double().argmax()) + 1)
    return ranks


def ranks_for_budget(spectra: Sequence[torch.Tensor], mean_rank: float) -> list[int]:
    """The ranks of mean `mean_rank` at most that lose the smallest share of logit energy, summed over the layers.

    The components with the largest shares of the energy of their layer are kept. This is optimal, as energies decrease
    within a layer.

    >>> ranks_for_budget([torch.tensor([[3.0, 1.0, 1.0]]), torch.tensor([[2.0, 2.0, 2.0]])], mean_rank=2)
    [1, 3]
    """
    shares = []
    for layer, singular in enumerate(spectra):
        energy = singular.double().square().sum(0)
        share = energy / energy.sum().clamp(min=torch.finfo(energy.dtype).tiny)
        # every head keeps at least one dimension
        shares += [(-float(value), layer) for value in share[1:]]
    ranks = [1] * len(spectra)
    for _, layer in sorted(shares)[: max(int(mean_rank * len(spectra) + 1e-9) - len(spectra), 0)]:
        ranks[layer] += 1
    return ranks


def check_request(qk_rank, v_head_dim, energy, mean_rank) -> None:
    """Raise a `ValueError` for widths that are not positive integers, and for contradictory requests."""
    if qk_rank is None and v_head_dim is None:
        raise ValueError("give `qk_rank`, `v_head_dim` or both: a width, a list with one for each layer, or 'auto'.")
    if "auto" in (qk_rank, v_head_dim):
        if energy is not None and mean_rank is not None:
            raise ValueError(f"`energy`={energy} and `mean_rank`={mean_rank} are two budgets: give one of them.")
        if energy is not None and (not isinstance(energy, int | float) or not 0 < energy <= 1):
            raise ValueError(f"`energy` is the share of energy to keep, in (0, 1], got {energy!r}.")
        if mean_rank is not None and (not isinstance(mean_rank, int | float) or not mean_rank >= 1):
            raise ValueError(f"`mean_rank` is a mean of widths and must be at least 1, got {mean_rank!r}.")
    elif energy is not None or mean_rank is not None:
        raise ValueError(
            f"`energy` and `mean_rank` choose widths for 'auto', got qk_rank={qk_rank!r} and v_head_dim={v_head_dim!r}."
        )
    for name, given in (("qk_rank", qk_rank), ("v_head_dim", v_head_dim)):
        if given is None or given == "auto":
            continue
        for width in given if isinstance(given, list | tuple) else [given]:
            if isinstance(width, bool) or not isinstance(width, Integral) or width < 1:
                raise ValueError(
                    f"`{name}` must be an integer of at least 1, a list of them with one per layer (ALBERT: per group), or "
                    f"'auto', got {given!r}."
                )
            if int(width) > WIDEST:
                raise ValueError(f"`{name}` must be at most {WIDEST}, got {width}.")


def check_seed(seed) -> None:
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"`seed` must be a whole number of at least 0, got {seed!r}.")


def check_choice(choice: str, qk_rank, v_head_dim, mean_rank, calibration) -> None:
    """Raise a `ValueError` for an unknown way to choose ranks, and for ranks by damage without a budget or texts."""
    if choice not in ("spectra", "damage"):
        raise ValueError(f"`ranks` must be 'spectra' or 'damage', got {choice!r}.")
    if choice == "spectra":
        return
    if "auto" not in (qk_rank, v_head_dim) or mean_rank is None:
        raise ValueError(
            f"ranks='damage' spreads one budget over the layers: give qk_rank='auto' or v_head_dim='auto', and `mean_rank`; "
            f"got qk_rank={qk_rank!r}, v_head_dim={v_head_dim!r} and mean_rank={mean_rank!r}."
        )
    if calibration is None:
        raise ValueError("ranks='damage' is measured on texts: give some as `calibration`, or leave it out.")
