"""Depth in place of rank: two layers of rank-one heads that vote, against one layer that averages them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, judge
from ._points import errors_by_seed, run_training, seeds_of, training_cell


NAME = "depth"
SHOWS = "two-layer majority votes of rank-one heads against one-layer averages, constructed and trained"
REVISION = 1

TWIN: dict[str, Any] = {
    "task": "nearest_neighbor", "num_points": 2, "position": "concatenated", "intermediate": 64, "batch_size": 256,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"constructed": {16: [17]}, "seeds": 1, "rows": 512, "twins": {"dim": 8, "steps": 60}, "heads": 8},
    "laptop": {
        "constructed": {16: [17, 161, 1601], 64: [65, 641]}, "seeds": 3, "rows": 4096,
        "twins": {"dim": 16, "steps": 1000}, "heads": 32,
    },
    "paper": {
        "constructed": {16: [17, 161, 1601], 64: [65, 641, 6401]}, "seeds": 5, "rows": 16384,
        "twins": {"dim": 64, "steps": 50_000}, "heads": 256,
    },
}  # fmt: skip


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    draws = list(range(seeds or setting["seeds"]))
    found = [
        Cell(
            {"kind": "constructed", "dim": d, "heads": heads, "seed": seed, "rows": setting["rows"]}, cost=heads * 1e9
        )
        for d, counts in setting["constructed"].items()
        for heads in counts
        for seed in draws
    ]
    for axis in grid(layers=[1, 2], seed=draws):
        # one layer gets the heads of both, so that depth is all that differs
        heads = setting["heads"] * (2 if axis["layers"] == 1 else 1)
        labels = {"kind": "trained", "seed": axis["seed"]}
        training = TWIN | setting["twins"] | {"position_dim": setting["twins"]["dim"]}
        found.append(
            training_cell(
                labels, **training, layers=axis["layers"], heads=heads, rank=1, **seeds_of(axis["seed"], False)
            )
        )
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    if parameters["kind"] == "trained":
        return run_training(parameters, work)
    return [constructed(**{name: parameters[name] for name in ("dim", "heads", "seed", "rows")})]


def constructed(dim: int, heads: int, seed: int, rows: int) -> dict[str, Any]:
    """A voting network as a model, measured on the task, beside its formulas and the average of the same heads."""
    import numpy as np

    from ...tasks import task_builder
    from ...theory import average_error, majority_error, majority_limit, random_heads
    from ...theory.constructions import majority_vote
    from ._training import held_out_error
    from .random_features import measured_error

    builder = task_builder("nearest_neighbor", dim=dim, num_points=2, distribution="orthogonal", seed=seed)
    queries, keys = random_heads(dim, heads, seed, "equal")
    return {
        "status": "finished",
        "majority": held_out_error(
            majority_vote(dim, heads, seed), builder, rows, batch=max(1, 2**21 // heads // dim)
        ),
        "majority_formula": majority_error(dim, heads),
        "majority_limit": majority_limit(dim, heads),
        "average": measured_error(queries, keys, np.full(heads, 1 / heads), rows, seed),
        "average_formula": average_error(dim, heads),
    }


def figures(table, scale: str):
    from ._figures import depth_figure

    return {"depth": depth_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    votes = table[table.kind == "constructed"]
    mean = votes.groupby(["dim", "heads"])[["majority", "majority_formula", "average", "average_formula"]].mean()
    found = []
    for (d, heads), row in mean.iterrows():
        found.append(
            Claim(
                f"d = {d}: {heads} rank-one heads that vote in two layers, against their average in one",
                "Amsel et al., Theorem 7; the construction is ours",
                "",
                f"{row.majority:.3f} (formula {row.majority_formula:.3f}); average {row.average:.3f} "
                f"(formula {row.average_formula:.3f})",
                bool(
                    abs(row.majority / row.majority_formula - 1) < 0.15
                    and abs(row.average - row.average_formula) < 0.05
                ),
                "Required: the vote within 15 % of its formula, the average within 0.05.",
            )
        )
    most = mean[mean.index.get_level_values("heads") > 1000]
    if len(most):
        found.append(
            Claim(
                "With polynomially many heads, depth repairs rank one for two points",
                "Amsel et al., Theorem 7",
                "",
                ", ".join(
                    f"d {d}, {heads} heads: {row.majority:.3f} against {row.average:.3f}"
                    for (d, heads), row in most.iterrows()
                ),
                bool((most.majority < most.average / 2).all()),
                "Required: at most half of the error of the average.",
            )
        )
    twins = errors_by_seed(table[table.kind == "trained"], ["layers"])
    found.append(
        judge("error of two layers minus that of one", twins[2] - twins[1], most=0).claim(
            "Trained from scratch with the same number of rank-one heads, two layers are better than one",
            "Amsel et al., Section 6; the runs are ours",
            "",
            f"one layer {twins[1].mean():.3f}, two layers {twins[2].mean():.3f}",
            no="A vote needs many heads: the constructed networks with the fewest heads err more than an average of them, and "
            f"the trained ones have {int(table[table.layers == 2].heads.min())} a layer.",
        )
    )
    return found
