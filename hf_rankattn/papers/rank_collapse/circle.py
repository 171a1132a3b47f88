"""A layer whose output is its next input: two points on a circle stay apart or collapse to one."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

from ...models import RankEncoderConfig, RankEncoderForPointRegression
from ...report.plots import STYLES, new_figure
from ...tasks import task_builder
from ..drawing import BLUE
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, judge
from ..sweep.tolerances import CIRCLE_STEPS
from ..training import RowTraining, tensors_of, train_rows
from ._subjects import titled


SHOWS = "trajectories of two points under a recurrent attention layer, without skip, with skip, with MLP, over widths"
OPTIONS = ("as_published",)

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"hidden": [8], "epochs": 2, "seeds": 1},
    "laptop": {"hidden": [32, 64, 128], "epochs": 70, "seeds": 8},
    "paper": {"hidden": [32, 64, 128], "epochs": 70, "seeds": 8},
}
# variant -> fields of the layer; the published code has the skip inside the layer in all of them
VARIANTS: dict[str, dict[str, bool]] = {
    "attention alone": {"use_skip": False, "use_mlp": False},
    "attention + MLP": {"use_skip": False, "use_mlp": True},
    "attention + skip": {"use_skip": True, "use_mlp": False},
}
STEPS, BATCH = 300, 30
# The published distance, not half a turn: with fresh biases of zero, exactly opposite points have a mean of zero and
# share nothing to collapse to.
SEPARATION = 499


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    seed = list(range(seeds or setting["seeds"]))
    common = {"epochs": setting["epochs"], "learning_rate": 1e-5, "as_published": bool(options.get("as_published"))}
    axes = grid(hidden=setting["hidden"], variant=list(VARIANTS), seed=seed, **common)
    return [Cell(axis, cost=float(axis["hidden"]) + 200) for axis in axes]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    as_published, variant = parameters["as_published"], parameters["variant"]
    builder = task_builder("circle", separation=SEPARATION, num_examples=SEPARATION)
    rows = builder.split_sizes()["train"]
    columns = tensors_of(builder.sample("train", rows))
    points = columns["points"]
    start = points[:1].clone()
    accumulated = as_published and variant == "attention + skip"
    if accumulated:
        # the published skip adds the row at the same place of the previous batch, and nothing in the first batch
        columns["points"] = points + torch.cat([torch.zeros_like(points[:BATCH]), points[:-BATCH]])
    model = circle_model(parameters["hidden"], parameters["seed"], **layer_of(variant, as_published))
    training = RowTraining(parameters["epochs"], parameters["learning_rate"], parameters["seed"], BATCH, shuffle=False)
    trained = train_rows(model, columns, training, work)
    return [{**row, **trained} for row in trajectory(model, start, accumulated)]


def layer_of(variant: str, as_published: bool) -> dict[str, bool]:
    return {**VARIANTS[variant], "use_skip": True} if as_published else VARIANTS[variant]


def circle_model(hidden: int, seed: int, **layer: Any) -> RankEncoderForPointRegression:
    """A model with the published initial weights, which matter because the learning rate is small."""
    torch.manual_seed(seed)
    layer |= {"hidden_size": hidden, "num_attention_heads": 2, "intermediate_size": hidden, "hidden_act": "gelu"}
    norms: dict[str, Any] = {"input_norm": True, "norm": "layer", "norm_eps": 1e-12}
    model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=2, input_map="linear", **norms, **layer))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            if name.endswith(("attention.value", "attention.output")):
                nn.init.kaiming_uniform_(module.weight, a=5**0.5)
            else:
                nn.init.normal_(module.weight, std=0.02)
    return model


def trajectory(model: nn.Module, points: torch.Tensor, accumulated: bool) -> list[dict[str, Any]]:
    """The two points at each step. The next input is the output or, if `accumulated` (as published), the sum of all."""
    rows, state = [], points
    for step in range(STEPS + 1):
        (x0, y0), (x1, y1) = points[0].tolist()
        gap = torch.linalg.vector_norm(points[0, 0] - points[0, 1]).item()
        rows.append({"step": step, "x0": x0, "y0": y0, "x1": x1, "y1": y1, "gap": gap})
        with torch.no_grad():
            points = model(points=state).logits
        state = state + points if accumulated else points
    return rows


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    return {"circle": trajectory_figure(table), "circle-gaps": gap_figure(table)}


def trajectory_figure(table: pd.DataFrame) -> Figure:
    """Trajectories of both points for the first seed: a row of panels per variant, a panel per width."""
    variants, widths = list(dict.fromkeys(table.variant)), sorted(table.hidden.unique())
    size = max(8.0, 3.1 * len(widths) + 1), 3.0 * len(variants) + 1
    figure, axes = new_figure(len(variants), len(widths), *size, sharex=True, sharey=True)
    rows = table[table.seed == table.seed.min()]
    turn = np.linspace(0, 2 * np.pi, 200)
    panels = [(variant, width) for variant in variants for width in widths]
    for axis, (variant, width) in zip(axes.flat, panels, strict=True):
        part = rows[(rows.variant == variant) & (rows.hidden == width)].sort_values("step")
        axis.plot(0.3 * np.cos(turn), 0.3 * np.sin(turn), color="0.75", linewidth=0.8)
        for name, marker, colour in (("0", "o", BLUE), ("1", "^", "#b9770e")):
            x, y = part[f"x{name}"], part[f"y{name}"]
            axis.plot(x, y, marker + "-", color=colour, linewidth=0.7, markersize=3, alpha=0.6)
            axis.plot(x.iloc[:1], y.iloc[:1], marker, color=colour, markersize=8, mfc="none")
            axis.plot(x.iloc[-1:], y.iloc[-1:], "kx", markersize=8, zorder=5)
        axis.set(xlim=(-0.56, 0.56), ylim=(-0.56, 0.56), aspect="equal", xlabel="x", ylabel="y")
        axis.set_title(f"{variant}, d {int(width)}")
        axis.label_outer()
    how = " (as published: the skip inside of the layer is in all)" if table.as_published.any() else ""
    figure.suptitle(f"A recurrent layer on two points of a circle{how}")
    figure.supxlabel(
        "large hollow: start; cross: after 300 steps; circles, triangles: the two points; grey: the circle to follow"
    )
    return figure


def gap_figure(table: pd.DataFrame) -> Figure:
    widths, styles = sorted(table.hidden.unique()), dict(zip(VARIANTS, STYLES, strict=False))
    figure, axes = new_figure(1, len(widths), max(8.0, 3.9 * len(widths) + 1), 4.8, sharey=True)
    for axis, width in zip(axes[0], widths, strict=True):
        rows = table[table.hidden == width].sort_values("step")
        for (variant, seed), part in rows.groupby(["variant", "seed"], sort=False):
            _, line, colour = styles[variant]
            label = variant if seed == table.seed.min() else None
            axis.plot(part.step + 1, part.gap.clip(lower=1e-8), line, color=colour, linewidth=1.3, label=label)
        axis.set(xscale="log", yscale="log", xlabel="step + 1", ylim=(5e-9, max(2.0, 2 * float(table.gap.max()))))
        axis.axhspan(5e-9, 1e-7, color="0.93", zorder=0)
        axis.set_title(f"d {int(width)}")
    axes[0, 0].set_ylabel("distance of the two points (0 drawn as 1e-8)")
    title = "Do the two points stay apart? A line for each seed; grey: equal within precision"
    return titled(figure, title, [axes[0, 0]])


# variant -> the claim, why it holds or not here, and why in a run as published
CLAIMS = {
    "attention alone": (
        "Without a skip the two points fall together",
        "Required: every run together after 20 steps.",
        "The published code leaves the skip inside of the layer: whether it collapses depends on seed and width.",
    ),
    "attention + MLP": (
        "An MLP keeps the two points apart",
        "Required: every run apart at the end. In the published code the skip inside of the layer stays, and it keeps them apart.",
        "The skip inside of the layer is there, too.",
    ),
    "attention + skip": (
        "A skip keeps the two points apart",
        "Required: every run apart at the end. Whether a run stays apart depends on its seed and width.",
        "The published skip adds the batch before in training, and sums all outputs when it is run.",
    ),
}


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    as_published, source = bool(table.as_published.any()), "Dong et al., recurrent circle"
    start = table[table.step == 0].gap.iloc[0]
    for variant, (claim, why, why_published) in CLAIMS.items():
        rows = table[table.variant == variant]
        five, twenty, last = (rows[rows.step == step].gap for step in (5, 20, STEPS))
        together, apart = int((twenty < 1e-6).sum()), int((last > 0.1).sum())
        collapses = variant == "attention alone"
        yield Claim(
            claim,
            source,
            "collapses" if collapses else "does not collapse",
            f"distance (at first {start:.2f}): {five.min():.2g} to {five.max():.2g} after 5 steps, {twenty.min():.2g} to "
            f"{twenty.max():.2g} after 20; of {len(last)} runs {together} together after 20, {apart} apart after {STEPS}",
            together == len(twenty) if collapses else apart == len(last),
            why_published if as_published else why,
        )
    if not as_published:
        alone = table[(table.variant == "attention alone") & (table.gap > 1e-6)]
        steps = alone.groupby(["hidden", "seed"]).step.max().unstack("hidden") + 1
        narrow, wide = steps.columns.min(), steps.columns.max()
        more = judge(f"steps at d {wide} minus steps at d {narrow}", steps[wide] - steps[narrow], least=CIRCLE_STEPS)
        means = ", ".join(f"d {d}: {mean:.1f}" for d, mean in steps.mean().items())
        claim = "Wider layers without a skip collapse more slowly"
        no = "All widths are there after about as many steps; which is slower depends on the seed."
        measured = f"steps until both points are one: {means}"
        yield more.claim(claim, source, "slower with width", measured, no=no)
