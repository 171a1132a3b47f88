"""Products of attention maps along random paths: how fast their rows become equal with the length of the path."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ...probe.isolated import path_products
from ...report.plots import STYLES, new_figure, published_table
from ..sweep.grid import Cell
from ..sweep.judging import Claim, unpublished
from ._subjects import FLOOR, checkpoint_inputs, checkpoint_parameters, fresh_model, inputs_of, layer_axis, titled


SHOWS = "residual of chained attention maps against the length of the path, in the theorem's and the published order"
OPTIONS = ("as_published", "checkpoint", "text", "dataset")

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"shape": "tiny", "length": 16, "examples": 2, "samples": 4, "seeds": 1},
    "laptop": {"shape": "base", "length": 128, "examples": 4, "samples": 100, "seeds": 2},
    "paper": {"shape": "base", "length": 128, "examples": 32, "samples": 100, "seeds": 5},
}
# order of the product, what is removed: the theorem's way, and that of the published code
WAYS = {
    ("theorem", "mean"): "theorem's order, mean row taken away",
    ("theorem", "rank1"): "theorem's order, best rank one taken away",
    ("reversed", "rank1"): "as published: reversed order, best rank one",
}
EXPECTED = {1: 0.153, 2: 2.6e-3, 3: 4.6e-5}
NOTEBOOK = "Dong et al., notebook on products of attention maps"


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = {name: value for name, value in SETTINGS[scale].items() if name != "seeds"}
    ways = list(WAYS)[-1:] if options.get("as_published") else list(WAYS)
    nothing = {"weights": "init", "checkpoint": None, "text": None, "dataset": None}
    sources = [{**nothing, "seed": seed} for seed in range(seeds or SETTINGS[scale]["seeds"])]
    if options.get("checkpoint"):
        sources.append({"weights": "checkpoint", **checkpoint_parameters(options), "seed": 0})
    return [
        Cell({**setting, **source, "order": order, "center": center}, cost=20.0)
        for source in sources
        for order, center in ways
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    sizes = {name: parameters[name] for name in ("examples", "length", "seed")}
    if parameters["checkpoint"]:
        model, batches, _ = checkpoint_inputs(parameters, **sizes)
    else:
        model = fresh_model("bert", parameters["shape"], parameters["seed"])
        batches = inputs_of(model.config, "ids", **sizes)
    chosen = {name: parameters[name] for name in ("samples", "seed", "center")}
    # one batch, so that the number of paths does not depend on how examples are batched
    table = path_products(model, batches[0], reverse=parameters["order"] == "reversed", **chosen)
    return table.rename(columns={"length": "length_of_path"})[["length_of_path", "path", "value"]].to_dict("records")


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    figure, axes = new_figure(1, 1, 8.4, 5.8)
    axis, styles = axes[0, 0], iter(STYLES)
    for weights in dict.fromkeys(table.weights):
        for (order, center), title in WAYS.items():
            rows = table[(table.weights == weights) & (table.order == order) & (table.center == center)]
            if not len(rows):
                continue
            marker, line, colour = next(styles)
            levels = rows.groupby("length_of_path").value.quantile([0.25, 0.5, 0.75]).unstack()
            label = f"{'fresh' if weights == 'init' else weights}: {title}"
            axis.plot(levels.index, levels[0.5], line + marker, color=colour, label=label)
            axis.fill_between(levels.index, levels[0.25], levels[0.75], color=colour, alpha=0.15, linewidth=0)
    published = published_table("attention_products")
    for weights, name, marker in (("init", "fresh", "o"), ("pretrained", "pretrained", "s")):
        rows = published[published.weights == weights]
        label = f"published, {name} BERT-base (read by eye)"
        axis.plot(rows.length, rows.value, ":" + marker, color="0.4", mfc="white", markersize=7, label=label)
    layer_axis(axis)
    axis.set(xlabel="maps in the product (length of the path)", ylabel="relative residual of the product")
    axis.set_ylim(FLOOR / 4, 1.5)
    samples = int(table.samples.iloc[0])
    title = f"Chained attention maps along {samples} random paths of each length (median, quartiles)"
    return {"attention-products": titled(figure, title, [axis], columns=2)}


def medians(table: pd.DataFrame, order: str, center: str, weights: str = "init") -> pd.Series:
    rows = table[(table.order == order) & (table.center == center) & (table.weights == weights)]
    return rows.groupby("length_of_path").value.median()


def listed(values: pd.Series) -> str:
    return ", ".join(f"{value:.2g}" for value in list(values)[:4])


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    published = published_table("attention_products").set_index(["weights", "length"]).value
    read = listed(published["init"]) + ", then the floor (read by eye)"
    right, faulty = medians(table, "theorem", "mean"), medians(table, "reversed", "rank1")
    if len(right):
        yield from theorem_claims(right, read)
    if len(faulty):
        other = medians(table, "theorem", "rank1")
        yield Claim(
            "Fault: the published code multiplies in reversed order (A_1 A_2 ... A_L) and takes the best rank-one "
            "matrix away",
            "Dong et al., code",
            read,
            f"{listed(faulty)} as published" + (f"; {listed(other)} in the theorem's order" if len(other) else ""),
            all(0.4 < faulty[k] / published["init", k] < 2.5 for k in (1, 2, 3) if k in faulty),
            "Required: the published numbers within a factor 2.5. At initialisation maps of all layers are alike, so "
            "the order does not show; in a checkpoint it does.",
        )
        yield Claim(
            "Fault: functions.composite_norm of the published code leaves out the root, which squares every ratio",
            "Dong et al., code",
            f"{published['init', 1]:.2g} for k = 1",
            f"{faulty[1]:.2g} with the root, {faulty[1] ** 2:.2g} without it",
            abs(faulty[1] - 0.16) < abs(faulty[1] ** 2 - 0.16),
            "Required: nearer to 0.16 with the root. The published figure was made by the other copy of that function, which has it.",
        )
    yield checkpoint_claim(table, published)


def theorem_claims(right: pd.Series, read: str) -> Iterator[Claim]:
    yield Claim(
        "Chained maps along a path of k heads are nearer to rank one the longer it is: median residual for k = 1, 2, 3, 4 "
        "at initialisation",
        NOTEBOOK,
        read,
        listed(right) + " (theorem's order, mean row)",
        all(0.5 < right[k] / value < 2 for k, value in EXPECTED.items() if k in right),
        "Required: within a factor 2 of 0.153, 2.6e-3 and 4.6e-5, from a simulation of ours.",
    )
    second = right[2] / right[1]
    third = right[3] / right[2] if 3 in right else second
    yield unpublished(
        "A product of maps forgets by a constant factor a map, not doubly exponentially: what collapses doubly "
        "exponentially are the states of attention without skips",
        f"factors 1/{1 / second:.0f} and 1/{1 / third:.0f} for the second and third map",
        0.4 < second / third < 2.5,
        "Required: factors within 2.5 of each other.",
    )


def checkpoint_claim(table: pd.DataFrame, published: pd.Series) -> Claim:
    way = ("theorem", "mean") if (table.center == "mean").any() else ("reversed", "rank1")
    rows, fresh = medians(table, *way, weights="checkpoint"), medians(table, *way)
    text = "Trained maps forget more slowly than fresh ones: median residual for k = 1, 2, 3, 4"
    read = listed(published["pretrained"]) + " (bert-base-cased, read by eye)"
    if not len(rows):
        why = "Needs trained weights: --checkpoint google-bert/bert-base-cased --dataset wiki_bio."
        return Claim(text, NOTEBOOK, read, "", None, why)
    name = table[table.weights == "checkpoint"].checkpoint.iloc[0]
    measured = f"{listed(rows)} ({'/'.join(Path(name).parts[-2:])}); fresh weights {listed(fresh)}"
    return Claim(text, NOTEBOOK, read, measured, rows[2] > fresh[2], "Required: more at k = 2.")
