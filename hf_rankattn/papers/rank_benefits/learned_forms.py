"""What full-rank heads learn: the bilinear form of each is close to minus a large multiple of the identity."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, every, judge
from ..sweep.tolerances import ANGLE, CLOSE, VISIBLE_CHANGE
from ._points import FORMS, seeds_of, training_cell, training_of, with_published_estimator
from ._training import PointTraining, train_points


if TYPE_CHECKING:
    import torch

NAME = "learned-forms"
SHOWS = "angle of each learned W_Q^T W_K to the identity, and its scale, for full-rank heads"
REVISION = 1
OPTIONS = ("as_published",)

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "heads": [1, 2], "forms": ["original"], "seeds": 1,
        "training": {"dim": 8, "num_points": 4, "intermediate": 32, "steps": 60, "batch_size": 32, "held_out_rows": 256},
    },
    "laptop": {
        "heads": [1, 4, 16], "forms": list(FORMS), "seeds": 3,
        "training": {"dim": 16, "num_points": 8, "intermediate": 128, "steps": 1500, "batch_size": 128},
    },
    "paper": {
        "heads": [1, 8, 64], "forms": list(FORMS), "seeds": 5,
        "training": {"dim": 64, "num_points": 16, "intermediate": 2048, "steps": 100_000, "batch_size": 256},
    },
}  # fmt: skip
GROUP = ["heads", "form", "as_published"]


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    as_published = bool(options.get("as_published"))
    found = []
    for axis in grid(
        heads=setting["heads"],
        form=["original"] if as_published else setting["forms"],
        seed=list(range(seeds or setting["seeds"])),
    ):
        labels = {"form": axis["form"], "seed": axis["seed"], "as_published": as_published}
        found.append(
            training_cell(
                labels,
                **setting["training"],
                layers=1,
                heads=axis["heads"],
                rank=setting["training"]["dim"],
                qk_norm=axis["form"] == "qk_norm",
                **seeds_of(axis["seed"], as_published),
            )  # fmt: skip
        )
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    training = training_of(parameters)
    model, row = train_points(training, work)
    forms = learned_forms(model) if row["status"] == "finished" else [{}]
    for form in forms:
        if form:
            form["error_of_minus_beta_identity"] = ideal_error(training, form["beta"])
    return [row | {"head": head} | form for head, form in enumerate(forms)]


def learned_forms(model: Any) -> list[dict[str, float]]:
    """Angle and scale of the bilinear form of each head of the first layer.

    The published figure takes W_q W_k^T in place of the form W_q^T W_k. Their traces are equal, their norms are not, so its
    angles and scales are given beside the right ones. `beta` is what the scale is worth in the logits.
    """
    attention = model.encoder.layers[0].attention
    rank, found = attention.qk_rank, []
    query, key = (part.weight.detach().double().unflatten(0, (-1, rank)) for part in (attention.query, attention.key))
    for head, (q, k) in enumerate(zip(query, key, strict=True)):
        angle, scale = angle_and_scale(q.T @ k)
        published_angle, published_scale = angle_and_scale(q @ k.T)
        strength = scale if attention.log_temperature is None else attention.log_temperature[head].exp().item()
        found.append(
            {
                "angle": angle,
                "scale": scale,
                "published_angle": published_angle,
                "published_scale": published_scale,
                "beta": strength * attention.scaling,
            }
        )
    return found


def angle_and_scale(form: "torch.Tensor") -> tuple[float, float]:
    """Angle of a square matrix to the identity in degrees, and its norm beside that of the identity."""
    width, norm = len(form), form.norm().item()
    cosine = form.trace().item() / (norm * math.sqrt(width))
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine)))), norm / math.sqrt(width)


def ideal_error(training: PointTraining, beta: float) -> float:
    """The error of softmax(-beta x_i.x_j) itself, the form that the heads tend to, on rows of the task."""
    from ...tasks import task_builder

    builder = task_builder(training.task, dim=training.dim, num_points=training.num_points, seed=training.data_seed)
    rows = {name: array.astype(np.float64) for name, array in builder.sample("test", 512).items()}
    logits = -beta * rows["points"] @ rows["points"].swapaxes(1, 2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return float(np.square(weights @ rows["points"] - rows["labels"]).sum(-1).mean())


def complete(table):
    return with_published_estimator(table, GROUP)


def figures(table, scale: str):
    from ._figures import learned_forms_figure

    return {"learned-forms": learned_forms_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    from ...report.plots import published_table

    published = published_table("learned_forms")
    found = []
    for form, rows in table[table.status == "finished"].groupby("form", sort=False):
        medians = rows.groupby("heads").angle.median()
        by_seed = rows.groupby(["heads", "seed"]).angle.median()
        found.append(
            every(
                judge(f"median angle ({heads} heads)", by_seed[heads], least=ANGLE) for heads in medians.index
            ).claim(
                f"{form}: full-rank heads learn minus the identity: median angle to it by number of heads",
                "Amsel et al., learned forms",
                ", ".join(f"{int(row.heads)}: {row.angle_median}" for row in published.itertuples())
                + " degrees (d 64)",
                ", ".join(f"{heads}: {angle:.1f}" for heads, angle in medians.items()) + " degrees",
                no="Fewer steps than published leave more of the random start.",
            )
        )
        most = rows[rows.heads == rows.heads.max()]
        change = (most.published_scale / most.scale - 1).abs()
        found.append(
            judge("largest change of a head's scale", change.groupby(most.seed).max(), least=VISIBLE_CHANGE).claim(
                f"{form}: fault: the published figure takes W_q W_k^T for the form W_q^T W_k, which shows in its numbers "
                f"({int(most.heads.iloc[0])} heads)",
                "Amsel et al., code",
                "",
                f"median angle {most.published_angle.median():.2f} and scale {most.published_scale.median():.3g} with it, "
                f"{most.angle.median():.2f} and {most.scale.median():.3g} without; scales of a head differ by at most "
                f"{change.max():.1%}",
                "Traces are equal, norms are not in general.",
                no="Of forms this close to a multiple of the identity norms are equal, too.",
            )
        )
        one = rows[rows.heads == 1].set_index("seed")
        if len(one):
            ratio = one.held_out_error / one.error_of_minus_beta_identity
            found.append(
                judge("trained error over that of softmax(-beta G)", ratio, 1 / CLOSE, CLOSE, ratio=True).claim(
                    f"{form}: the error of one trained head is that of softmax(-beta G) at its own scale",
                    "Amsel et al., learned forms; the comparison is ours",
                    "scale 2400 = beta 300, where softmax(-beta G) gives 0.0178 and training 0.0153",
                    f"beta {one.beta.median():.0f}: {one.error_of_minus_beta_identity.median():.4f}, trained "
                    f"{one.held_out_error.median():.4f}",
                    no="Softmax(-beta G) is exact but for its temperature; a trained layer has errors of its other weights, too, "
                    "which show where that temperature is low.",
                )
            )
    return found
