"""Error against rank for longer and longer rows of points: what depth repairs for few points, it does not for many."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...report.plots import published_table
from ..sweep.grid import Cell
from ..sweep.judging import Claim, judge
from ..sweep.tolerances import GROWTH_WITH_POINTS, SEPARATION
from ._curves import rank_figure
from ._points import FORMS, TRAINING, errors_by_seed, estimator_by, judge_separation, run_training, training_cells


SHOWS = "error against rank for rows of 4 to 256 points, two layers, in the original form and with qk_norm"
OPTIONS = ("as_published",)

LAPTOP = {"batch_size": 64, "learning_rate": 0.005, "held_out_rows": 1024}
PAPER = {"steps": 200_000, "learning_rate": 0.005, "held_out_rows": 1024}
# many heads, as published: with few heads half rank errs as much on 4 points as on 32
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"points": [3, 4], "ranks": [8, 1], "multiple": 1, "forms": ["original"], "seeds": 1},
    "laptop": {"points": [4, 16, 32], "ranks": [16, 8], "multiple": 8, "seeds": 3, "training": LAPTOP},
    "paper": {"points": [4, 16, 64, 256], "ranks": [64, 32, 16, 8, 1], "multiple": 64, "seeds": 5, "training": PAPER},
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    training = TRAINING[scale] | setting.get("training", {}) | {"layers": 2}
    return training_cells(
        lambda axis: {**training, "heads": training["dim"] * setting["multiple"] // axis["rank"]},
        seeds or setting["seeds"],
        options,
        num_points=setting["points"],
        form=setting.get("forms", FORMS),
        rank=setting["ranks"],
    )


run = run_training
complete = estimator_by("num_points", "form", "rank", "as_published")


def figures(table, scale: str):
    """A panel for each form, a line for each number of points."""
    published = published_table("context_length").assign(layers=2).sort_values("num_points", kind="stable")
    title = "Farthest of N points, two layers"
    return {"context-length": rank_figure(table, published, "num_points", "N = {}", title)}


def claims(table, scale: str) -> Iterator[Claim]:
    published = published_table("context_length").set_index(["num_points", "rank"]).value
    full = int(table["dim"].iloc[0])
    for form, rows in table.groupby("form", sort=False):
        errors = errors_by_seed(rows, ["num_points", "rank"])
        mean = errors.mean()
        shortest, longest = int(rows.num_points.min()), int(rows.num_points.max())
        low = int(rows[rows["rank"] < full]["rank"].max())
        grows = errors[longest, low] / errors[shortest, low]
        steps = f"These runs have {int(rows.steps.iloc[0])} steps, the published ones 2e5."
        what = f"error at N {longest} over that at N {shortest}"
        yield judge(what, grows, least=GROWTH_WITH_POINTS, ratio=True).claim(
            f"Two layers, {form}: the error of heads of half rank grows with the number of points",
            "Amsel et al., Conjecture 8 (error against rank for several N)",
            f"N 4: {published[4, 32]:.3g}, N 256: {published[256, 32]:.3g} (d 64)",
            f"N {shortest}: {mean[shortest, low]:.3g}, N {longest}: {mean[longest, low]:.3g}",
            no=steps,
        )
        yield judge_separation(form, errors[longest, low], errors[longest, full], SEPARATION).claim(
            f"Two layers, {form}: at the largest N, full rank is at least {SEPARATION:g} times better than half rank",
            "Amsel et al., context length",
            f"{published[256, 32]:.3g} / {published[256, 64]:.3g} = {published[256, 32] / published[256, 64]:.0f}",
            f"{mean[longest, low]:.3g} / {mean[longest, full]:.3g} = {mean[longest, low] / mean[longest, full]:.1f}",
            no=steps,
        )
