"""A layer that is fed its own output: two points on a circle that stay apart, or fall together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .grid import Cell, grid
from .runner import Claim


NAME = "circle"
SHOWS = "trajectories of two points under a recurrent attention layer, without skip, with skip, with MLP, over widths"
REVISION = 1
OPTIONS = ("as_published",)

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"hidden": [8], "epochs": 2, "seeds": 1},
    "laptop": {"hidden": [32, 64, 128], "epochs": 70, "seeds": 2},
    "paper": {"hidden": [32, 64, 128], "epochs": 70, "seeds": 5},
}
# variant -> fields of the layer; the published code has the skip inside of the layer in all of them
VARIANTS: dict[str, dict[str, bool]] = {
    "attention alone": {"use_skip": False, "use_mlp": False},
    "attention + MLP": {"use_skip": False, "use_mlp": True},
    "attention + skip": {"use_skip": True, "use_mlp": False},
}
STEPS, BATCH = 300, 30
# The published distance, not half a turn: of exactly opposite points and fresh biases of zero the mean is zero, so the two
# share nothing that they could collapse to.
SEPARATION = 499


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    return [
        Cell(axis, cost=float(axis["hidden"]) + 200)
        for axis in grid(
            hidden=setting["hidden"],
            variant=list(VARIANTS),
            seed=list(range(seeds or setting["seeds"])),
            epochs=setting["epochs"],
            learning_rate=1e-5,
            as_published=bool(options.get("as_published")),
        )
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    import torch

    from ..tasks.loading import task_builder
    from .row_training import RowTraining, train_rows

    as_published, variant = parameters["as_published"], parameters["variant"]
    builder = task_builder("circle", separation=SEPARATION, num_examples=SEPARATION)
    rows = builder.split_sizes()["train"]
    columns = {name: torch.from_numpy(array) for name, array in builder.sample("train", rows).items()}
    start = columns["points"][:1].clone()
    accumulated = as_published and variant == "attention + skip"
    if (
        accumulated
    ):  # the published skip: each row gets the row at the same place of the batch before, the first batch none
        shifted = torch.cat([torch.zeros_like(columns["points"][:BATCH]), columns["points"][:-BATCH]])
        columns["points"] = columns["points"] + shifted
    model = circle_model(parameters["hidden"], parameters["seed"], **layer_of(variant, as_published))
    training = RowTraining(parameters["epochs"], parameters["learning_rate"], parameters["seed"], BATCH, shuffle=False)
    trained = train_rows(model, columns, training, work)
    return [{**row, **trained} for row in trajectory(model, start, accumulated)]


def layer_of(variant: str, as_published: bool) -> dict[str, bool]:
    return {**VARIANTS[variant], "use_skip": True} if as_published else VARIANTS[variant]


def circle_model(hidden: int, seed: int, **layer: Any):
    import torch

    from ..models import RankEncoderConfig, RankEncoderForPointRegression

    torch.manual_seed(seed)
    config = RankEncoderConfig(
        input_dim=2, hidden_size=hidden, num_attention_heads=2, input_map="linear", input_norm=True, norm="layer",
        intermediate_size=hidden, hidden_act="gelu", norm_eps=1e-12, **layer,
    )  # fmt: skip
    model = RankEncoderForPointRegression(config)
    published_weights(model)
    return model


def published_weights(model) -> None:
    """Start from where the published runs do: at this learning rate a run ends not far from there."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            if name.endswith(("attention.value", "attention.output")):
                nn.init.kaiming_uniform_(module.weight, a=5**0.5)
            else:
                nn.init.normal_(module.weight, std=0.02)


def trajectory(model, points, accumulated: bool) -> list[dict[str, Any]]:
    """Where the two points are at each step when outputs are fed back; as published, the sum of all outputs is."""
    import torch

    rows, state = [], points
    for step in range(STEPS + 1):
        (x0, y0), (x1, y1) = points[0].tolist()
        gap = torch.linalg.vector_norm(points[0, 0] - points[0, 1]).item()
        rows.append({"step": step, "x0": x0, "y0": y0, "x1": x1, "y1": y1, "gap": gap})
        with torch.no_grad():
            points = model(points=state).logits
        state = state + points if accumulated else points
    return rows


def figures(table, scale: str):
    from ..report.collapse import circle_figure, circle_gap_figure

    return {"circle": circle_figure(table), "circle-gaps": circle_gap_figure(table)}


# as published or not -> variant -> what the reader needs to know besides
WHY = {
    False: {
        "attention alone": "",
        "attention + MLP": "In the published code the skip inside of the layer stays, and it is that which keeps them apart.",
        "attention + skip": "After 5 steps it does in all runs; whether it does for good depends on seed and width.",
    },
    True: {
        "attention alone": "The published code leaves the skip inside of the layer: whether it collapses depends on seed and width.",
        "attention + MLP": "The skip inside of the layer is there, too.",
        "attention + skip": "The published skip adds the batch before in training, and sums all outputs when it is run.",
    },
}


def claims(table, scale: str) -> Sequence[Claim]:
    found = []
    as_published = bool(table.as_published.any())
    at = {step: table[table.step == step] for step in (0, 5, 20, STEPS)}
    said = {
        "attention alone": "Without a skip the two points fall together",
        "attention + MLP": "An MLP keeps the two points apart",
        "attention + skip": "A skip keeps the two points apart",
    }
    for variant, claim in said.items():
        five, twenty, last = (at[step][at[step].variant == variant].gap for step in (5, 20, STEPS))
        together, apart = int((twenty < 1e-6).sum()), int((last > 0.1).sum())
        collapses = variant == "attention alone"
        found.append(
            Claim(
                claim,
                "Dong et al., recurrent circle",
                "collapses" if collapses else "does not collapse",
                f"distance (at first {at[0].gap.iloc[0]:.2f}): {five.min():.2g} to {five.max():.2g} after 5 steps, "
                f"{twenty.min():.2g} to {twenty.max():.2g} after 20; of {len(last)} runs {together} together after 20, "
                f"{apart} apart after {STEPS}",
                together == len(twenty) if collapses else apart == len(last),
                WHY[as_published][variant],
            )
        )
    if not as_published:
        alone = table[(table.variant == "attention alone") & (table.gap > 1e-6)]
        steps = alone.groupby(["hidden", "seed"]).step.max().groupby("hidden").mean() + 1
        found.append(
            Claim(
                "Wider layers without a skip collapse more slowly",
                "Dong et al., recurrent circle",
                "slower with width",
                "steps until both points are one: " + ", ".join(f"d {d}: {count:.1f}" for d, count in steps.items()),
                bool(steps.is_monotonic_increasing and steps.iloc[-1] > steps.iloc[0]) if len(steps) > 1 else None,
                "All widths are there after a few steps.",
            )
        )
    return found
