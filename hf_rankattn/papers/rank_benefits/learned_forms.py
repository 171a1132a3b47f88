"""What full-rank heads learn: the bilinear form of each is close to minus a large multiple of the identity."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...report.plots import STYLES, new_figure, published_table
from ...tasks import task_builder
from ..drawing import plural
from ..sweep.grid import Cell
from ..sweep.judging import Claim, every, judge
from ..sweep.tolerances import ANGLE, CLOSE, VISIBLE_CHANGE
from ._curves import FORM_TITLES, setting_of
from ._points import FORMS, TRAINING, estimator_by, training_cells, training_of
from ._training import PointTraining, train_points


SHOWS = "angle of each learned W_Q^T W_K to the identity, and its scale, for full-rank heads"
OPTIONS = ("as_published",)

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"heads": [1, 2], "forms": ["original"], "seeds": 1},
    "laptop": {"heads": [1, 4, 16], "forms": FORMS, "seeds": 3},
    "paper": {"heads": [1, 8, 64], "forms": FORMS, "seeds": 5},
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, training = SETTINGS[scale], TRAINING[scale]
    fields = training | {"layers": 1, "rank": training["dim"]}
    axes = {"heads": setting["heads"], "form": setting["forms"]}
    return training_cells(lambda axis: fields, seeds or setting["seeds"], options, **axes)


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    training = training_of(parameters)
    model, row = train_points(training, work)
    if row["status"] != "finished":
        return [row | {"head": 0}]
    return [
        row | {"head": head} | form | {"error_of_minus_beta_identity": ideal_error(training, form["beta"])}
        for head, form in enumerate(learned_forms(model))
    ]


def learned_forms(model: Any) -> list[dict[str, float]]:
    """Angle and scale of the bilinear form of each head of the first layer.

    The published figure uses W_q W_k^T instead of the form W_q^T W_k. The traces are equal and the norms are not, so the
    table holds angles and scales of both. `beta` is the factor of the form in the logits.
    """
    attention = model.encoder.layers[0].attention
    rank, found = attention.qk_rank, []
    query, key = (part.weight.detach().double().unflatten(0, (-1, rank)) for part in (attention.query, attention.key))
    for head, (q, k) in enumerate(zip(query, key, strict=True)):
        row = dict(zip(("angle", "scale"), angle_and_scale(q.T @ k), strict=True))
        row |= zip(("published_angle", "published_scale"), angle_and_scale(q @ k.T), strict=True)
        strength = row["scale"] if attention.log_temperature is None else attention.log_temperature[head].exp().item()
        found.append(row | {"beta": strength * attention.scaling})
    return found


def angle_and_scale(form: torch.Tensor) -> tuple[float, float]:
    """Angle of a square matrix to the identity in degrees, and its norm over the norm of the identity."""
    width, norm = len(form), form.norm().item()
    cosine = form.trace().item() / (norm * math.sqrt(width))
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine)))), norm / math.sqrt(width)


def ideal_error(training: PointTraining, beta: float) -> float:
    """The error of softmax(-beta x_i.x_j), the form that the heads tend to, on rows of the task."""
    builder = task_builder(training.task, dim=training.dim, num_points=training.num_points, seed=training.data_seed)
    rows = {name: array.astype(np.float64) for name, array in builder.sample("test", 512).items()}
    logits = -beta * rows["points"] @ rows["points"].swapaxes(1, 2)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return float(np.square(weights @ rows["points"] - rows["labels"]).sum(-1).mean())


complete = estimator_by("heads", "form", "as_published")


def figures(table, scale: str):
    """Angle and scale of the bilinear forms by number of heads; a mark for each head."""
    figure, axes = new_figure(1, 2, 10.0, 4.4)
    finished = table[table.status == "finished"]
    forms, counts = list(dict.fromkeys(finished.form)), sorted(finished.heads.unique())
    left, right = axes[0]
    for i, (form, (marker, _, colour)) in enumerate(zip(forms, STYLES, strict=False)):
        rows = finished[finished.form == form]
        place = np.array([counts.index(count) for count in rows.heads]) + (i - (len(forms) - 1) / 2) * 0.25
        place = place + np.random.default_rng(0).uniform(-0.06, 0.06, len(rows))
        for axis, column in ((left, "angle"), (right, "beta")):
            axis.plot(place, rows[column], marker, color=colour, alpha=0.6, markersize=4, label=FORM_TITLES[form])
    for i, row in enumerate(published_table("learned_forms")[: len(counts)].itertuples()):
        quartiles = (left, row.angle_median, row.angle_low, row.angle_high)
        scales = (right, row.scale_median / 8, row.scale_low / 8, row.scale_high / 8)
        for axis, median, low, high in (quartiles, scales):
            axis.plot([i + 0.4], [median], "k_", markersize=14)
            axis.vlines(i + 0.4, low, high, color="k")
    left.plot([], [], "k_", markersize=14, label="published for 1, 8 and 64 heads (d 64): median, quartiles")
    left.set_ylabel("angle of W_Q^T W_K to the identity (degrees)")
    right.set(ylabel="beta: factor of -x.y in the logits", yscale="log")
    for axis in axes[0]:
        axis.set_xticks(range(len(counts)), [plural(count, "head") for count in counts])
    left.legend(loc="lower left")
    figure.suptitle(f"What full-rank heads learn\n({setting_of(table)})")
    return {"learned-forms": figure}


def claims(table, scale: str) -> Iterator[Claim]:
    published = published_table("learned_forms")
    angles = ", ".join(f"{int(row.heads)}: {row.angle_median}" for row in published.itertuples())
    for form, rows in table[table.status == "finished"].groupby("form", sort=False):
        medians = rows.groupby("heads").angle.median()
        by_seed = rows.groupby(["heads", "seed"]).angle.median()
        yield every(
            judge(f"median angle ({heads} heads)", by_seed[heads], least=ANGLE) for heads in medians.index
        ).claim(
            f"{form}: full-rank heads learn minus the identity: median angle to it by number of heads",
            "Amsel et al., learned forms",
            f"{angles} degrees (d 64)",
            ", ".join(f"{heads}: {angle:.1f}" for heads, angle in medians.items()) + " degrees",
            no="Fewer steps than published leave more of the random start.",
        )
        most = rows[rows.heads == rows.heads.max()]
        change = (most.published_scale / most.scale - 1).abs()
        yield judge(
            "largest change of a head's scale", change.groupby(most.seed).max(), least=VISIBLE_CHANGE
        ).unpublished(
            f"{form}: fault: the published figure takes W_q W_k^T for the form W_q^T W_k, which shows in its numbers "
            f"({int(most.heads.iloc[0])} heads)",
            "Amsel et al., code",
            f"median angle {most.published_angle.median():.2f} and scale {most.published_scale.median():.3g} with it, "
            f"{most.angle.median():.2f} and {most.scale.median():.3g} without; scales of a head differ by at most "
            f"{change.max():.1%}",
            "Traces are equal, norms are not in general.",
            no="Of forms this close to a multiple of the identity norms are equal, too.",
        )
        one = rows[rows.heads == 1].set_index("seed")
        if len(one):
            ratio = one.held_out_error / one.error_of_minus_beta_identity
            yield judge("trained error over that of softmax(-beta G)", ratio, 1 / CLOSE, CLOSE, ratio=True).claim(
                f"{form}: the error of one trained head is that of softmax(-beta G) at its own scale",
                "Amsel et al., learned forms; the comparison is ours",
                "scale 2400 = beta 300, where softmax(-beta G) gives 0.0178 and training 0.0153",
                f"beta {one.beta.median():.0f}: {one.error_of_minus_beta_identity.median():.4f}, trained "
                f"{one.held_out_error.median():.4f}",
                no="Softmax(-beta G) is exact but for its temperature; a trained layer has errors of its other weights, too, "
                "which show where that temperature is low.",
            )
