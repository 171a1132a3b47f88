"""Depth in place of rank: two layers of rank-one heads that vote, against one layer that averages them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...report.plots import STYLES, new_figure
from ...tasks import task_builder
from ...theory import average_error, majority_error, majority_limit, random_heads
from ...theory.constructions import majority_vote
from ..drawing import BLUE, plural
from ..sweep.grid import Cell
from ..sweep.judging import Claim, judge, unpublished
from ._points import errors_by_seed, run_training, training_cells
from ._training import held_out_error
from .random_features import measured_error


SHOWS = "two-layer majority votes of rank-one heads against one-layer averages, constructed and trained"

TWIN: dict[str, Any] = {"task": "nearest_neighbor", "num_points": 2, "intermediate": 64, "batch_size": 256}
# `constructed`: the numbers of heads by dimension; `trained`: dimension, steps, and heads of a layer if there are two layers
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"constructed": {16: [17]}, "rows": 512, "trained": (8, 60, 8), "seeds": 1},
    "laptop": {"rows": 4096, "trained": (16, 1000, 32), "seeds": 3}
    | {"constructed": {16: [17, 161, 1601], 64: [65, 641]}},
    "paper": {"rows": 16384, "trained": (64, 50_000, 256), "seeds": 5}
    | {"constructed": {16: [17, 161, 1601], 64: [65, 641, 6401]}},
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    count, (dim, steps, heads_of_two) = seeds or setting["seeds"], setting["trained"]
    constructed = [
        Cell({"kind": "constructed", "dim": d, "heads": heads, "seed": seed, "rows": setting["rows"]}, heads * 1e9)
        for d, counts in setting["constructed"].items()
        for heads in counts
        for seed in range(count)
    ]
    training = TWIN | {"position": "concatenated", "position_dim": dim, "dim": dim, "steps": steps, "rank": 1}
    # one layer gets the heads of both, so that only the depth differs
    trained = training_cells(
        lambda axis: {**training, "heads": heads_of_two * 2 // axis["layers"]}, count, kind="trained", layers=[1, 2]
    )
    return constructed + trained


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    if parameters["kind"] == "trained":
        return run_training(parameters, work)
    return [constructed(**{name: parameters[name] for name in ("dim", "heads", "seed", "rows")})]


def constructed(dim: int, heads: int, seed: int, rows: int) -> dict[str, Any]:
    """A voting network as a model, measured on the task, beside its formulas and the average of the same heads."""
    builder = task_builder("nearest_neighbor", dim=dim, num_points=2, distribution="orthogonal", seed=seed)
    queries, keys = random_heads(dim, heads, seed, "equal")
    return {
        "status": "finished",
        "majority": held_out_error(majority_vote(dim, heads, seed), builder, rows, max(1, 2**21 // heads // dim)),
        "majority_formula": majority_error(dim, heads),
        "majority_limit": majority_limit(dim, heads),
        "average": measured_error(queries, keys, np.full(heads, 1 / heads), rows, seed),
        "average_formula": average_error(dim, heads),
    }


def figures(table, scale: str):
    votes, twins = table[table.kind == "constructed"], table[table.kind == "trained"]
    figure, axes = new_figure(1, 2, 11.0, 4.6)
    left, right = axes[0]
    for (d, rows), (marker, line, colour) in zip(votes.groupby("dim"), STYLES, strict=False):
        mean = rows.groupby("heads").mean(numeric_only=True)
        left.plot(rows.heads, rows.majority, marker, color=colour, label=f"d {d}: two layers that vote")
        left.plot(mean.index, mean.majority_formula, line, color=colour, label=f"d {d}: formula")
        left.plot(rows.heads, rows.average, marker, color=colour, mfc="white", label=f"d {d}: one layer, average")
        left.plot(mean.index, mean.average_formula, line, color=colour, linewidth=0.7)
    left.set(xscale="log", yscale="log", xlabel="rank-one heads", ylabel="squared error, nearest of two points")
    left.set_title("constructed")
    left.legend()
    names: list[str] = []
    for place, (layers, rows) in enumerate(twins.groupby("layers")):
        right.plot([place] * len(rows), rows.held_out_error, "o", color=BLUE)
        right.hlines(rows.held_out_error.mean(), place - 0.2, place + 0.2, color=BLUE)
        names.append(f"{plural(int(layers), 'layer')} of {int(rows.heads.iloc[0])} heads")
    right.set_xticks(range(len(names)), names)
    right.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, None), ylabel="squared error, held out")
    first = twins.iloc[0]
    right.set_title(f"trained, rank one, d {int(first['dim'])}, {int(first.steps)} steps")
    figure.suptitle("Depth in place of rank")
    return {"depth": figure}


def claims(table, scale: str) -> Iterator[Claim]:
    votes = table[table.kind == "constructed"]
    mean = votes.groupby(["dim", "heads"])[["majority", "majority_formula", "average", "average_formula"]].mean()
    for (d, heads), row in mean.iterrows():
        close = abs(row.majority / row.majority_formula - 1) < 0.15 and abs(row.average - row.average_formula) < 0.05
        yield unpublished(
            f"d = {d}: {heads} rank-one heads that vote in two layers, against their average in one",
            f"{row.majority:.3f} (formula {row.majority_formula:.3f}); average {row.average:.3f} "
            f"(formula {row.average_formula:.3f})",
            close,
            "Required: the vote within 15 % of its formula, the average within 0.05.",
            "Amsel et al., Theorem 7; the construction is ours",
        )
    most = mean[mean.index.get_level_values("heads") > 1000]
    if len(most):
        yield unpublished(
            "With polynomially many heads, depth repairs rank one for two points",
            ", ".join(
                f"d {d}, {heads} heads: {row.majority:.3f} against {row.average:.3f}"
                for (d, heads), row in most.iterrows()
            ),
            (most.majority < most.average / 2).all(),
            "Required: at most half of the error of the average.",
            "Amsel et al., Theorem 7",
        )
    twins = errors_by_seed(table[table.kind == "trained"], ["layers"])
    yield judge("error of two layers minus that of one", twins[2] - twins[1], most=0).unpublished(
        "Trained from scratch with the same number of rank-one heads, two layers are better than one",
        "Amsel et al., Section 6; the runs are ours",
        f"one layer {twins[1].mean():.3f}, two layers {twins[2].mean():.3f}",
        no="A vote needs many heads: the constructed networks with the fewest heads err more than an average of them, and "
        f"the trained ones have {int(table[table.layers == 2].heads.min())} a layer.",
    )
