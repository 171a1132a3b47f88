"""What paths of each length are worth to a trained model: run by themselves as published, and as parts of its output."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .grid import Cell, grid
from .runner import Claim


NAME = "path-effectiveness"
SHOWS = "accuracy on sorting, hulls and memorization of single paths and of exact parts of the output, by path length"
REVISION = 1
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
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "paths": [2, 3], "repetitions": 1, "seeds": 1,
        "tasks": {"sorting": SMALL, "convex_hull": SMALL, "memorization": {**SMALL, "train": 16, "max_length": 16}},
    },
    "laptop": {
        "paths": [5, 20], "repetitions": 3, "seeds": 2,
        "tasks": {
            "sorting": {"epochs": 50, "train": 1000, "scored": 100},
            "convex_hull": {"epochs": 25, "train": 2000, "scored": 100},
            "memorization": {
                "epochs": 60, "train": 60, "scored": 60, "max_length": 48, "hidden": 64, "learning_rate": 1e-3,
            },
        },
    },
    "paper": {
        "paths": [5, 20], "repetitions": 5, "seeds": 5,
        "tasks": {
            "sorting": {"epochs": 65, "train": 1000, "scored": 200},
            "convex_hull": {"epochs": 70, "train": 10_000, "scored": 300},
            "memorization": {"epochs": 50, "train": 80, "scored": 80, "max_length": 128},
        },
    },
}  # fmt: skip


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting, as_published = SETTINGS[scale], bool(options.get("as_published"))
    found = []
    for axis in grid(task=list(TASKS), seed=list(range(seeds or setting["seeds"]))):
        task = axis["task"]
        chosen = {
            "batch_size": 30, "weight_decay": 0.0, "use_mlp": False, "max_length": None,
            **TASKS[task], **setting["tasks"][task], **(AS_PUBLISHED[task] if as_published else {}),
        }  # fmt: skip
        cost = chosen["epochs"] * chosen["train"] * chosen["hidden"]
        common = {"paths": setting["paths"], "repetitions": setting["repetitions"], "as_published": as_published}
        found.append(Cell({**axis, **chosen, **common}, cost=cost))
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    import torch

    from ..tasks.baselines import task_baselines

    builder = task_of(parameters)
    model, trained = trained_model(parameters, builder, work)
    scored = scored_rows(parameters, builder)
    with torch.no_grad():
        right = (model(**scored).logits.argmax(-1) == scored["labels"])[scored["labels"] != -100]
    whole = {"whole": right.double().mean().item(), **trained}
    for name, metrics in task_baselines(builder, max(parameters["train"], 256)).items():
        whole[f"baseline_{name}"] = float(metrics.get("token_accuracy", metrics.get("accuracy", 0.0)))
    return [{**row, **whole} for row in path_rows(parameters, model, scored)]


def trained_model(parameters: Mapping[str, Any], builder, work: Path):
    """The model of a cell, trained on its rows, and what a table has to say of the run."""
    from .row_training import RowTraining, train_rows

    columns = rows_of(builder, "train", parameters["train"])
    model = task_model(parameters, builder)
    training = RowTraining(
        parameters["epochs"], parameters["learning_rate"], parameters["seed"], parameters["batch_size"],
        parameters["weight_decay"], shuffle=not parameters["as_published"],
    )  # fmt: skip
    return model, train_rows(model, columns, training, work)


def scored_rows(parameters: Mapping[str, Any], builder) -> dict[str, Any]:
    # what was learnt by heart is scored where it was learnt
    split = "train" if parameters["task"] == "memorization" else "test"
    return rows_of(builder, split, parameters["scored"])


def path_rows(parameters: Mapping[str, Any], model, scored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Accuracies by path length: of so many isolated paths at a time, and of the exact parts of the output."""
    from ..probe import isolated_paths, path_lengths

    rows = []
    for count in parameters["paths"]:
        table = isolated_paths(
            model, scored, count, parameters["repetitions"], mlp=parameters["use_mlp"], seed=parameters["seed"]
        )
        means = table.groupby(["length", "repetition", "metric"]).value.mean().unstack()
        for (length, repetition), row in means.iterrows():
            labels = {"way": "isolated", "drawn": count, "length": int(length), "repetition": int(repetition)}
            rows.append({**labels, "accuracy": row.accuracy, "relative_residual": row.relative_residual})
    table = path_lengths(model, scored, loss=True)
    means = table.dropna(subset="length").groupby(["length", "metric"]).value.mean().unstack()
    for length, row in means.iterrows():
        shared = {"projection": row.projection, "relative_residual": row.relative_residual}
        for cut in ("only", "up_to"):
            scores = {"accuracy": row[f"accuracy_{cut}"], "loss": row[f"loss_{cut}"]}
            rows.append({"way": cut, "length": int(length), **scores, **shared})
    return [{name: float(v) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def rows_of(builder, split: str, rows: int) -> dict[str, Any]:
    """Rows as tensors; a text may end in a row of a single token, which has no residual and is left out."""
    import torch

    columns = {name: torch.from_numpy(array) for name, array in builder.sample(split, rows).items()}
    if "attention_mask" not in columns:
        return columns
    kept = columns["attention_mask"].sum(-1) > 1
    return {name: column[kept] for name, column in columns.items()}


def task_of(parameters: Mapping[str, Any]):
    from ..tasks.loading import task_builder

    length = {"max_length": parameters["max_length"]} if parameters["max_length"] else {}
    rows = {"num_eval_examples": max(parameters["scored"], 64)} if parameters["task"] != "memorization" else {}
    return task_builder(
        parameters["task"], seed=parameters["seed"], num_examples=parameters["train"], **rows, **length
    )


def task_model(parameters: Mapping[str, Any], builder):
    import torch

    from ..models import RankEncoderConfig, RankEncoderForTokenClassification

    torch.manual_seed(parameters["seed"])
    task = parameters["task"]
    fields: dict[str, Any] = {"position": "none"}
    if task == "sorting":
        # positions are drawn from -1 to 1: tokens of the same size, or the norm behind the sum hides them
        fields = {
            "position": "additive",
            "max_position_embeddings": builder.config.length,
            "initializer_range": 3**-0.5,
        }
    if task == "convex_hull":
        fields["input_map"] = "mlp"
    config = RankEncoderConfig(
        hidden_size=parameters["hidden"], num_hidden_layers=parameters["layers"],
        num_attention_heads=parameters["heads"], norm="layer", input_norm=True, use_mlp=parameters["use_mlp"],
        intermediate_size=parameters["hidden"], hidden_act="gelu", hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1, **fields, **builder.model_arguments(),
    )  # fmt: skip
    return RankEncoderForTokenClassification(config)


def figures(table, scale: str):
    from ..report.collapse import path_effectiveness_figure

    return {"path-effectiveness": path_effectiveness_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    from .path_claims import path_claims

    return path_claims(table)
