"""The accuracy of paths of each length in a trained model: run by themselves as published, and as parts of its output."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from ...models import RankEncoderConfig, RankEncoderForTokenClassification
from ...probe import isolated_paths, path_lengths
from ...report.plots import STYLES, new_figure, published_table
from ...tasks import task_baselines, task_builder
from ..drawing import band
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, every, judge, not_testable
from ..sweep.tolerances import ACCURACY, ALL_PATHS, PATH_ACCURACY, REFERENCE
from ..training import RowTraining, tensors_of, train_rows
from ._subjects import titled


SHOWS = "accuracy on sorting, hulls and memorization of single paths and of exact parts of the output, by path length"
OPTIONS = ("as_published",)

# the published geometries; rates are ours, as the published ones do not get there (as_published has them)
TASKS: dict[str, dict[str, Any]] = {
    "sorting": {"layers": 6, "heads": 2, "hidden": 48, "learning_rate": 1e-3},
    "convex_hull": {"layers": 6, "heads": 3, "hidden": 84, "learning_rate": 1e-3},
    "memorization": {"layers": 6, "heads": 2, "hidden": 250, "learning_rate": 3e-4, "batch_size": 8},
}
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "sorting": {"learning_rate": 1e-5},
    "convex_hull": {"learning_rate": 1e-5, "weight_decay": 1e-3},
    "memorization": {"use_mlp": True},
}
SMALL = {"layers": 2, "hidden": 12, "epochs": 1, "train": 32, "scored": 4}
SHORT_TEXTS = {"epochs": 60, "train": 60, "scored": 60, "max_length": 48, "hidden": 64, "learning_rate": 1e-3}
# scale -> paths drawn at a time, repetitions, seeds
DRAWS: dict[str, tuple[list[int], int, int]] = {
    "smoke": ([2, 3], 1, 1),
    "laptop": ([5, 20], 3, 4),
    "paper": ([5, 20], 5, 5),
}
# scale -> task -> sizes
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "smoke": {"sorting": SMALL, "convex_hull": SMALL, "memorization": {**SMALL, "train": 16, "max_length": 16}},
    "laptop": {
        "sorting": {"epochs": 50, "train": 1000, "scored": 100},
        "convex_hull": {"epochs": 25, "train": 2000, "scored": 100},
        "memorization": SHORT_TEXTS,
    },
    "paper": {
        "sorting": {"epochs": 65, "train": 1000, "scored": 200},
        "convex_hull": {"epochs": 70, "train": 10_000, "scored": 300},
        "memorization": {"epochs": 50, "train": 80, "scored": 80, "max_length": 128},
    },
}
FIGURE = "Dong et al., plot of path effectiveness"
# the best predictor that does not see the other tokens, and what it sees instead
BASELINES = {
    "sorting": ("baseline_position_only", "position only"),
    "convex_hull": ("baseline_majority", "majority"),
    "memorization": ("baseline_own_token", "token only"),
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    as_published = bool(options.get("as_published"))
    paths, repetitions, usual_seeds = DRAWS[scale]
    common = {"paths": paths, "repetitions": repetitions, "as_published": as_published}
    defaults = {"batch_size": 30, "weight_decay": 0.0, "use_mlp": False, "max_length": None}
    found = []
    for axis in grid(task=list(TASKS), seed=list(range(seeds or usual_seeds))):
        task = axis["task"]
        chosen = defaults | TASKS[task] | SETTINGS[scale][task] | (AS_PUBLISHED[task] if as_published else {})
        cost = chosen["epochs"] * chosen["train"] * chosen["hidden"]
        found.append(Cell({**axis, **chosen, **common}, cost=cost))
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    builder = task_of(parameters)
    model, trained = trained_model(parameters, builder, work)
    scored = scored_rows(parameters, builder)
    with torch.no_grad():
        right = (model(**scored).logits.argmax(-1) == scored["labels"])[scored["labels"] != -100]
    whole = {"whole": right.double().mean().item(), **trained}
    for name, metrics in task_baselines(builder, max(parameters["train"], 256)).items():
        whole[f"baseline_{name}"] = float(metrics.get("token_accuracy", metrics.get("accuracy", 0.0)))
    return [{**row, **whole} for row in path_rows(parameters, model, scored)]


def trained_model(parameters: Mapping[str, Any], builder: Any, work: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a cell, trained on its rows, and the columns that describe the run."""
    names = ("epochs", "learning_rate", "seed", "batch_size", "weight_decay")
    training = RowTraining(**{name: parameters[name] for name in names}, shuffle=not parameters["as_published"])
    model = task_model(parameters, builder)
    return model, train_rows(model, rows_of(builder, "train", parameters["train"]), training, work)


