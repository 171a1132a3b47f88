"""Accuracy and map rank against the query-key width after training: do both stop growing at the same width?"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ...report.plots import new_figure
from ...theory import saturation_width
from ..drawing import band, level
from ..rank_collapse._classifying import train_classifier
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, every, judge, not_testable
from ..sweep.tolerances import ACCURACY_RISES, SAME_WIDTH
from . import SOURCE
from ._drawing import beside, finish, style
from ._images import DIGITS, choose_images
from .saturation import crossing


SHOWS = (
    "accuracy and map rank against qk_rank after training, on token retrieval and on images, with and without QK-norm"
)
OPTIONS = ("dataset",)

RETRIEVAL = {"task": "token_retrieval", "num_values": 8, "layers": 1, "heads": 1}
RETRIEVAL |= {"learning_rate": 3e-3, "held_out": 256}
IMAGES = {"task": "images", "layers": 2, "heads": 2, "learning_rate": 3e-3}
SMOKE = {"train_rows": 500, "hidden": 32, "steps": 8, "batch_size": 16, "measured": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "ranks": [1, 8],
        "seeds": 1,
        "retrieval": {"n": [16], "hidden": 32, "steps": 12, "batch_size": 16, "measured": 2},
        "digits": {"patch": 2, "size": 8, **SMOKE},
        "images": {"patch": 4, "size": 16, **SMOKE},
    },
    "laptop": {
        "ranks": [1, 2, 4, 8, 16],
        "seeds": 3,
        "retrieval": {"n": [16, 32, 64], "hidden": 64, "steps": 400, "batch_size": 64},
        "digits": {"patch": 2, "size": 8, "train_rows": 1500, "hidden": 64, "steps": 600, "batch_size": 32},
        "images": {"patch": 4, "size": 32, "train_rows": 5000, "hidden": 64, "steps": 1000, "batch_size": 64},
    },
    "paper": {
        "ranks": [1, 2, 4, 8, 16, 32, 64, 128, 192],
        "seeds": 5,
        "retrieval": {"n": [16, 32, 64, 128, 256], "hidden": 256, "steps": 8000, "batch_size": 128},
        "digits": {"patch": 1, "size": 8, "train_rows": 1500, "hidden": 64, "steps": 4000, "batch_size": 64},
        "images": {"patch": 2, "size": 32, "train_rows": 50_000, "hidden": 256, "steps": 20_000, "batch_size": 128},
    },
}
NEAR = 0.9  # a curve counts as saturated from this share of its largest value on
# name in claims, style and face of markers in figures
FORMS = {"original": ("original form", 0, None), "qk_norm": ("qk_norm", 6, "white")}
MEASURES = {
    "accuracy": "accuracy, held out",
    "argmax_coverage": "argmax coverage / n",
    "effective_rank": "effective rank / n",
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
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

    return train_classifier(parameters, work)


def complete(table: pd.DataFrame) -> pd.DataFrame:
    """The names of data and of the form of heads in figures."""

    def data(row):
        if row["task"] == "token_retrieval":
            return f"token retrieval, n = {int(row['tokens'])}"
        name = "digits" if row["images"] == DIGITS else Path(row["images"]).name
        return f"{name}, {int(row['tokens'])} patches"

    form = table["qk_norm"].map({False: "original", True: "qk_norm"})
    return table.assign(data=table.apply(data, axis=1), form=form)


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    return {"head-dim-learning": learning_figure(table), "rank-in-training": trace_figure(table)}


def learning_figure(table: pd.DataFrame) -> Figure:
    """A row of panels for each dataset: accuracy, and two measures of map rank, against width, trained and fresh."""
    datasets = list(dict.fromkeys(table.data))
    figure, axes = new_figure(len(datasets), 3, 14.0, 3.1 * len(datasets) + 1.0)
    for line, data in zip(axes, datasets, strict=True):
        rows = table[table.data == data]
        end, fresh = rows[rows.what == "end"], rows[(rows.what == "trace") & (rows.step == 0)]
        for axis, (measure, name) in zip(line, MEASURES.items(), strict=True):
            of_rank = measure != "accuracy"
            scale = int(rows.tokens.iloc[0]) if of_rank else 1
            for form, (_, place, face) in FORMS.items():
                look = style(place)
                share = end[end.form == form].assign(share=end[measure] / scale).groupby("qk_rank").share
                shape = (look["marker"], look["linestyle"], look["color"])
                band(axis, share, shape, f"{form}, trained", markerfacecolor=face)
                if of_rank:
                    before = fresh[fresh.form == form].groupby("qk_rank")[measure].mean() / scale
                    axis.plot(before.index, before, ":.", color=look["color"], label=f"{form}, fresh")
            if of_rank:
                level(axis, 0.632, "0.63 n: free hard choice", 0.99)
            finish(axis, data, rows.qk_rank, "qk_rank", ylim=(0, 0.75 if of_rank else 1.05), ylabel=name)
        beside(line[-1])
    models = {"token_retrieval": "rank BERT on token retrieval", "images": "rank encoder on images"}
    shapes = "; ".join(
        f"{models[task]}: {int(first.layers)} layer(s) of {int(first.heads)} head(s), width {int(first.hidden)}, "
        f"{int(first.steps)} steps"
        for task, first in table.drop_duplicates("task").set_index("task").iterrows()
    )
    figure.suptitle("Does accuracy stop growing where map rank does?")
    figure.supxlabel(f"lines: mean of {table.seed.nunique()} seed(s), bands: least to largest. {shapes}")
    return figure


def trace_figure(table: pd.DataFrame) -> Figure:
    """Effective rank, argmax coverage and sharpness along training, a line for each width."""
    datasets = list(dict.fromkeys(table.data))
    chosen = [datasets[len(datasets) // 2 - 1 if len(datasets) > 2 else 0], datasets[-1]]
    rows = table[table.what == "trace"]
    measures = {**MEASURES, "logit_std": "deviation of the logits"}
    del measures["accuracy"]
    lines = [(data, form) for data in dict.fromkeys(chosen) for form in FORMS]
    figure, axes = new_figure(len(lines), 3, 13.5, 2.7 * len(lines) + 0.8)
    for line, (data, form) in zip(axes, lines, strict=True):
        part = rows[(rows.data == data) & (rows.form == form)]
        for axis, (measure, name) in zip(line, measures.items(), strict=True):
            of_rank = measure != "logit_std"
            scale = int(part.tokens.iloc[0]) if of_rank else 1
            for place, (rank, curve) in enumerate(part.groupby("qk_rank")):
                values = curve.groupby("step")[measure].mean() / scale
                axis.plot(values.index, values, **style(place), label=f"qk_rank {rank}")
            axis.set(**{"ylim": (0, 0.75)} if of_rank else {"yscale": "log"})
            if of_rank:
                level(axis, 0.632, "0.63 n")
            finish(axis, f"{data}, {form}", xlabel="training steps", ylabel=name)
        beside(line[-1])
    figure.suptitle("What training does to attention maps")
    return figure


def saturated(curve: pd.Series) -> float:
    """The width at which a curve over widths comes near its largest value; nan if there is none."""
    goal = NEAR * float(curve.to_numpy().max())
    return crossing([int(width) for width in curve.index], curve.tolist(), goal) or float("nan")


def claims(table: pd.DataFrame, scale: str) -> Sequence[Claim]:
    ends = table[table.what == "end"]
    return [*width_claims(ends), random_claim(ends), norm_claim(ends), *training_claims(table)]


def width_claims(ends: pd.DataFrame) -> Iterator[Claim]:
    for (data, form), rows in ends.groupby(["data", "form"], sort=False):
        curves = rows.groupby("qk_rank")[list(MEASURES)].mean()
        at = {name: saturated(curves[name]) for name in MEASURES}
        first, last = curves.accuracy.iloc[0], curves.accuracy.iloc[-1]
        judgement = not_testable("Accuracy hardly depends on the width here, so there is nothing to saturate.")
        if curves.accuracy.max() > first + ACCURACY_RISES:
            seeds = rows.sort_values("qk_rank").set_index("qk_rank").groupby("seed")
            ratios = [saturated(own.effective_rank) / saturated(own.accuracy) for _, own in seeds]
            judgement = judge("width of rank over that of accuracy", ratios, 1 / SAME_WIDTH, SAME_WIDTH, ratio=True)
        yield judgement.claim(
            f"{data}, {FORMS[form][0]}: accuracy after training stops growing at about the width where map rank does",
            f"{SOURCE}, accuracy saturates with rank",
            "at about the same head dimension",
            f"accuracy {first:.2f} at width {curves.index[0]}, {last:.2f} at {curves.index[-1]}; 90 % of the best from width "
            f"{at['accuracy']:.1f} (accuracy), {at['argmax_coverage']:.1f} (argmax coverage), {at['effective_rank']:.1f} "
            "(effective rank)",
            no="Rank and accuracy stop growing at different widths.",
        )


def random_claim(ends: pd.DataFrame) -> Claim:
    """The width at which random heads have most of their rank, against the width at which trained ones have learnt."""

    rows = ends[(ends.task == "token_retrieval") & (ends.form == "original")]
    by_seed = rows.groupby(["tokens", "seed"]).apply(
        lambda own: saturated(own.groupby("qk_rank").accuracy.mean()), include_groups=False
    )
    trained = by_seed.groupby("tokens").mean()
    trained.index = trained.index.map(int)
    random = {n: saturation_width(n, NEAR) for n in trained.index}
    bounds = (1 / SAME_WIDTH, SAME_WIDTH)
    return every(
        judge(f"width of trained over that of random heads (n {n})", by_seed[n] / random[n], *bounds, ratio=True)
        for n in trained.index
    ).unpublished(
        "The width at which the rank of random maps saturates is the width that training needs",
        f"{SOURCE}, model reduction (drawn from random weights)",
        "; ".join(f"n {n}: trained {trained[n]:.1f}, random hard maps {random[n]:.0f}" for n in trained.index),
        "Width for 90 % of the best accuracy on token retrieval, original form, against 90 % of the ceiling of random "
        "Gaussian heads.",
        no="Training chooses its keys, random heads do not.",
    )


def norm_claim(ends: pd.DataFrame) -> Claim:
    """The laws of random maps predict that trained heads need less width with QK-norm."""
    retrieval = ends[ends.task == "token_retrieval"]
    curves = retrieval.groupby(["form", "qk_rank"]).accuracy.mean()
    narrow = [rank for rank in sorted(retrieval.qk_rank.unique()) if rank <= 4]
    text = ", ".join(f"width {r}: {curves['qk_norm', r]:.2f} against {curves['original', r]:.2f}" for r in narrow)
    by_seed = retrieval.groupby(["seed", "form", "qk_rank"]).accuracy.mean().unstack(["form", "qk_rank"])
    gains = {rank: by_seed["qk_norm", rank] - by_seed["original", rank] for rank in narrow}
    return every(
        judge(f"accuracy with the norm minus that without (width {rank})", gain, 0) for rank, gain in gains.items()
    ).unpublished(
        "With QK-norm, trained heads make do with less width (as the maps of random ones do)",
        "ours, a prediction from random maps",
        f"{text} (token retrieval, mean over n)",
        no="Unit keys have one dimension less, and training gives other keys the lengths it needs; whether that is the "
        "reason was not tested.",
    )


def training_claims(table: pd.DataFrame) -> Iterator[Claim]:
    for data, rows in table[(table.what == "trace") & (table.form == "original")].groupby("data", sort=False):
        widest = rows[rows.qk_rank == rows.qk_rank.max()]
        means = widest.groupby("step")[["effective_rank", "stable_rank", "argmax_coverage", "tokens"]].mean()
        first, last = means.loc[0], means.iloc[-1]
        ranks = widest.pivot(index="seed", columns="step", values="effective_rank")
        gain = ranks[ranks.columns.max()] - ranks[0]
        yield judge("effective rank after training minus before", gain, least=0).unpublished(
            f"{data}: training raises the rank of attention maps above that of a fresh model (width {int(rows.qk_rank.max())})",
            "ours; the paper measured fresh and trained maps apart",
            f"effective rank {first.effective_rank:.1f} to {last.effective_rank:.1f}, stable rank {first.stable_rank:.2f} to "
            f"{last.stable_rank:.2f}, argmax coverage {first.argmax_coverage:.1f} to {last.argmax_coverage:.1f} of "
            f"{int(last.tokens)}",
            no=f"Trained rows agree on few tokens: their largest weights are in {last.argmax_coverage:.1f} columns, those of "
            f"the fresh model in {first.argmax_coverage:.1f}.",
        )
