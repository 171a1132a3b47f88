"""What the scripts that train encoders on points share: their arguments, their task, their model, and their results."""

from dataclasses import dataclass
from typing import Any

import datasets
from huggingface_hub import EvalResult

from ..models import (
    RankEncoderConfig,
    RankEncoderForPointRegression,
    RankEncoderForTokenClassification,
    equal_budget_grid,
)
from ..tasks import TaskBuilder, load_stream, start_at, task_baselines, task_builder
from .arguments import RunArguments, option


POINT_TASKS = ("farthest_neighbor", "nearest_neighbor", "biased_nearest_neighbor", "convex_hull", "circle")


@dataclass(kw_only=True)
class PointArguments(RunArguments):
    """The published recipe on its own task, every part of it a flag."""

    output_dir: str = option("runs/points", "folder of the run: its checkpoints and its model")
    steps: int = option(2000, "training steps; the schedule spans all of them")
    task: str = option("farthest_neighbor", f"one of {', '.join(POINT_TASKS)}")
    task_config: str | None = option(None, "named config of the task; by default the papers'")
    dim: int | None = option(None, "dimension of the points, over that of the config")
    num_points: int | None = option(None, "points in a row, over that of the config")
    num_eval_examples: int | None = option(None, "held-out rows to evaluate on")
    num_layers: int = option(1, "layers of the encoder")
    hidden_size: int | None = option(None, "width of the stream; another one than dim is reached by a linear map")
    qk_rank: int | None = option(None, "query-key rank of each head; by default hidden_size")
    num_attention_heads: int | None = option(None, "heads; by default 1")
    budget: int | None = option(None, "qk_rank * hidden_size * heads of a layer, in place of num_attention_heads")
    intermediate_size: int = option(2048, "width of the MLP")
    qk_norm: bool = option(False, "unit queries and keys with a learned temperature")
    temperature_lr_factor: float = option(3.0, "learning rate of the log-temperatures, as a multiple of the rest")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in POINT_TASKS:
            raise ValueError(f"--task {self.task} is no task on points; these are: {', '.join(POINT_TASKS)}.")
        if self.budget is not None and self.num_attention_heads is not None:
            raise ValueError(
                f"--budget {self.budget} follows from the number of heads, and --num_attention_heads "
                f"{self.num_attention_heads} too: give one of them."
            )


def point_task(arguments: PointArguments) -> TaskBuilder:
    """The builder of the task of a run. A task without fresh rows is refused."""
    builder = task_builder(
        arguments.task,
        arguments.task_config,
        dim=arguments.dim,
        num_points=arguments.num_points,
        num_eval_examples=arguments.num_eval_examples,
        seed=arguments.data_seed,
    )
    if not builder.endless:
        others = [name for name in builder.builder_configs if task_builder(arguments.task, name).endless]
        raise ValueError(
            f"{arguments.task} {builder.config.name} has {builder.config.num_examples} train rows and no others; choose a "
            f"--task_config with fresh ones: {', '.join(others)}."
        )
    return builder


def fresh_rows(builder: TaskBuilder, row: int) -> datasets.IterableDataset:
    """The endless train stream, from a row on."""
    stream = load_stream(builder, "train")
    assert isinstance(stream, datasets.IterableDataset)
    return start_at(stream, row)


def point_model(
    arguments: PointArguments, builder: TaskBuilder
) -> RankEncoderForPointRegression | RankEncoderForTokenClassification:
    """An encoder of the geometry that was asked for, with fresh weights."""
    fields: dict[str, Any] = builder.model_arguments()
    hidden_size = arguments.hidden_size or fields["input_dim"]
    if hidden_size != fields["input_dim"]:
        fields |= {"hidden_size": hidden_size, "input_map": "linear"}
    rank = hidden_size if arguments.qk_rank is None else arguments.qk_rank
    if arguments.budget is not None:
        (heads,) = equal_budget_grid(arguments.budget, hidden_size, ranks=[rank])
    else:
        heads = {"qk_rank": rank, "v_head_dim": rank, "num_attention_heads": arguments.num_attention_heads or 1}
    fields |= {"num_hidden_layers": arguments.num_layers, "intermediate_size": arguments.intermediate_size, **heads}
    config = RankEncoderConfig(qk_norm=arguments.qk_norm, **fields)
    head = RankEncoderForTokenClassification if "num_labels" in fields else RankEncoderForPointRegression
    return head(config)


def point_report(arguments: PointArguments, builder: TaskBuilder, metrics: dict[str, float]) -> dict[str, Any]:
    """Fields of a card: what was measured, how it came about, and what predictors reach that cannot solve the task."""
    task, name = arguments.task, builder.config.name
    rows = builder.config.num_eval_examples
    of: dict[str, Any] = {"task_type": "other", "task_name": task.replace("_", " "), "dataset_split": "test"}
    of |= {"dataset_type": task, "dataset_name": f"{task} {name}, {rows} held-out rows"}
    results = [EvalResult(**of, metric_type=key, metric_value=round(value, 6)) for key, value in metrics.items()]
    baselines = "; ".join(
        f"{baseline} {', '.join(f'{metric} {value:.3f}' for metric, value in measured.items())}"
        for baseline, measured in task_baselines(builder).items()
    )
    temperature = f", log-temperatures {arguments.temperature_lr_factor:g} times that" if arguments.qk_norm else ""
    how = (
        f"Trained from scratch on `{task}` `{name}`: {arguments.steps} steps of AdamW (learning rate "
        f"{arguments.learning_rate:g}{temperature}, betas 0.9 and 0.95, warm-up and cosine) on batches of "
        f"{arguments.batch_size} fresh rows, seed {arguments.seed} of the weights and {arguments.data_seed} of the data.\n\n"
        f"Predictors that cannot solve the task reach: {baselines}."
    )
    return {"results": results, "how": how, "datasets": (), "license": "apache-2.0"}