def scored_rows(parameters: Mapping[str, Any], builder: Any) -> dict[str, Any]:
    """Memorized rows are scored on the rows that were trained, those of other tasks on held-out rows."""
    split = "train" if parameters["task"] == "memorization" else "test"
    return rows_of(builder, split, parameters["scored"])


def path_rows(
    parameters: Mapping[str, Any], model: PreTrainedModel, scored: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Accuracies by path length: of so many isolated paths at a time, and of the exact parts of the output."""
    rows: list[dict[str, Any]] = []
    chosen = {"repetitions": parameters["repetitions"], "mlp": parameters["use_mlp"], "seed": parameters["seed"]}
    for count in parameters["paths"]:
        table = isolated_paths(model, scored, count, **chosen)
        means = table.groupby(["length", "repetition", "metric"]).value.mean().unstack().reset_index()
        found = means.astype({"length": int}).assign(way="isolated", drawn=count)
        names = ["way", "drawn", "length", "repetition", "accuracy", "relative_residual"]
        rows += found[names].to_dict("records")
    table = path_lengths(model, scored, loss=True)
    means = table.dropna(subset="length").groupby(["length", "metric"]).value.mean().unstack()
    for length, row in means.iterrows():
        shared = {"projection": row.projection, "relative_residual": row.relative_residual}
        for cut in ("only", "up_to"):
            scores = {"accuracy": row[f"accuracy_{cut}"], "loss": row[f"loss_{cut}"]}
            rows.append({"way": cut, "length": int(length), **scores, **shared})
    return rows


def rows_of(builder: Any, split: str, rows: int) -> dict[str, torch.Tensor]:
    """Rows as tensors, without rows of a single token, which have no residual (a text may end in one)."""
    columns = tensors_of(builder.sample(split, rows))
    if "attention_mask" not in columns:
        return columns
    kept = columns["attention_mask"].sum(-1) > 1
    return {name: column[kept] for name, column in columns.items()}


def task_of(parameters: Mapping[str, Any]) -> Any:
    more = {"max_length": parameters["max_length"]} if parameters["max_length"] else {}
    if parameters["task"] != "memorization":
        more["num_eval_examples"] = max(parameters["scored"], 64)
    return task_builder(parameters["task"], seed=parameters["seed"], num_examples=parameters["train"], **more)


def task_model(parameters: Mapping[str, Any], builder: Any) -> RankEncoderForTokenClassification:
    torch.manual_seed(parameters["seed"])
    fields: dict[str, Any] = {"position": "none"}
    if parameters["task"] == "sorting":
        # drawn from -1 to 1, of the same size as tokens: the norm after the sum would hide smaller positions
        fields = {"position": "additive", "max_position_embeddings": builder.config.length}
        fields["initializer_range"] = 3**-0.5
    if parameters["task"] == "convex_hull":
        fields["input_map"] = "mlp"
    sizes = {"hidden_size": parameters["hidden"], "intermediate_size": parameters["hidden"]}
    sizes |= {"num_hidden_layers": parameters["layers"], "num_attention_heads": parameters["heads"]}
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    layer = {"norm": "layer", "input_norm": True, "use_mlp": parameters["use_mlp"], "hidden_act": "gelu"}
    config = RankEncoderConfig(**sizes, **layer, **dropout, **fields, **builder.model_arguments())
    return RankEncoderForTokenClassification(config)


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """A column for each task: isolated paths above, exact parts of the output below."""
    tasks = list(dict.fromkeys(table.task))
    published = published_table("path_effectiveness").set_index("task")
    figure, axes = new_figure(2, len(tasks), 4.3 * len(tasks) + 0.4, 8.2, sharey=True, sharex="col")
    for (upper, lower), task in zip(axes.T, tasks, strict=True):
        rows = table[table.task == task]
        isolated = rows[rows.way == "isolated"].groupby("drawn")
        for (drawn, part), style in zip(isolated, STYLES, strict=False):
            band(upper, part.groupby("length").accuracy, style, f"{int(drawn)} paths, each by itself")
        names = {"up_to": "all paths up to this length", "only": "paths of this length alone"}
        for (way, name), style in zip(names.items(), STYLES[2:4], strict=True):
            band(lower, rows[rows.way == way].groupby("length").accuracy, style, name)
        for axis in (upper, lower):
            reference_lines(axis, rows, published.loc[task], BASELINES[task])
            axis.set_ylim(0, 1.08)
        first, seeds = rows.iloc[0], f"{rows.seed.nunique()} seed(s)"
        shape = f"{int(first.layers)} layers of {int(first.heads)} heads, d {int(first.hidden)}"
        mlp = ", MLPs" if first.use_mlp else ""
        upper.set_title(f"{task.replace('_', ' ')}\n{shape}{mlp}, lr {first.learning_rate:g}, {seeds}")
        lower.set_xlabel("length of paths (heads on the way)")
    for axis, what in zip(axes[:, 0], ("isolated paths, as published", "exact parts of the output"), strict=True):
        axis.set_ylabel(f"accuracy\n{what}")
    title = "What paths of each length are worth (mean; band: least to largest over seeds and draws)"
    return {"path-effectiveness": titled(figure, title, list(axes[:, 0]), columns=4)}


def reference_lines(axis: Axes, rows: pd.DataFrame, published: pd.Series, baseline: tuple[str, str]) -> None:
    """Lines at our accuracies (solid) and the published ones (dashed), with their names to the right."""
    column, seen = baseline
    longest = float(rows.length.max())
    lines = [
        (rows.whole.mean(), "whole model", "-"),
        (rows[column].mean(), seen, "-"),
        (published.whole, "published: whole", "--"),
        (published.reference, f"published: {published.reference_name}", "--"),
    ]
    height = -1.0
    for value, name, line in sorted(lines):
        axis.hlines(value, 0, longest, color="0.35", linewidth=0.9, linestyle=line, zorder=0)
        height = max(value, height + 0.045)  # keeps the names of near lines apart
        axis.annotate(f"{name} {value:.2f}", (1.04 * longest, height), fontsize=7, va="center", color="0.25")
    axis.set_xlim(-0.05 * longest, 1.55 * longest)
    axis.set_xticks(range(int(longest) + 1))


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    published = published_table("path_effectiveness").set_index("task")
    for task, rows in table.groupby("task", sort=False):
        yield from task_claims(str(task), rows, published.loc[task])
        yield exact_claim(str(task), rows)


def listed(values: pd.Series) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def title_of(task: str) -> str:
    return task.replace("_", " ").capitalize()


def task_claims(task: str, rows: pd.DataFrame, published: pd.Series) -> Iterator[Claim]:
    title, (column, seen) = title_of(task), BASELINES[task]
    whole = rows.groupby("seed").whole.first()
    rate = rows.learning_rate.iloc[0]
    as_published = bool(rows.as_published.iloc[0])
    mlp = " with MLPs" if rows.use_mlp.iloc[0] else ""
    yield judge("accuracy", whole, least=published.whole - ACCURACY).claim(
        f"{title}: the whole model{mlp} solves the task (accuracy, learning rate {rate:g})",
        FIGURE,
        f"{published.whole:g}",
        f"{whole.mean():.3f} ({whole.min():.3f} to {whole.max():.3f})",
        published_why(task, as_published),
    )
    base = rows.groupby("seed")[column].first()
    yield judge("accuracy", base, published.reference - REFERENCE, published.reference + REFERENCE).claim(
        f"{title}: what a predictor reaches that sees nothing of the other tokens ({seen})",
        FIGURE + ", reference line",
        f"{published.reference:g} ({published.reference_name})",
        f"{base.mean():.3f}",
        no="The published line is hard-coded, and below what such a predictor reaches.",
    )
    isolated = rows[rows.way == "isolated"]
    curves = isolated.groupby(["drawn", "length"]).accuracy.mean().unstack("drawn")
    few, many = int(curves.columns.min()), int(curves.columns.max())
    longest = curves.index.max()
    by_seed = isolated.groupby(["seed", "drawn", "length"]).accuracy.mean().unstack(["drawn", "length"])
    falls = not_testable("There are no longer paths.")
    if longest >= 3:
        later = by_seed[many][[length for length in curves.index if length >= 3]]
        lead = by_seed[many][1] - later.max(axis=1)
        fall = judge("accuracy at length 1 minus the best from length 3 on", lead, PATH_ACCURACY)
        chance = judge(f"accuracy at length {longest}", later[longest], most=published.reference + ACCURACY)
        falls = every((fall, chance))
    yield falls.claim(
        f"{title}: the longer isolated paths are, the worse they are, down to chance",
        FIGURE,
        "accuracy falls with length",
        f"{listed(curves[few])} ({few} paths); {listed(curves[many])} ({many} paths), lengths 0 to {longest}",
        "Judged from length 1 on: paths of length 0 are copies of the embeddings.",
        no=f"Paths of length 1 are at {curves[many].loc[1]:.2f} themselves, and the reference line is {published.reference:g}.",
    )
    yield judge(f"accuracy of {many} minus that of {few}", by_seed[many][1] - by_seed[few][1], least=0).claim(
        f"{title}: {many} isolated paths are better than {few} (length 1)",
        FIGURE,
        "more paths are better",
        f"{curves[many].loc[1]:.3f} against {curves[few].loc[1]:.3f}",
        no="Fewer paths are better here.",
    )


def published_why(task: str, as_published: bool) -> str:
    if as_published and task == "memorization":
        return "Fault: a misplaced argument of the published code switches MLPs on in what is called pure attention."
    if as_published:
        return "The learning rate of the published README."
    if task == "memorization":
        return "MLPs off, as the paper says; its code has them on. Other text and fewer rows than there."
    return "The published rate of 1e-5 does not get there in the published number of epochs."


def exact_claim(task: str, rows: pd.DataFrame) -> Claim:
    """The correct experiment: parts of the output instead of separate networks."""
    cut = rows[rows.way == "up_to"].groupby("length").accuracy.mean()
    share = rows[rows.way == "only"].groupby("length").projection.mean()
    half = int(cut.index.max()) // 2
    enough = int((cut >= cut.iloc[-1] - ALL_PATHS).idxmax())
    by_seed = rows[rows.way == "up_to"].pivot(index="seed", columns="length", values="accuracy")
    loss = by_seed[by_seed.columns.max()] - by_seed[half]
    return judge(f"accuracy of all paths minus that of lengths up to {half}", loss, most=ALL_PATHS).unpublished(
        f"{title_of(task)}, exact parts of the output: paths through at most half of the layers are as good as all",
        "Dong et al., Theorem 2.1 (on the published tasks; ours)",
        f"accuracy {listed(cut)} when lengths up to 0, 1, ... are kept: all there from length {enough} on; lengths up to "
        f"{half} make up {share.loc[:half].sum():.0%} of the output",
        "The published experiment runs each path as a network of its own, which is no term of the decomposition.",
        no=f"The labels need paths up to length {enough}, though shorter ones make up nearly all of the output.",
    )
