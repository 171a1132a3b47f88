"""Products of attention maps along random paths: how fast chained maps forget which token they started from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .grid import Cell
from .runner import Claim
from .subjects import checkpoint_inputs, checkpoint_parameters, fresh_model, inputs_of


NAME = "attention-products"
SHOWS = "residual of chained attention maps against the length of the path, in the theorem's and the published order"
REVISION = 1
OPTIONS = ("as_published", "checkpoint", "text", "dataset")

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"shape": "tiny", "length": 16, "examples": 2, "samples": 4, "seeds": 1},
    "laptop": {"shape": "base", "length": 128, "examples": 4, "samples": 100, "seeds": 2},
    "paper": {"shape": "base", "length": 128, "examples": 32, "samples": 100, "seeds": 5},
}
# order of the product, what is taken away: the theorem's, and the published code's
WAYS = [("theorem", "mean"), ("theorem", "rank1"), ("reversed", "rank1")]
EXPECTED = {1: 0.153, 2: 2.6e-3, 3: 4.6e-5}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = dict(SETTINGS[scale])
    count = seeds or setting.pop("seeds")
    setting.pop("seeds", None)
    ways = WAYS[-1:] if options.get("as_published") else WAYS
    sources: list[dict[str, Any]] = [
        {"weights": "init", "checkpoint": None, "text": None, "dataset": None, "seed": seed} for seed in range(count)
    ]
    if options.get("checkpoint"):
        sources.append({"weights": "checkpoint", **checkpoint_parameters(options), "seed": 0})
    return [
        Cell({**setting, **source, "order": order, "center": center}, cost=20.0)
        for source in sources
        for order, center in ways
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    from ..probe.isolated import path_products

    sizes = {name: parameters[name] for name in ("examples", "length", "seed")}
    if parameters["checkpoint"]:
        model, batches, _ = checkpoint_inputs(parameters, **sizes)
    else:
        model = fresh_model("bert", parameters["shape"], parameters["seed"])
        batches = inputs_of(model.config, "ids", **sizes)
    # one batch, so that the number of paths does not depend on how examples are batched
    table = path_products(
        model, batches[0], samples=parameters["samples"], seed=parameters["seed"],
        reverse=parameters["order"] == "reversed", center=parameters["center"],
    )  # fmt: skip
    return [
        {"length_of_path": int(row.length), "path": int(row.path), "value": float(row.value)}
        for row in table.itertuples()
    ]


def figures(table, scale: str):
    from ..report.collapse import attention_products_figure

    return {"attention-products": attention_products_figure(table)}


def medians(table, order: str, center: str, weights: str = "init"):
    rows = table[(table.order == order) & (table.center == center) & (table.weights == weights)]
    return rows.groupby("length_of_path").value.median()


def listed(values, count: int = 4) -> str:
    return ", ".join(f"{value:.2g}" for value in list(values)[:count])


def claims(table, scale: str) -> Sequence[Claim]:
    from ..report.plots import published_table

    published = published_table("attention_products").set_index(["weights", "length"]).value
    read = listed(published["init"]) + ", then the floor (read by eye)"
    found = []
    faulty = medians(table, "reversed", "rank1")
    right = medians(table, "theorem", "mean")
    if len(right):
        near = all(0.5 < right[k] / value < 2 for k, value in EXPECTED.items() if k in right)
        found.append(
            Claim(
                "Chained maps along a path of k heads are nearer to rank one the longer it is: median residual for "
                "k = 1, 2, 3, 4 at initialisation",
                "Dong et al., notebook on products of attention maps",
                read,
                listed(right) + " (theorem's order, mean row)",
                near,
            )
        )
        step = (right[2] / right[1], right[3] / right[2]) if 3 in right else (right[2] / right[1],) * 2
        found.append(
            Claim(
                "A product of maps forgets by a constant factor a map, not doubly exponentially: what collapses doubly "
                "exponentially are the states of attention without skips",
                "ours",
                "",
                f"factors 1/{1 / step[0]:.0f} and 1/{1 / step[1]:.0f} for the second and third map",
                bool(0.4 < step[0] / step[1] < 2.5),
            )
        )
    if len(faulty):
        other = medians(table, "theorem", "rank1")
        found.append(
            Claim(
                "Fault: the published code multiplies in reversed order (A_1 A_2 ... A_L) and takes the best rank-one "
                "matrix away",
                "Dong et al., code",
                read,
                f"{listed(faulty)} as published" + (f"; {listed(other)} in the theorem's order" if len(other) else ""),
                all(0.4 < faulty[k] / published["init", k] < 2.5 for k in (1, 2, 3) if k in faulty),
                "At initialisation maps of all layers are alike, so the order does not show; in a checkpoint it does.",
            )
        )
        found.append(
            Claim(
                "Fault: functions.composite_norm of the published code leaves out the root, which squares every ratio",
                "Dong et al., code",
                f"{published['init', 1]:.2g} for k = 1",
                f"{faulty[1]:.2g} with the root, {faulty[1] ** 2:.2g} without it",
                bool(abs(faulty[1] - 0.16) < abs(faulty[1] ** 2 - 0.16)),
                "The published figure was made by the other copy of that function, which has the root.",
            )
        )
    found.append(checkpoint_claim(table, published))
    return found


def checkpoint_claim(table, published) -> Claim:
    rows = medians(table, "theorem", "mean", "checkpoint")
    rows = rows if len(rows) else medians(table, "reversed", "rank1", "checkpoint")
    text = "Trained maps forget more slowly than fresh ones: median residual for k = 1, 2, 3, 4"
    read = listed(published["pretrained"]) + " (bert-base-cased, read by eye)"
    source = "Dong et al., notebook on products of attention maps"
    if not len(rows):
        why = "Needs trained weights: --checkpoint google-bert/bert-base-cased --dataset wiki_bio."
        return Claim(text, source, read, "", None, why)
    fresh = medians(table, "theorem", "mean")
    fresh = fresh if len(fresh) else medians(table, "reversed", "rank1")
    name = table[table.weights == "checkpoint"].checkpoint.iloc[0]
    measured = f"{listed(rows)} ({'/'.join(Path(name).parts[-2:])}); fresh weights {listed(fresh)}"
    return Claim(text, source, read, measured, bool(rows[2] > fresh[2]))
