"""Faults of the published code on the benefits of rank: each number with the fault and without it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...models import RankEncoderConfig, RankEncoderForPointRegression, parameter_counts
from ...report.plots import STYLES, new_figure
from ...tasks import orthonormal_vectors, random_generator, task_builder
from ..sweep.grid import Cell
from ..sweep.judging import Claim, judge, unpublished
from ._curves import setting_of
from ._points import TRAINING, run_training, training_cells
from ._training import PointTraining, initial_model
from .positions import budget_of


SHOWS = "faults of the published code on the benefits of rank: what a number is with each, and without it"

# So few batches and steps that replaying shows: the published runs replay 100 batches a thousand times.
LAPTOP = {"intermediate": 256, "steps": 1000, "batch_size": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"seeds": 1, "replay": 2, "rows": 256, "training": {"steps": 40}},
    "laptop": {"seeds": 3, "replay": 10, "rows": 8192, "training": LAPTOP},
    "paper": {"seeds": 5, "replay": 100, "rows": 65536, "training": {}},
}
SOURCE = "Amsel et al., code"
WORKERS = 7  # of the published data loader


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    count, training = seeds or setting["seeds"], TRAINING[scale] | setting["training"] | {"layers": 1}
    full = training["dim"]
    numbers = {"kind": "numbers", "rows": setting["rows"], "dim": 8, "paper_dim": 64}
    return [
        *training_cells(
            lambda axis: {**training, "heads": full // axis["rank"]},
            count,
            kind="replay",
            replay=[None, setting["replay"]],
            rank=[full, full // 2],
        ),
        *(Cell({**numbers, "seed": seed}) for seed in range(count)),
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    if parameters["kind"] == "replay":
        return run_training(parameters, work)
    d, seed, rows = parameters["dim"], parameters["seed"], parameters["rows"]
    first, shared = first_coordinates(d, rows, seed), shared_rows(d, seed, min(rows, 512))
    return [{**first, **shared, **parameter_counts_of_positions(parameters["paper_dim"]), **norm_of_zero(d)}]


def first_coordinates(d: int, rows: int, seed: int) -> dict[str, float]:
    """The mean of the first coordinate of the first of two orthonormal points: zero, if no direction is preferred."""
    raw, _ = np.linalg.qr(random_generator(seed, "raw").standard_normal((rows, d, 2)))
    ours = orthonormal_vectors(random_generator(seed, "ours"), rows, 2, d)
    return {"coordinate_with": float(raw[:, 0, 0].mean()), "coordinate_without": float(ours[:, 0, 0].mean())}


def shared_rows(d: int, seed: int, rows: int) -> dict[str, float]:
    """The share of rows that the runs of two neighbouring seeds have in common.

    The published loader seeds each of its workers with the seed of the run plus the number of the worker.
    """
    first, second = ({seed + step + worker for worker in range(WORKERS)} for step in (0, 1))
    drawn = (
        task_builder("farthest_neighbor", dim=d, num_points=4, seed=s).sample("train", rows) for s in (seed, seed + 1)
    )
    ours = [{row.tobytes() for row in arrays["points"]} for arrays in drawn]
    return {"shared_with": len(first & second) / WORKERS, "shared_without": len(ours[0] & ours[1]) / rows}


def parameter_counts_of_positions(d: int) -> dict[str, float]:
    """Weights of a layer with concatenated positions over those of one without, as published and at one budget."""

    def live_weights(position: str, as_published: bool = False) -> int:
        fields: dict[str, Any] = {"dim": d, "num_points": 16, "intermediate": 2048, "layers": 1, "rank": d // 2}
        fields |= budget_of(position, d // 2, 8, fields, as_published) | {"position": position}
        return parameter_counts(initial_model(PointTraining(**fields, steps=1, init_seed=0, data_seed=0))).live

    none = live_weights("none")
    published, equal = (live_weights("concatenated", as_published) for as_published in (True, False))
    return {"budget_with": published / none, "budget_without": equal / none}


def norm_of_zero(d: int) -> dict[str, float | None]:
    """The norm layer of the encoder, applied to a zero vector; None stands for NaN."""
    zero = torch.zeros(d)
    published = (zero / zero.norm()).sum().item()
    model: Any = RankEncoderForPointRegression(RankEncoderConfig(input_dim=d))
    ours = model.encoder.layers[0].attention_norm(zero).sum().item()
    return {"norm_with": published if np.isfinite(published) else None, "norm_without": ours}


def figures(table, scale: str):
    """Train and held-out error of runs on fresh rows and on replayed rows, a group of marks for each rank."""
    runs = table[table.kind == "replay"]
    figure, axes = new_figure(1, 1, 7.0, 4.4)
    axis, names = axes[0, 0], []
    estimates = {
        "error on train rows, the published estimator": "train_error",
        "error on rows never seen": "held_out_error",
    }
    for place, ((rank, again), rows) in enumerate(runs.groupby(["rank", runs.replay.notna()], sort=False)):
        for shift, (label, column), (marker, _, colour) in zip((-0.1, 0.1), estimates.items(), STYLES, strict=False):
            x = [place + shift] * len(rows)
            axis.plot(x, rows[column], marker, color=colour, label=None if place else label)
        names.append(
            f"rank {int(rank)}\n" + (f"{int(rows.replay.iloc[0])} batches replayed" if again else "fresh rows")
        )
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set(ylim=(0, None), ylabel="squared error per point")
    axis.legend()
    figure.suptitle(f"What replaying batches does to the reported error\n({setting_of(runs)})")
    return {"code-faults": figure}


def claims(table, scale: str) -> Iterator[Claim]:
    runs = table[table.kind == "replay"]
    batches = int(runs.replay.dropna().iloc[0])
    for rank, rows in runs.groupby("rank", sort=False):
        again = rows.replay.notna()
        gap = rows[again].set_index("seed")
        seen, fresh = (part[["train_error", "held_out_error"]].mean() for part in (rows[again], rows[~again]))
        yield judge("held-out error minus reported error", gap.held_out_error - gap.train_error, least=0).claim(
            f"Fault: the same batches are replayed, and the error on them is reported (rank {int(rank)} of "
            f"{int(rows['dim'].iloc[0])}, {batches} batches, {int(rows.steps.iloc[0])} steps)",
            SOURCE,
            "train errors only",
            f"with it {seen.train_error:.3f}, truly {seen.held_out_error:.3f}; fresh rows {fresh.train_error:.3f} and "
            f"{fresh.held_out_error:.3f}",
            "100 batches of 256 were replayed a thousand times in the published runs: there the gap is smaller.",
        )
    numbers = table[table.kind == "numbers"].mean(numeric_only=True)
    nan = bool(table[table.kind == "numbers"].norm_with.isna().all())
    source = "What it does with the fault follows from its source; what is judged is this package."

    def fault(text: str, measured: str, holds: bool | None, why: str) -> Claim:
        return unpublished(f"Fault: {text}", measured, holds, why, SOURCE)

    yield fault(
        "orthonormal points are taken from QR as it comes, which prefers a direction: mean first coordinate, d 8",
        f"{numbers.coordinate_with:.3f} with it, {numbers.coordinate_without:.3f} without",
        bool(abs(numbers.coordinate_with) > 0.2 and abs(numbers.coordinate_without) < 0.05),
        "Required: more than 0.2 with it, less than 0.05 without.",
    )
    yield fault(
        "workers are seeded with seed + worker: share of the streams that two neighbouring seeds have in common",
        f"{numbers.shared_with:.2f} with it, {numbers.shared_without:g} without",
        bool(numbers.shared_without == 0),
        f"Required: 0 without it. {source}",
    )
    yield fault(
        "concatenated positions get more parameters than the others: all weights of a layer over those of no positions",
        f"{numbers.budget_with:.2f} times with it, {numbers.budget_without:.2f} without",
        bool(numbers.budget_with > 1.5 and abs(numbers.budget_without - 1) < 0.1),
        "Required: above 1.5 with it, within 0.1 of 1 without. Its queries and keys alone have 4 times as many.",
    )
    yield fault(
        "the floor of the learning rate, lr // 10, is a whole division: the last rate for lr 0.01",
        f"{0.01 // 10:g} with it, {0.01 / 10:g} as it was meant; here zero on purpose",
        None,
        "Arithmetic: there is nothing to measure.",
    )
    yield fault(
        "the norm divides by the length of a vector without an epsilon: what becomes of zero",
        f"{'no number' if nan else 'a number'} with it, {numbers.norm_without:g} without",
        bool(np.isfinite(numbers.norm_without)),
        f"Required: a number without it. {source}",
    )
