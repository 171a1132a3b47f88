"""What the scripts that train encoders on points share: their arguments, their task, their model, and their results."""

from dataclasses import dataclass, field
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
from .arguments import RunArguments


POINT_TASKS = ("farthest_neighbor", "nearest_neighbor", "biased_nearest_neighbor", "convex_hull", "circle")


@dataclass(kw_only=True)
class PointArguments(RunArguments):
    """The published recipe on its own task, every part of it a flag."""

    output_dir: str = field(
        default="runs/points", metadata={"help": "folder of the run: its checkpoints and its model"}
    )
    steps: int = field(default=2000, metadata={"help": "training steps; the schedule spans all of them"})
    task: str = field(default="farthest_neighbor", metadata={"help": f"one of {', '.join(POINT_TASKS)}"})
    task_config: str | None = field(
        default=None, metadata={"help": "named config of the task; by default the papers'"}
    )
    dim: int | None = field(default=None, metadata={"help": "dimension of the points, over that of the config"})
    num_points: int | None = field(default=None, metadata={"help": "points in a row, over that of the config"})
    num_eval_examples: int | None = field(default=None, metadata={"help": "held-out rows to evaluate on"})
    num_layers: int = field(default=1, metadata={"help": "layers of the encoder"})
    hidden_size: int | None = field(
        default=None, metadata={"help": "width of the stream; another one than dim is reached by a linear map"}
    )
    qk_rank: int | None = field(default=None, metadata={"help": "query-key rank of each head; by default hidden_size"})
    num_attention_heads: int | None = field(default=None, metadata={"help": "heads; by default 1"})
    budget: int | None = field(
        default=None, metadata={"help": "qk_rank * hidden_size * heads of a layer, in place of num_attention_heads"}
    )
    intermediate_size: int = field(default=2048, metadata={"help": "width of the MLP"})
    qk_norm: bool = field(default=False, metadata={"help": "unit queries and keys with a learned temperature"})
    temperature_lr_factor: float = field(
        default=3.0, metadata={"help": "learning rate of the log-temperatures of qk_norm, as a multiple of the rest"}
    )

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
    builder = task_builder(
        arguments.task,
        arguments.task_config,
        dim=arguments.dim,
        num_points=arguments.num_points,
        num_eval_examples=arguments.num_eval_examples,
        seed=arguments.data_seed,
    )
    if not builder.endless:
        raise ValueError(
            f"{arguments.task} {builder.config.name} has {builder.config.num_examples} train rows and no others; choose a "
            f"--task_config with fresh ones: {', '.join(endless_configs(arguments.task))}."
        )
    return builder


def endless_configs(task: str) -> list[str]:
    names = task_builder(task).builder_configs
    return [name for name in names if task_builder(task, name).endless]


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
    config = RankEncoderConfig(
        num_hidden_layers=arguments.num_layers,
        intermediate_size=arguments.intermediate_size,
        qk_norm=arguments.qk_norm,
        **heads,
        **fields,
    )
    head = RankEncoderForTokenClassification if "num_labels" in fields else RankEncoderForPointRegression
    return head(config)


def point_report(arguments: PointArguments, builder: TaskBuilder, metrics: dict[str, float]) -> dict[str, Any]:
    """Fields of a card: what was measured, how it came about, and what predictors reach that cannot solve the task."""
    task, name = arguments.task, builder.config.name
    rows = builder.config.num_eval_examples
    results = [
        EvalResult(
            task_type="other",
            task_name=task.replace("_", " "),
            dataset_type=task,
            dataset_name=f"{task} {name}, {rows} held-out rows",
            dataset_split="test",
            metric_type=metric,
            metric_value=round(value, 6),
        )
        for metric, value in metrics.items()
    ]
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
