"""Faults of the published code on the benefits of rank: each number with the fault and without it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, judge
from ._points import run_training, training_cell


NAME = "code-faults"
SHOWS = "faults of the published code on the benefits of rank: what a number is with each, and without it"
REVISION = 1

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "seeds": 1, "replay": 2, "rows": 256,
        "training": {"dim": 8, "num_points": 4, "intermediate": 32, "steps": 40, "batch_size": 32, "held_out_rows": 256},
    },
    # so few batches and steps that replaying shows: the published runs replay 100 batches a thousand times
    "laptop": {
        "seeds": 3, "replay": 10, "rows": 8192,
        "training": {"dim": 16, "num_points": 8, "intermediate": 256, "steps": 1000, "batch_size": 64},
    },
    "paper": {
        "seeds": 5, "replay": 100, "rows": 65536,
        "training": {"dim": 64, "num_points": 16, "intermediate": 2048, "steps": 100_000, "batch_size": 256},
    },
}  # fmt: skip
SOURCE = "Amsel et al., code"
WORKERS = 7  # of the published data loader


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, found = SETTINGS[scale], []
    draws = list(range(seeds or setting["seeds"]))
    full = setting["training"]["dim"]
    for axis in grid(replay=[None, setting["replay"]], rank=[full, full // 2], seed=draws):
        training = setting["training"] | {"layers": 1, "rank": axis["rank"], "heads": full // axis["rank"]}
        seeds_of_run = {"init_seed": axis["seed"], "data_seed": axis["seed"], "replay": axis["replay"]}
        found.append(training_cell({"kind": "replay", "seed": axis["seed"]}, **training, **seeds_of_run))
    found += [
        Cell({"kind": "numbers", "rows": setting["rows"], "seed": seed, "dim": 8, "paper_dim": 64}) for seed in draws
    ]
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    if parameters["kind"] == "replay":
        return run_training(parameters, work)
    d, seed, rows = parameters["dim"], parameters["seed"], parameters["rows"]
    return [
        {
            **first_coordinates(d, rows, seed),
            **shared_rows(d, seed, min(rows, 512)),
            **parameter_counts_of_positions(parameters["paper_dim"]),
            **norm_of_zero(d),
        }
    ]


def first_coordinates(d: int, rows: int, seed: int) -> dict[str, float]:
    """The mean of the first coordinate of the first of two orthonormal points: zero, if no direction is preferred."""
    from ...tasks import orthonormal_vectors, random_generator

    raw, _ = np.linalg.qr(random_generator(seed, "raw").standard_normal((rows, d, 2)))
    ours = orthonormal_vectors(random_generator(seed, "ours"), rows, 2, d)
    return {"coordinate_with": float(raw[:, 0, 0].mean()), "coordinate_without": float(ours[:, 0, 0].mean())}


def shared_rows(d: int, seed: int, rows: int) -> dict[str, float]:
    """The share of rows that the runs of two neighbouring seeds have in common.

    The published loader seeds each of its workers with the seed of the run plus the number of the worker.
    """
    from ...tasks import task_builder

    first, second = ({seed + step + worker for worker in range(WORKERS)} for step in (0, 1))
    ours = [
        {row.tobytes() for row in task_builder("farthest_neighbor", dim=d, num_points=4, seed=s).sample("train", rows)["points"]}
        for s in (seed, seed + 1)
    ]  # fmt: skip
    return {"shared_with": len(first & second) / WORKERS, "shared_without": len(ours[0] & ours[1]) / rows}


def parameter_counts_of_positions(d: int) -> dict[str, float]:
    """Weights of a layer with concatenated positions over those of one without, as published and at one budget."""
    from ...models import parameter_counts
    from ._training import PointTraining, initial_model
    from .positions import budget_of

    common = {"dim": d, "num_points": 16, "intermediate": 2048}
    counts = {}
    for name, position, as_published in (
        ("none", "none", False), ("with", "concatenated", True), ("without", "concatenated", False),
    ):  # fmt: skip
        geometry = budget_of(position, d // 2, 8, common, as_published)
        training = PointTraining(
            **common | geometry, layers=1, rank=d // 2, steps=1, init_seed=0, data_seed=0, position=position
        )
        counts[name] = parameter_counts(initial_model(training)).live
    return {f"budget_{name}": counts[name] / counts["none"] for name in ("with", "without")}


def norm_of_zero(d: int) -> dict[str, float | None]:
    """What the norm of the encoder makes of a zero vector; None for what is no number."""
    import torch

    from ...models import RankEncoderConfig, RankEncoderForPointRegression

    zero = torch.zeros(d)
    published = (zero / zero.norm()).sum().item()
    model: Any = RankEncoderForPointRegression(RankEncoderConfig(input_dim=d))
    ours = model.encoder.layers[0].attention_norm(zero).sum().item()
    return {"norm_with": published if np.isfinite(published) else None, "norm_without": ours}


def figures(table, scale: str):
    from ._figures import replay_figure

    return {"code-faults": replay_figure(table[table.kind == "replay"])}


def claims(table, scale: str) -> Sequence[Claim]:
    runs = table[table.kind == "replay"]
    replayed = runs.replay.notna()
    found = []
    for rank, rows in runs.groupby("rank", sort=False):
        gap = rows[rows.replay.notna()].set_index("seed")[["train_error", "held_out_error"]]
        seen, fresh = (
            rows[rows.replay.notna() == again][["train_error", "held_out_error"]].mean() for again in (True, False)
        )
        found.append(
            judge("held-out error minus reported error", gap.held_out_error - gap.train_error, least=0).claim(
                f"Fault: the same batches are replayed, and the error on them is reported (rank {int(rank)} of "
                f"{int(rows['dim'].iloc[0])}, {int(runs[replayed].replay.iloc[0])} batches, {int(rows.steps.iloc[0])} steps)",
                SOURCE,
                "train errors only",
                f"with it {seen.train_error:.3f}, truly {seen.held_out_error:.3f}; fresh rows {fresh.train_error:.3f} and "
                f"{fresh.held_out_error:.3f}",
                "100 batches of 256 were replayed a thousand times in the published runs: there the gap is smaller.",
            )
        )
    numbers = table[table.kind == "numbers"].mean(numeric_only=True)
    nan = bool(table[table.kind == "numbers"].norm_with.isna().all())
    source = "What it does with the fault follows from its source; what is judged is this package."
    rows = [
        (
            "orthonormal points are taken from QR as it comes, which prefers a direction: mean first coordinate, d 8",
            f"{numbers.coordinate_with:.3f} with it, {numbers.coordinate_without:.3f} without",
            bool(abs(numbers.coordinate_with) > 0.2 and abs(numbers.coordinate_without) < 0.05),
            "Required: more than 0.2 with it, less than 0.05 without.",
        ),
        (
            "workers are seeded with seed + worker: share of the streams that two neighbouring seeds have in common",
            f"{numbers.shared_with:.2f} with it, {numbers.shared_without:g} without",
            bool(numbers.shared_without == 0),
            source,
        ),
        (
            "concatenated positions get more parameters than the others: all weights of a layer over those of no positions",
            f"{numbers.budget_with:.2f} times with it, {numbers.budget_without:.2f} without",
            bool(numbers.budget_with > 1.5 and abs(numbers.budget_without - 1) < 0.1),
            "Its queries and keys alone have 4 times as many.",
        ),
        (
            "the floor of the learning rate, lr // 10, is a whole division: the last rate for lr 0.01",
            f"{0.01 // 10:g} with it, {0.01 / 10:g} as it was meant; here zero on purpose",
            None,
            "Arithmetic: there is nothing to measure.",
        ),
        (
            "the norm divides by the length of a vector without an epsilon: what becomes of zero",
            f"{'no number' if nan else 'a number'} with it, {numbers.norm_without:g} without",
            bool(np.isfinite(numbers.norm_without)),
            source,
        ),
    ]
    return [
        *found,
        *(Claim(f"Fault: {text}", SOURCE, "", measured, holds, why) for text, measured, holds, why in rows),
    ]
