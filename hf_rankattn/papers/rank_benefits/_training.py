"""Training of the papers' encoder on points, with Trainer, to one row of a table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ...models import RankEncoderConfig, RankEncoderForPointRegression, parameter_counts
from ...tasks import BatchStream, TaskBuilder, task_baselines, task_builder
from ...training.optimizers import point_optimizer, warmup_cosine
from ..training import StreamTrainer, in_parts, tensors_of


EPOCH = 100  # steps; the published runs count and report by these
# predicting zero costs 1 and a random unit vector 2: beyond this a run has lost its way
DIVERGED = 10.0


@dataclass(frozen=True)
class PointTraining:
    """Everything that decides about a run. The defaults are the recipe of Amsel, Yehudai and Bruna (2024).

    Args:
        dim, num_points: The task, farthest neighbour unless `task` says otherwise.
        layers, heads, rank: Geometry; values are as wide as queries and keys.
        qk_norm: Whether queries and keys are unit vectors with a learned temperature for each head.
        temperature_factor: Learning rate of the temperatures, as a multiple of the others'.
        steps, batch_size, learning_rate: AdamW with betas 0.9 and 0.95, warm-up over a twentieth, cosine to zero.
        init_seed, data_seed: Seeds of the weights and of the rows.
        intermediate: Width of the MLP.
        position: `"none"`, `"additive"` or `"concatenated"`.
        position_dim: Width of concatenated positions.
        replay: Go through this many batches again and again, as the published runs did.
        equal_layers: Start all layers with the weights of the first, as the published runs did.
    """

    dim: int
    num_points: int
    layers: int
    heads: int
    rank: int
    steps: int
    init_seed: int
    data_seed: int
    task: str = "farthest_neighbor"
    qk_norm: bool = False
    temperature_factor: float = 3.0
    batch_size: int = 256
    learning_rate: float = 0.01
    intermediate: int = 2048
    position: str = "none"
    position_dim: int | None = None
    replay: int | None = None
    equal_layers: bool = False
    held_out_rows: int = 2048


def diverged(loss: float) -> bool:
    return not math.isfinite(loss) or loss > DIVERGED


class StopWhenLost(TrainerCallback):
    """Ends a run whose loss is not finite, or far above that of predicting zero."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if diverged((logs or {}).get("loss", 0.0)):
            control.should_training_stop = True


def train_points(training: PointTraining, work: Path) -> tuple[RankEncoderForPointRegression, dict[str, Any]]:
    """Train, or go on from a checkpoint in `work`; returns the model and what a table has to say of the run."""
    builder = task_builder(training.task, dim=training.dim, num_points=training.num_points, seed=training.data_seed)
    model, steps = initial_model(training), training.steps
    optimizer = point_optimizer(model, training.learning_rate, training.temperature_factor)
    sizes = {"per_device_train_batch_size": training.batch_size, "logging_steps": min(EPOCH, steps)}
    stream = BatchStream(builder, training.batch_size, replay=training.replay)
    how = (model, stream, optimizer, warmup_cosine(optimizer, steps), work, [StopWhenLost()])
    trainer = StreamTrainer(*how, steps=steps, seed=training.init_seed, **sizes)
    losses = trainer.resume()
    row: dict[str, Any] = {
        "status": "diverged",
        "steps_done": trainer.state.global_step,
        "parameters_per_layer": parameter_counts(model).published[0],
        "parameters_live": parameter_counts(model).live,
        **dict.fromkeys(("train_error", "best_train_error", "held_out_error")),
        **baseline_errors(training.task, training.dim, training.num_points),
    }
    if not diverged(losses[-1]):
        error = held_out_error(model, builder, training.held_out_rows)
        if math.isfinite(error):  # the last loss does not show what the last step did to the weights
            found = {"train_error": losses[-1], "best_train_error": min(losses), "held_out_error": error}
            row |= {"status": "finished", **found}
    return model, row


def initial_model(training: PointTraining) -> RankEncoderForPointRegression:
    torch.manual_seed(training.init_seed)
    # a query beside the points is a token too
    length = training.num_points + (training.task != "farthest_neighbor")
    config = RankEncoderConfig(
        input_dim=training.dim,
        num_hidden_layers=training.layers,
        num_attention_heads=training.heads,
        qk_rank=training.rank,
        v_head_dim=training.rank,
        qk_norm=training.qk_norm,
        intermediate_size=training.intermediate,
        position=training.position,  # type: ignore[arg-type]
        position_dim=training.position_dim,
        max_position_embeddings=length,
    )
    model: Any = RankEncoderForPointRegression(config)
    if training.equal_layers:
        first, *others = model.encoder.layers
        for layer in others:
            layer.load_state_dict(first.state_dict())
    return model


@torch.no_grad()
def held_out_error(model: RankEncoderForPointRegression, builder: TaskBuilder, rows: int, batch: int = 256) -> float:
    """The error on rows of the test split, which no stream of train rows holds."""
    parts = in_parts(tensors_of(builder.sample("test", rows)), batch, model.device)
    model.eval()
    return sum(model(**part).loss.item() * len(part["labels"]) for part in parts) / rows


@lru_cache
def baseline_errors(task: str, dim: int, num_points: int) -> Mapping[str, float]:
    """What cannot solve the task reaches on it, as columns of a table; the same for all seeds of a setting."""
    rows = int(np.clip(2**21 // (dim * num_points), 64, 2048))
    found = task_baselines(task_builder(task, dim=dim, num_points=num_points), rows)
    return {f"baseline_{name}": round(metrics["neighbor_error"], 4) for name, metrics in found.items()}
