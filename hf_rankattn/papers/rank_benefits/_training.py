"""Training of the papers' encoder on points, with Trainer, to one row of a table."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ...models import RankEncoderConfig, RankEncoderForPointRegression, parameter_counts
from ...tasks import BatchStream, TaskBuilder, task_baselines, task_builder
from ...training.optimizers import point_optimizer, warmup_cosine
from ...training.runs import check_checkpoint, train_from


EPOCH = 100  # steps; the published runs count and report by these
SAVE_EVERY = 2000
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


class PointTrainer(Trainer):
    """Trainer on whole batches from [`BatchStream`], which has nothing to skip when a run is resumed."""

    def __init__(self, model, arguments: TrainingArguments, builder: TaskBuilder, training: PointTraining, **kwargs):
        self.builder, self.training = builder, training
        super().__init__(model, arguments, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        stream = BatchStream(
            self.builder,
            self.training.batch_size,
            first=lambda: self.state.global_step,
            replay=self.training.replay,
            process=self.args.process_index,
            processes=self.args.world_size,
        )
        return DataLoader(stream, batch_size=None)


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
    model = initial_model(training)
    optimizer = point_optimizer(model, training.learning_rate, training.temperature_factor)
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        logging_steps=min(EPOCH, training.steps),
        logging_nan_inf_filter=False,
        save_strategy="steps" if training.steps > SAVE_EVERY else "no",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        max_grad_norm=0.0,
        seed=training.init_seed,
        ignore_data_skip=True,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
    )
    trainer = PointTrainer(
        model, arguments, builder, training, callbacks=[StopWhenLost()],
        optimizers=(optimizer, warmup_cosine(optimizer, training.steps)),
        train_dataset=BatchStream(builder, training.batch_size),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    train_from(trainer, last_whole_checkpoint(work))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    row: dict[str, Any] = {
        "status": "diverged",
        "steps_done": trainer.state.global_step,
        "parameters_per_layer": parameter_counts(model).published[0],
        "parameters_live": parameter_counts(model).live,
        "train_error": None,
        "best_train_error": None,
        "held_out_error": None,
        **baseline_errors(training.task, training.dim, training.num_points),
    }
    if not diverged(losses[-1]):
        error = held_out_error(model, builder, training.held_out_rows)
        if math.isfinite(error):  # the last loss does not show what the last step did to the weights
            found = {"train_error": losses[-1], "best_train_error": min(losses), "held_out_error": error}
            row |= {"status": "finished", **found}
    return model, row


def last_whole_checkpoint(work: Path) -> Path | None:
    """The last whole checkpoint of an interrupted run. Those that were not written to the end are deleted."""
    while work.is_dir() and (found := get_last_checkpoint(str(work))):
        try:
            check_checkpoint(Path(found))
            if (Path(found) / TRAINER_STATE_NAME).is_file():  # Trainer writes this file after all the others
                return Path(found)
        except ValueError:
            pass
        shutil.rmtree(found)
    return None


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
    arrays = {name: torch.from_numpy(array) for name, array in builder.sample("test", rows).items()}
    model.eval()
    errors = []
    for start in range(0, rows, batch):
        part = {name: array[start : start + batch].to(model.device) for name, array in arrays.items()}
        errors.append(model(**part).loss.item() * len(part["labels"]))
    return sum(errors) / rows


@lru_cache
def baseline_errors(task: str, dim: int, num_points: int) -> Mapping[str, float]:
    """What cannot solve the task reaches on it, as columns of a table; the same for all seeds of a setting."""
    rows = int(np.clip(2**21 // (dim * num_points), 64, 2048))
    found = task_baselines(task_builder(task, dim=dim, num_points=num_points), rows)
    return {f"baseline_{name}": round(metrics["neighbor_error"], 4) for name, metrics in found.items()}
