"""Attention maps of random queries and keys, and the numbers that say how much rank they have."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...measure.spectrum import coverage_of, spectrum_metrics


KEYS = ("gaussian", "unit", "free")
MASKS = ("none", "causal", "window")
# A singular value counts if it exceeds this share of the largest. None: the default of torch and numpy for the dtype.
TOLERANCES = {"float64": None, "float32": None, "0.001": 1e-3, "0.01": 1e-2, "0.1": 1e-1}
ROWS = 1024

Parameters = Mapping[str, Any]
Rows = list[dict[str, Any]]


def generator(*numbers: int) -> torch.Generator:
    """A generator for each setting, so that no cell repeats the draws of another."""
    state = np.random.SeedSequence(numbers).generate_state(1, "uint64")[0]
    return torch.Generator().manual_seed(int(state >> 1))


def count_singular(singular: torch.Tensor, name: str) -> int:
    """How many singular values of an (n, n) matrix, in descending order, exceed a tolerance of [`TOLERANCES`]."""
    tolerance = TOLERANCES[name] or len(singular) * torch.finfo(getattr(torch, name)).eps
    return int((singular > tolerance * singular[0]).sum())


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
    """How many columns n queries hit if each takes its best key; with free keys all scores are independent."""
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


def soft_map(logits: torch.Tensor, mask: str = "none") -> torch.Tensor:
    seen = allowed(torch.arange(len(logits)), logits.shape[-1], mask, None)
    return torch.softmax(logits if seen is None else logits.masked_fill(~seen, -math.inf), -1)


def map_metrics(maps: torch.Tensor) -> dict[str, Any]:
    """Ranks of a float64 map at all tolerances, and measures that need none."""
    singular = torch.linalg.svdvals(maps)
    found = spectrum_metrics(singular)
    energy = singular.square() / singular.square().sum()
    return {
        **{f"rank_{name}": count_singular(singular, name) for name in TOLERANCES},
        **{name: found[name].item() for name in ("effective_rank", "stable_rank", "participation_ratio")},
        "effective_rank_of_squares": torch.special.entr(energy).sum().exp().item(),
        "second_singular": singular[1].item(),
        "argmax_coverage": coverage_of(maps, torch.ones(len(maps), dtype=torch.bool)).item(),
        "largest_probability": maps.amax(-1).mean().item(),
    }


def mean_metrics(draws: Rows) -> dict[str, float]:
    return {name: sum(draw[name] for draw in draws) / len(draws) for name in draws[0]}


def run_hard(parameters: Parameters) -> Rows:
    """Share of the columns that hard attention hits: its rank, divided by n."""
    n, keys, mask, window = (parameters[name] for name in ("n", "keys", "mask", "window"))
    rows = []
    for width in parameters["widths"]:
        rng = generator(parameters["seed"], n, width, KEYS.index(keys), MASKS.index(mask), window)
        hits = [hard_columns(n, width, keys, rng, mask, window) / n for _ in range(parameters["draws"])]
        rows.append({"width": width, "coverage": float(np.mean(hits)), "deviation": float(np.std(hits))})
    return rows


def run_spectrum(parameters: Parameters) -> Rows:
    """Singular values of hard maps of free choices, against the square roots of how often columns are chosen."""
    n, rng, draws = parameters["n"], generator(parameters["seed"], parameters["n"], 1), []
    for _ in range(parameters["draws"]):
        chosen = torch.randint(n, (n,), generator=rng)
        maps = torch.nn.functional.one_hot(chosen, n).double()
        counts = torch.bincount(chosen, minlength=n).double().sqrt().sort(descending=True).values
        error = (torch.linalg.svdvals(maps) - counts).abs().max().item()
        rank = torch.linalg.matrix_rank(maps).item()
        draws.append({**map_metrics(maps), "matrix_rank": rank, "columns": int((counts > 0).sum()), "error": error})
    unequal = sum(draw["matrix_rank"] != draw["columns"] for draw in draws)
    return [mean_metrics(draws) | {"error": max(draw["error"] for draw in draws), "unequal": unequal}]


def run_paper(parameters: Parameters) -> Rows:
    """Tokens X, weights of variance 1, logits over sqrt(width), as far as the published set-up is known."""
    n, d, rows = parameters["n"], parameters["model_width"], []
    for width in parameters["widths"]:
        rng, draws = generator(parameters["seed"], n, width, 2), []
        for _ in range(parameters["draws"]):
            tokens = torch.randn(n, d, generator=rng, dtype=torch.float64)
            if parameters["inputs"] == "orthonormal":
                tokens = torch.linalg.qr(tokens.T).Q.T
            query, key = (tokens @ torch.randn(d, width, generator=rng, dtype=torch.float64) for _ in range(2))
            scores = query @ key.T
            logits = scores / (parameters["temperature"] * math.sqrt(width))
            logit_rank = count_singular(torch.linalg.svdvals(scores), "float32")
            draws.append(map_metrics(soft_map(logits)) | {"logit_rank": logit_rank, "sharpness": logits.std().item()})
        rows.append({"width": width, **mean_metrics(draws)})
    return rows


def run_sharpness(parameters: Parameters) -> Rows:
    """Independent normal logits of a given standard deviation: the limit of wide heads."""
    n, rows = parameters["n"], []
    for value in parameters["values"]:
        rng, draws = generator(parameters["seed"], n, round(1000 * value), 3), []
        for _ in range(parameters["draws"]):
            logits = value * torch.randn(n, n, generator=rng, dtype=torch.float64)
            draws.append(map_metrics(soft_map(logits, parameters["mask"])))
        rows.append({"sharpness": value, **mean_metrics(draws)})
    return rows


def run_width(parameters: Parameters) -> Rows:
    """Soft maps of random heads whose logits have a given standard deviation; the kind `soft` has neither keys nor mask."""
    n, keys, mask, rows = parameters["n"], parameters.get("keys", "gaussian"), parameters.get("mask", "none"), []
    for width in parameters["widths"]:
        rng, draws = generator(parameters["seed"], n, width, 4, keys == "unit"), []
        for _ in range(parameters["draws"]):
            query, key = random_heads(n, width, keys, rng, torch.float64)
            draws.append(map_metrics(soft_map(parameters["sharpness"] * query @ key.T, mask)))
        rows.append({"width": width, **mean_metrics(draws)})
    return rows
