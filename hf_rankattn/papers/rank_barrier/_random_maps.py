"""Attention maps of random queries and keys, and the numbers that say how much rank they have."""

import math
from collections.abc import Iterator
from typing import Any

import torch


KEYS = ("gaussian", "unit", "free")
MASKS = ("none", "causal", "window")
# a singular value counts if it exceeds this share of the largest; of the two dtypes, what torch and numpy take by default
TOLERANCES = {"float64": None, "float32": None, "0.001": 1e-3, "0.01": 1e-2, "0.1": 1e-1}
ROWS = 1024


def generator(*numbers: int) -> torch.Generator:
    """A stream of its own for every setting, so that no cell repeats the draws of another."""
    import numpy as np

    state = np.random.SeedSequence(numbers).generate_state(1, "uint64")[0]
    return torch.Generator().manual_seed(int(state >> 1))


def tolerance(name: str, n: int) -> float:
    return TOLERANCES[name] or n * torch.finfo(getattr(torch, name)).eps


def allowed(rows: torch.Tensor, n: int, mask: str, window: int | None) -> torch.Tensor | None:
    """Which of n columns the rows may choose, (rows, n)."""
    if mask == "none":
        return None
    distance = rows[:, None] - torch.arange(n)
    seen = distance >= 0
    return seen if mask == "causal" else seen & (distance < (window or n))


def random_heads(n: int, width: int, keys: str, rng: torch.Generator, dtype=torch.float32) -> Iterator[torch.Tensor]:
    """Queries and keys (n, width) whose products have variance 1; unit keys go with unit queries, as in QK-norm."""
    for _ in range(2):
        x = torch.randn(n, width, generator=rng, dtype=dtype)
        yield torch.nn.functional.normalize(x, dim=-1) * width**0.25 if keys == "unit" else x / width**0.25


def hard_columns(
    n: int, width: int, keys: str, rng: torch.Generator, mask: str = "none", window: int | None = None
) -> int:
    """How many columns n queries hit when each takes its best key; with free keys every score is a draw of its own."""
    hit = torch.zeros(n, dtype=torch.bool)
    heads = None if keys == "free" else tuple(random_heads(n, width, keys, rng))
    for start in range(0, n, ROWS):
        rows = torch.arange(start, min(start + ROWS, n))
        scores = torch.randn(len(rows), n, generator=rng) if heads is None else heads[0][rows] @ heads[1].T
        seen = allowed(rows, n, mask, window)
        if seen is not None:
            scores.masked_fill_(~seen, -math.inf)
        hit[scores.argmax(-1)] = True
    return int(hit.sum())


def soft_map(logits: torch.Tensor, mask: str = "none", window: int | None = None) -> torch.Tensor:
    seen = allowed(torch.arange(len(logits)), logits.shape[-1], mask, window)
    return torch.softmax(logits if seen is None else logits.masked_fill(~seen, -math.inf), -1)


def map_metrics(maps: torch.Tensor) -> dict[str, Any]:
    """Ranks of a float64 map at all tolerances, and measures that need none."""
    from ...measure.spectrum import coverage_of, spectrum_metrics

    n = maps.shape[-1]
    singular = torch.linalg.svdvals(maps)
    found = spectrum_metrics(singular)
    energy = singular.square() / singular.square().sum()
    return {
        **{f"rank_{name}": int((singular > tolerance(name, n) * singular[0]).sum()) for name in TOLERANCES},
        **{name: found[name].item() for name in ("effective_rank", "stable_rank", "participation_ratio")},
        "effective_rank_of_squares": torch.special.entr(energy).sum().exp().item(),
        "second_singular": singular[1].item(),
        "argmax_coverage": coverage_of(maps, torch.ones(len(maps), dtype=torch.bool)).item(),
        "largest_probability": maps.amax(-1).mean().item(),
    }


def mean_metrics(draws: list[dict[str, Any]]) -> dict[str, float]:
    return {name: sum(draw[name] for draw in draws) / len(draws) for name in draws[0]}
