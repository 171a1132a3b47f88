"""Error against rank at equal budgets: one full-rank head against many of low rank, on farthest neighbour."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...report.plots import published_table
from ..drawing import plural
from ..sweep.grid import Cell
from ..sweep.judging import Claim, judge, not_testable
from ..sweep.tolerances import NO_BETTER, SEPARATION
from ._curves import rank_figure
from ._points import FORMS, TRAINING, errors_by_seed, estimator_by, judge_separation, run_training, training_cells


SHOWS = "error against rank for several depths and parameter budgets, in the original form and with qk_norm"
OPTIONS = ("as_published",)

# In so few steps three layers do not survive the published learning rate: they end at predicting zero.
LAPTOP_PANELS: list[dict[str, Any]] = [
    {"layers": 1, "budgets": ["d^2", "d^2.5"]},
    {"layers": 3, "budgets": ["d^2"], "ranks": [16, 8, 1], "learning_rate": 0.003},
]
PAPER_PANELS = [{"layers": layers, "budgets": ["d^2", "d^2.5", "d^3"]} for layers in (1, 3, 5)]
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"panels": [{"layers": 1, "budgets": ["d^2"]}], "ranks": [8, 4], "seeds": 1},
    "laptop": {"panels": LAPTOP_PANELS, "ranks": [16, 8, 4, 1], "seeds": 3},
    "paper": {"panels": PAPER_PANELS, "ranks": [64, 32, 16, 8, 4, 2, 1], "seeds": 5},
}
# budgets as powers of d above d^2, the parameters of one projection of an ordinary layer
BUDGETS = {"d^2": 0.0, "d^2.5": 0.5, "d^3": 1.0}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, found = SETTINGS[scale], []
    for panel in setting["panels"]:
        training = TRAINING[scale] | {name: panel[name] for name in ("layers", "learning_rate") if name in panel}
        d = training["dim"]
        found += training_cells(
            lambda axis, training=training, d=d: {**training, "heads": heads_of(d, axis["budget"], axis["rank"])},
            seeds or setting["seeds"],
            options,
            budget=panel["budgets"],
            form=FORMS,
            rank=panel.get("ranks", setting["ranks"]),
        )
    return found


def heads_of(d: int, budget: str, rank: int) -> int:
    return d * round(d ** BUDGETS[budget]) // rank


run = run_training
complete = estimator_by("layers", "budget", "form", "rank", "as_published")


def figures(table, scale: str):
    """A row of panels for each form, a panel for each depth, a line for each budget."""
    title = f"Farthest of {int(table.num_points.iloc[0])} points, heads of several ranks at one budget"
    published, label = published_table("rank_separation"), "{} parameters a projection"
    return {"rank-separation": rank_figure(table, published, "budget", label, title)}


def claims(table, scale: str) -> Iterator[Claim]:
    values = published_table("rank_separation").set_index(["layers", "budget", "rank"]).value
    full = int(table["dim"].iloc[0])
    for (layers, budget, form), rows in table.groupby(["layers", "budget", "form"], sort=False):
        errors = errors_by_seed(rows, ["rank"])
        if not {full, full // 2} <= set(errors):
            continue
        mean, name = errors.mean(), {"original": "original form"}.get(form, form)
        published = ""
        if form == "original":
            high, low = values[layers, budget, 64], values[layers, budget, 32]
            published = f"{low:.3g} / {high:.3g} = {low / high:.0f} (d 64, N 16)"
        yield judge_separation(name, errors[full // 2], errors[full], SEPARATION).claim(
            f"{plural(layers, 'layer')}, {budget} parameters, {name}: heads of half rank "
            f"err at least {SEPARATION:g} times as much as those of full rank",
            "Amsel et al., error against rank",
            published,
            f"{mean[full // 2]:.3f} / {mean[full]:.4f} = {mean[full // 2] / mean[full]:.1f}",
            no=f"These runs have {int(rows.steps.iloc[0])} steps, the published ones 1e5.",
        )
    yield headline(table, values)


def headline(table, values) -> Claim:
    """The paper's conclusion from its own panel, judged where all of it was run."""
    ours = errors_by_seed(table[table.form == "original"], ["layers", "budget", "rank"])
    low, full = (5, "d^3", 32), (1, "d^2", 64)
    times = f"5 layers x 64 = {5 * 64} times the attention parameters, as the code counts"
    judgement, measured = not_testable("The errors need --scale paper."), times
    if {low, full} <= set(ours):
        judgement = judge("error over that of full rank", ours[low] / ours[full], least=NO_BETTER, ratio=True)
        measured = f"{ours[low].mean():.4f} against {ours[full].mean():.4f}; {times}"
    return judgement.claim(
        "The best low-rank model (5 layers, d^3, rank 32) is no better than the worst full-rank one that converged (1 layer, d^2), "
        "with 80 times its attention parameters",
        "Amsel et al., error against rank",
        f"{values[low]:.4f} against {values[full]:.4f}; 80 times",
        measured,
        "Where the 80 comes from is not known.",
        no="The low-rank model is better.",
    )
