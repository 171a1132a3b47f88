"""Accuracy and map rank against the query-key width after training: do both stop growing at the same width?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, every, judge, not_testable
from ..sweep.tolerances import ACCURACY_RISES, SAME_WIDTH


NAME = "head-dim-learning"
SHOWS = (
    "accuracy and map rank against qk_rank after training, on token retrieval and on images, with and without QK-norm"
)
REVISION = 1
OPTIONS = ("dataset",)
SOURCE = "A Rank Perspective"

RETRIEVAL = {
    "task": "token_retrieval",
    "num_values": 8,
    "layers": 1,
    "heads": 1,
    "learning_rate": 3e-3,
    "held_out": 256,
}
IMAGES = {"task": "images", "layers": 2, "heads": 2, "learning_rate": 3e-3}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "ranks": [1, 8], "seeds": 1,
        "retrieval": {"n": [16], "hidden": 32, "steps": 12, "batch_size": 16, "measured": 2},
        "digits": {"patch": 2, "size": 8, "train_rows": 500, "hidden": 32, "steps": 8, "batch_size": 16, "measured": 2},
        "images": {"patch": 4, "size": 16, "train_rows": 500, "hidden": 32, "steps": 8, "batch_size": 16, "measured": 2},
    },
    "laptop": {
        "ranks": [1, 2, 4, 8, 16], "seeds": 3,
        "retrieval": {"n": [16, 32, 64], "hidden": 64, "steps": 400, "batch_size": 64},
        "digits": {"patch": 2, "size": 8, "train_rows": 1500, "hidden": 64, "steps": 600, "batch_size": 32},
        "images": {"patch": 4, "size": 32, "train_rows": 5000, "hidden": 64, "steps": 1000, "batch_size": 64},
    },
    "paper": {
        "ranks": [1, 2, 4, 8, 16, 32, 64, 128, 192], "seeds": 5,
        "retrieval": {"n": [16, 32, 64, 128, 256], "hidden": 256, "steps": 8000, "batch_size": 128},
        "digits": {"patch": 1, "size": 8, "train_rows": 1500, "hidden": 64, "steps": 4000, "batch_size": 64},
        "images": {"patch": 2, "size": 32, "train_rows": 50_000, "hidden": 256, "steps": 20_000, "batch_size": 128},
    },
}  # fmt: skip
NEAR = 0.9  # of its largest value: from there on, a curve counts as saturated


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    from ._images import DIGITS, choose_images

    setting = SETTINGS[scale]
    axes = {"qk_rank": setting["ranks"], "qk_norm": [False, True], "seed": list(range(seeds or setting["seeds"]))}
    found = list(grid(**RETRIEVAL, **setting["retrieval"], **axes))
    images = choose_images(options.get("dataset"))
    found += grid(**IMAGES, images=images, **setting["digits" if images == DIGITS else "images"], **axes)
    return [Cell(parameters, cost=training_cost(parameters)) for parameters in found]


def training_cost(parameters: Mapping[str, Any]) -> float:
    n = parameters["n"] if "n" in parameters else (parameters["size"] // parameters["patch"]) ** 2
    return parameters["steps"] * parameters["batch_size"] * n * (n + parameters["hidden"])


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    from ..rank_collapse._classifying import train_classifier

    return train_classifier(parameters, work)


def complete(table):
    """What a figure calls the data, and which form of heads it is."""
    from ._images import DIGITS

    def data(row):
        if row["task"] == "token_retrieval":
            return f"token retrieval, n = {int(row['tokens'])}"
        name = "digits" if row["images"] == DIGITS else Path(row["images"]).name
        return f"{name}, {int(row['tokens'])} patches"

    form = table["qk_norm"].map({False: "original", True: "qk_norm"})
    return table.assign(data=table.apply(data, axis=1), form=form)


def figures(table, scale: str):
    from ._figures_training import learning_figure, trace_figure

    return {"head-dim-learning": learning_figure(table), "rank-in-training": trace_figure(table)}


def saturated(curve) -> float:
    """The width at which a curve over widths comes near its largest value, from where it starts at its smallest width."""
    from .saturation import crossing

    values = curve.to_numpy()
    width = crossing([int(width) for width in curve.index], values.tolist(), NEAR * float(values.max()))
    return float("nan") if width is None else width


def claims(table, scale: str) -> Sequence[Claim]:
    ends = table[table.what == "end"]
    found = []
    for (data, form), rows in ends.groupby(["data", "form"], sort=False):
        curves = rows.groupby("qk_rank")[["accuracy", "argmax_coverage", "effective_rank", "tokens"]].mean()
        at = {name: saturated(curves[name]) for name in ("accuracy", "argmax_coverage", "effective_rank")}
        first, last = curves.accuracy.iloc[0], curves.accuracy.iloc[-1]
        rises = curves.accuracy.max() > first + ACCURACY_RISES
        how = f"accuracy {first:.2f} at width {curves.index[0]}, {last:.2f} at {curves.index[-1]}; "
        judgement = not_testable("Accuracy hardly depends on the width here, so there is nothing to saturate.")
        if rises:
            ratios = [
                saturated(own.effective_rank) / saturated(own.accuracy)
                for _, own in rows.sort_values("qk_rank").set_index("qk_rank").groupby("seed")
            ]
            judgement = judge("width of rank over that of accuracy", ratios, 1 / SAME_WIDTH, SAME_WIDTH, ratio=True)
        found.append(
            judgement.claim(
                f"{data}, {FORMS[form]}: accuracy after training stops growing at about the width where map rank does",
                f"{SOURCE}, accuracy saturates with rank",
                "at about the same head dimension",
                how
                + f"90 % of the best from width {at['accuracy']:.1f} (accuracy), {at['argmax_coverage']:.1f} (argmax "
                f"coverage), {at['effective_rank']:.1f} (effective rank)",
                no="Rank and accuracy stop growing at different widths.",
            )
        )
    return [*found, *random_claims(ends), *norm_claims(ends), *training_claims(table)]


FORMS = {"original": "original form", "qk_norm": "qk_norm"}


def random_claims(ends) -> Sequence[Claim]:
    """The width at which random heads have most of their rank, against the width at which trained ones have learnt."""
    from ...theory import saturation_width

    rows = ends[(ends.task == "token_retrieval") & (ends.form == "original")]
    by_seed = rows.groupby(["tokens", "seed"]).apply(
        lambda own: saturated(own.groupby("qk_rank").accuracy.mean()), include_groups=False
    )
    trained = by_seed.groupby("tokens").mean()
    trained.index = trained.index.map(int)
    random = {n: saturation_width(n, NEAR) for n in trained.index}
    return [
        every(
            judge(
                f"width of trained over that of random heads (n {n})",
                by_seed[n] / random[n],
                1 / SAME_WIDTH,
                SAME_WIDTH,
                ratio=True,
            )
            for n in trained.index
        ).claim(
            "The width at which the rank of random maps saturates is the width that training needs",
            f"{SOURCE}, model reduction (drawn from random weights)",
            "",
            "; ".join(f"n {n}: trained {trained[n]:.1f}, random hard maps {random[n]:.0f}" for n in trained.index),
            "Width for 90 % of the best accuracy on token retrieval, original form, against 90 % of the ceiling of random "
            "Gaussian heads.",
            no="Training chooses its keys, random heads do not.",
        )
    ]


def norm_claims(ends) -> Sequence[Claim]:
    """What the laws of random maps would have us expect of trained ones: QK-norm needs less width."""
    retrieval = ends[ends.task == "token_retrieval"]
    curves = retrieval.groupby(["form", "qk_rank"]).accuracy.mean()
    narrow = [rank for rank in sorted(retrieval.qk_rank.unique()) if rank <= 4]
    text = ", ".join(f"width {r}: {curves['qk_norm', r]:.2f} against {curves['original', r]:.2f}" for r in narrow)
    by_seed = retrieval.groupby(["seed", "form", "qk_rank"]).accuracy.mean().unstack(["form", "qk_rank"])
    return [
        every(
            judge(
                f"accuracy with the norm minus that without (width {r})",
                by_seed["qk_norm", r] - by_seed["original", r],
                0,
            )
            for r in narrow
        ).claim(
            "With QK-norm, trained heads make do with less width (as the maps of random ones do)",
            "ours, a prediction from random maps",
            "",
            f"{text} (token retrieval, mean over n)",
            no="Unit keys have one dimension less, and training gives other keys the lengths it needs; whether that is the "
            "reason was not tested.",
        )
    ]


def training_claims(table) -> Sequence[Claim]:
    found = []
    for data, rows in table[(table.what == "trace") & (table.form == "original")].groupby("data", sort=False):
        widest = rows[rows.qk_rank == rows.qk_rank.max()]
        first, last = (
            widest[widest.step == step][["effective_rank", "stable_rank", "argmax_coverage", "tokens"]].mean()
            for step in (0, widest.step.max())
        )
        ranks = widest.pivot(index="seed", columns="step", values="effective_rank")
        found.append(
            judge("effective rank after training minus before", ranks[ranks.columns.max()] - ranks[0], least=0).claim(
                f"{data}: training raises the rank of attention maps above that of a fresh model (width {int(rows.qk_rank.max())})",
                "ours; the paper measured fresh and trained maps apart",
                "",
                f"effective rank {first.effective_rank:.1f} to {last.effective_rank:.1f}, stable rank {first.stable_rank:.2f} to "
                f"{last.stable_rank:.2f}, argmax coverage {first.argmax_coverage:.1f} to {last.argmax_coverage:.1f} of "
                f"{int(last.tokens)}",
                no=f"Trained rows agree on few tokens: their largest weights are in {last.argmax_coverage:.1f} columns, those of the "
                f"fresh model in {first.argmax_coverage:.1f}.",
            )
        )
    return found
