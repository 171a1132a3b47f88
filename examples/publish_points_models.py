"""Train the two encoders that this project publishes, measure them, and share them with cards.

    python examples/publish_points_models.py --output_dir runs/points
    python examples/publish_points_models.py --output_dir runs/points --push_to my-name

One head of full rank against two heads of half rank, at one parameter budget, on the farthest of 16 points in 32
dimensions. The folder gets `table.parquet`, the rows of the two runs, and what stands in the cards is read from there. Each
model loads with this package and, as it carries its source, without it. The cards in `model_cards/` are those that this
script wrote.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from huggingface_hub import EvalResult

from hf_rankattn import RankEncoderForPointRegression, equal_budget_grid
from hf_rankattn.papers.rank_benefits._training import PointTraining, train_points
from hf_rankattn.papers.sweep.results import running_versions
from hf_rankattn.training.arguments import check_counts, parse_arguments, refuse
from hf_rankattn.training.publishing import PublishingArguments, publish_model, save_table


HOW = """Trained from scratch on farthest neighbour: {num_points} random unit vectors in {dim} dimensions, the label of each
being the farthest of the others. {steps} steps of AdamW (learning rate {learning_rate}, that of the temperatures
{temperature_factor:g} times it; warm-up and cosine; betas 0.9 and 0.95) on batches of {batch_size} fresh rows, none of them seen
twice; seed {init_seed} of the weights and {data_seed} of the data. {wall_seconds:.0f} seconds on one CPU core, with torch {torch}
and transformers {transformers}. The error on the last 100 batches of training was {train_error:.4f}.

To compare, on the same task: predicting zero costs {baseline_zero:.3f}, the best multiple of the token itself
{baseline_own_token:.3f}, with the mean of the points {baseline_own_token_and_mean_pool:.3f}, and with full-rank attention without its
softmax {baseline_linear_attention:.3f}. {twin}

The model answers no other question, and is meant to be measured, not used."""


@dataclass(kw_only=True)
class Arguments(PublishingArguments):
    dim: int = field(default=32, metadata={"help": "dimension of the points"})
    num_points: int = field(default=16, metadata={"help": "points in a row"})
    intermediate: int = field(default=512, metadata={"help": "width of the MLP"})
    steps: int = field(default=3000, metadata={"help": "training steps for each"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "dim", "num_points", "intermediate", "steps")


def result(row: pd.Series) -> EvalResult:
    return EvalResult(
        task_type="other",
        task_name="farthest neighbour",
        dataset_type="farthest_neighbor",
        dataset_name=f"farthest neighbour, d {row['dim']}, N {row.num_points}, {row.held_out_rows} fresh rows",
        dataset_split="test",
        metric_type="squared_error",
        metric_name="squared error per point (predicting zero: 1)",
        metric_value=round(row.held_out_error, 4),
    )


def train_twins(arguments: Arguments) -> tuple[list[RankEncoderForPointRegression], pd.DataFrame]:
    models, rows = [], []
    for geometry in equal_budget_grid(arguments.dim**2, arguments.dim, ranks=[arguments.dim, arguments.dim // 2]):
        training = PointTraining(
            dim=arguments.dim,
            num_points=arguments.num_points,
            layers=1,
            heads=geometry["num_attention_heads"],
            rank=geometry["qk_rank"],
            qk_norm=True,
            intermediate=arguments.intermediate,
            steps=arguments.steps,
            init_seed=arguments.seed,
            data_seed=arguments.seed,
            held_out_rows=4096,
        )
        start = time.perf_counter()
        with TemporaryDirectory() as work:
            model, row = train_points(training, Path(work))
        if row["status"] != "finished":
            refuse(
                f"training of rank {training.rank} {row['status']} at step {row['steps_done']}: no model is written."
            )
        seconds = {"wall_seconds": time.perf_counter() - start}
        models.append(model)
        rows.append(asdict(training) | row | running_versions() | seconds)
    return models, pd.DataFrame(rows)


def main() -> None:
    arguments = parse_arguments(Arguments, __doc__)
    torch.set_num_threads(1)
    models, table = train_twins(arguments)
    save_table(table, arguments)
    for place, model in enumerate(models):
        row, other = table.iloc[place], table.iloc[1 - place]
        twin = f"Its twin with {other.heads} head(s) of rank {other['rank']}, at the same budget: {other.held_out_error:.4f}."
        name = f"rank-encoder-farthest-d{row['dim']}-r{row['rank']}"
        print(publish_model(model, name, HOW.format(**row, twin=twin), [result(row)], arguments))


if __name__ == "__main__":
    main()
