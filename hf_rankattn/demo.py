"""A short demonstration: what exists, run for real, with the papers' numbers beside ours."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel, get_cosine_schedule_with_warmup

from .models import (
    RankBertConfig,
    RankBertModel,
    RankEncoderConfig,
    RankEncoderForPointRegression,
    equal_budget_grid,
    parameter_counts,
)


@dataclass
class Claim:
    """One plain sentence, the number that was measured for it, and what to compare it with."""

    claim: str
    measured: str
    compare: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def farthest_points(generator: torch.Generator, batch: int, count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors (batch, count, dim), and for each of them the farthest of the others."""
    points = nn.functional.normalize(torch.randn(batch, count, dim, generator=generator), dim=-1)
    farthest = (points @ points.transpose(1, 2)).argmin(-1)
    return points, torch.gather(points, 1, farthest[..., None].expand_as(points))


def train_farthest(
    config: RankEncoderConfig, *, count: int, steps: int, seed: int, progress: Callable[[], Any] = lambda: None
) -> tuple[RankEncoderForPointRegression, float]:
    """Train on fresh batches; return the model and its error on points it has not seen (predicting zero costs 1)."""
    dim = config.input_dim
    if dim is None:
        raise ValueError("farthest neighbour is a task on points: the config needs `input_dim`.")
    torch.manual_seed(seed)
    model = RankEncoderForPointRegression(config)
    generator = torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    for _ in range(steps):
        points, labels = farthest_points(generator, 256, count, dim)
        optimizer.zero_grad()
        model(points=points, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        progress()
    with torch.no_grad():
        points, labels = farthest_points(generator, 4096, count, dim)
        return model, model.eval()(points=points, labels=labels).loss.item()


DIM, COUNT, STEPS = 16, 8, 1000
RANKS = (16, 8, 1)
TOTAL_STEPS = STEPS * (len(RANKS) + 1)
# The reference is the papers' setting, d 64, N 16, one layer, d^2 parameters, 1e5 steps: ranks 64, 32 and 1.
PUBLISHED = {16: "0.0153 (rank 64 of 64)", 8: "0.695 (rank 32 of 64)", 1: "0.87 (rank 1 of 64)"}


def rank_is_a_resource(progress: Callable[[], Any]) -> Iterator[Claim]:
    """Full-rank, half-rank and rank-one heads, at one parameter budget, on farthest neighbour."""
    for geometry in equal_budget_grid(DIM**2, DIM, ranks=list(RANKS)):
        rank, heads = geometry["qk_rank"], geometry["num_attention_heads"]
        config = RankEncoderConfig(input_dim=DIM, intermediate_size=256, **geometry)
        _, error = train_farthest(config, count=COUNT, steps=STEPS, seed=0, progress=progress)
        yield Claim(
            f"{heads} head{'s' if heads > 1 else ''} of rank {rank}, {STEPS} steps: error at finding the farthest of "
            f"{COUNT} points (predicting nothing costs 1)",
            f"{error:.3f}",
            f"paper, d 64, N 16, 1e5 steps: {PUBLISHED[rank]}",
        )
    config = RankEncoderConfig(input_dim=DIM, intermediate_size=256, qk_norm=True)
    _, error = train_farthest(config, count=COUNT, steps=STEPS, seed=0, progress=progress)
    yield Claim(f"1 head of rank {DIM} with qk_norm=True, the same", f"{error:.3f}", "no published value")


def rank_is_a_config_field() -> Iterator[Claim]:
    """Stock BERT to the last bit by default, and smaller by one argument."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 1000}
    torch.manual_seed(0)
    stock = BertModel(BertConfig(**sizes)).eval()
    torch.manual_seed(0)
    same = RankBertModel(RankBertConfig(**sizes)).eval()
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        difference = (stock(ids).last_hidden_state - same(ids).last_hidden_state).abs().max().item()
    yield Claim(
        "A RankBertModel left at its defaults differs from BertModel by at most", f"{difference:.1g}", "0, bit for bit"
    )
    narrow = RankBertModel(RankBertConfig(**sizes, qk_rank=16)).eval()
    attention = narrow.encoder.layer[0].attention.self
    query, key = (layer.weight.view(12, 16, 768).double() for layer in (attention.query, attention.key))
    ranks = torch.linalg.matrix_rank(query.transpose(1, 2) @ key)
    yield Claim(
        "With qk_rank=16, the 768 x 768 bilinear form of each of its 12 heads has rank",
        " ".join(sorted({str(rank) for rank in ranks.tolist()})),
        "16",
    )
    saved = parameter_counts(same).query_key[0] - parameter_counts(narrow).query_key[0]
    yield Claim(
        "and its queries and keys hold fewer weights per layer, by", f"{saved:,}", "2 x 12 x 48 x 768 = 884,736"
    )


def run_demo(progress: Callable[[], Any] = lambda: None) -> list[Claim]:
    """Run everything; `progress` is called once per training step, [`TOTAL_STEPS`] times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower on two
    try:
        return [*rank_is_a_resource(progress), *rank_is_a_config_field()]
    finally:
        torch.set_num_threads(threads)
