"""Training on streams of whole batches, as the experiments on paths, on the circle and on head dimensions do."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, get_constant_schedule

from ...training.runs import FiniteLosses, check_weights, train_from
from ..rank_benefits._training import SAVE_EVERY, last_whole_checkpoint


Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RowTraining:
    """Adam at a constant rate on a fixed set of rows. The published runs do not shuffle the rows.

    `seed` is the seed of the order of the rows and of dropout.
    """

    epochs: int
    learning_rate: float
    seed: int
    batch_size: int = 30
    weight_decay: float = 0.0
    shuffle: bool = True


class EpochStream(IterableDataset):
    """Whole batches of `size` rows, epoch after epoch; collating small rows one by one takes longer than a step.

    The order of the rows depends on the seed and the epoch; without a seed it is always the same. `first` returns the
    number of the first step when iteration begins, so a resumed run does not draw the batches before it.
    """

    def __init__(
        self, columns: Mapping[str, torch.Tensor], size: int, seed: int | None, first: Callable[[], int] = lambda: 0
    ):
        self.columns, self.size, self.seed, self.first = columns, size, seed, first
        self.rows = len(next(iter(columns.values())))
        self.steps = -(-self.rows // size)  # of an epoch

    def order(self, epoch: int) -> torch.Tensor:
        if self.seed is None:
            return torch.arange(self.rows)
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, epoch]))
        return torch.from_numpy(rng.permutation(self.rows))

    def __iter__(self) -> Iterator[Batch]:
        epoch, done = divmod(self.first(), self.steps)
        while True:
            for part in self.order(epoch).split(self.size)[done:]:
                yield {name: column[part] for name, column in self.columns.items()}
            epoch, done = epoch + 1, 0


class StreamTrainer(Trainer):
    """Trainer on a stream of whole batches, which prints nothing and stops at a loss that is not finite."""

    def __init__(self, model, stream: IterableDataset, optimizer, schedule, work, callbacks=(), **arguments):
        steps = arguments["max_steps"]
        quiet: dict[str, Any] = {"disable_tqdm": True, "report_to": "none", "dataloader_pin_memory": False}
        quiet |= {"logging_steps": max(1, steps // 10), "logging_nan_inf_filter": False, "max_grad_norm": 0.0}
        super().__init__(
            model,
            TrainingArguments(output_dir=str(work), **quiet, **arguments),
            train_dataset=stream,
            callbacks=[FiniteLosses(), *callbacks],
            optimizers=(optimizer, schedule),
        )
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(cast(IterableDataset, self.train_dataset), batch_size=None)

    def last_loss(self) -> float:
        return [entry["loss"] for entry in self.state.log_history if "loss" in entry][-1]


def train_rows(
    model: PreTrainedModel, columns: Mapping[str, torch.Tensor], training: RowTraining, work: Path
) -> dict[str, Any]:
    """Train a model in place, or resume from a checkpoint in `work`; returns the columns that describe the run."""
    stream = EpochStream(columns, training.batch_size, training.seed if training.shuffle else None)
    steps = training.epochs * stream.steps
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    trainer = StreamTrainer(
        model,
        stream,
        optimizer,
        get_constant_schedule(optimizer),
        work,
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        seed=training.seed,
        save_strategy="steps" if steps > SAVE_EVERY else "no",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        ignore_data_skip=True,
    )
    stream.first = lambda: trainer.state.global_step
    train_from(trainer, last_whole_checkpoint(work))
    check_weights(model, trainer.state.global_step)
    model.eval()
    return {"steps": trainer.state.global_step, "train_loss": float(trainer.last_loss())}
