"""Positions none, added or concatenated, at an equal budget: concatenated ones are scratch space, and help."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...report.plots import published_table
from ..drawing import plural
from ..sweep.grid import Cell
from ..sweep.judging import Claim, every, judge
from ..sweep.tolerances import SEPARATION
from ._curves import rank_figure
from ._points import FORMS, TRAINING, errors_by_seed, estimator_by, judge_separation, run_training, training_cells


SHOWS = "error against rank without positions, with added and with concatenated ones, at one parameter budget"
OPTIONS = ("as_published",)

# The original form needs more than 2000 steps before positions make a difference, and three layers need a lower rate.
LAPTOP_PANELS: list[dict[str, Any]] = [
    {"layers": 1, "ranks": [16, 8, 1], "learning_rate": 0.01},
    {"layers": 3, "ranks": [16, 8], "learning_rate": 0.003},
]
PAPER_PANELS: list[dict[str, Any]] = [
    {"layers": layers, "ranks": [64, 32, 16, 8, 4, 2, 1], "learning_rate": 0.005} for layers in (1, 3)
]
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"panels": [{"layers": 1, "ranks": [8, 2]}], "multiple": 2, "forms": ["original"], "seeds": 1},
    "laptop": {"panels": LAPTOP_PANELS, "multiple": 2, "forms": ["qk_norm"], "seeds": 3, "training": {"steps": 2000}},
    "paper": {"panels": PAPER_PANELS, "multiple": 8, "forms": FORMS, "seeds": 5, "training": {"steps": 200_000}},
}
POSITIONS = ["none", "additive", "concatenated"]


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, found = SETTINGS[scale], []
    for panel in setting["panels"]:
        training = TRAINING[scale] | setting.get("training", {}) | panel
        ranks = training.pop("ranks")

        def training_of_axis(axis, training=training):
            as_published = axis["as_published"]
            return training | budget_of(axis["position"], axis["rank"], setting["multiple"], training, as_published)

        axes = {"position": POSITIONS, "form": setting["forms"], "rank": ranks}
        found += training_cells(training_of_axis, seeds or setting["seeds"], options, **axes)
    return found


def budget_of(
    position: str, rank: int, multiple: int, training: Mapping[str, Any], as_published: bool
) -> dict[str, Any]:
    """Heads and MLP width that spend one budget, for every width of the residual stream.

    Concatenated positions double the width. With the same number of heads and the same MLP a layer then has twice the
    parameters of the others. The published runs also doubled the heads, so their queries and keys have four times as many.
    """
    heads = training["dim"] * multiple // rank
    if position != "concatenated":
        return {"heads": heads}
    widened = {"position_dim": training["dim"]}
    if as_published:
        return widened | {"heads": 2 * heads}
    return widened | {"heads": heads // 2, "intermediate": training["intermediate"] // 2}


run = run_training
complete = estimator_by("layers", "position", "form", "rank", "as_published")


def figures(table, scale: str):
    """A panel for each depth and form, a line for each kind of positions."""
    budget = "published budgets" if table.as_published.any() else "one parameter budget for all three"
    published, note = published_table("positions"), "; published: unequal budgets"
    return {"positions": rank_figure(table, published, "position", "positions: {}", f"Positions, {budget}", note)}


def claims(table, scale: str) -> Iterator[Claim]:
    published = published_table("positions").set_index(["layers", "position", "rank"]).value
    full = int(table["dim"].iloc[0])
    for (layers, form), rows in table.groupby(["layers", "form"], sort=False):
        errors = errors_by_seed(rows, ["position", "rank"])
        mean, low = errors.mean(), int(rows[rows["rank"] < full]["rank"].max())
        change = errors["concatenated", low] - errors["none", low]
        yield judge("error with concatenated positions minus that without", change, most=0).claim(
            f"{plural(layers, 'layer')}, {form}: concatenated positions lower the error of half rank, at one budget",
            "Amsel et al., positional encodings",
            f"{published[layers, 'none', 32]:.3g} -> {published[layers, 'concatenated', 32]:.3g} "
            "(d 64, with 4 times the query-key parameters and other learning rates)",
            f"{mean['none', low]:.3g} -> {mean['concatenated', low]:.3g}",
            no="At one budget concatenated positions leave half as many heads; the published ones had more parameters.",
        )
        yield every(
            judge_separation(f"positions {name}", errors[name, low], errors[name, full], SEPARATION)
            for name in POSITIONS
        ).unpublished(
            f"{plural(layers, 'layer')}, {form}: with any positions, full rank is at least "
            f"{SEPARATION:g} times better than half rank",
            "Amsel et al., positional encodings",
            ", ".join(f"{name} {mean[name, low] / mean[name, full]:.1f}" for name in POSITIONS),
            no=f"These runs have {int(rows.steps.iloc[0])} steps, the published ones 2e5.",
        )
