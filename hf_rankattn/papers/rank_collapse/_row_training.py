"""Training on a fixed set of rows for some epochs, as the experiments on paths and on the circle do."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, get_constant_schedule

from ...training.runs import FiniteLosses, check_weights, train_from
from ..rank_benefits._training import SAVE_EVERY, last_whole_checkpoint


@dataclass(frozen=True)
class RowTraining:
    """Adam at a constant rate.

    Args:
        epochs, batch_size, learning_rate, weight_decay: As ever.
        shuffle: Whether rows come in another order each epoch; the published runs see them in one order throughout.
        seed: Of that order and of dropout.
    """

    epochs: int
    learning_rate: float
    seed: int
    batch_size: int = 30
    weight_decay: float = 0.0
    shuffle: bool = True


class EpochStream(IterableDataset):
    """Whole batches cut from columns, epoch after epoch; collating small rows one by one takes longer than a step.

    Any step can be the first, so a run that is resumed skips nothing by drawing it.

    Args:
        columns: Tensors of as many rows each.
        size: Rows of a batch; the last one of an epoch may have fewer.
        seed: Of the order of the rows, another one each epoch; without it, the order is always the same.
        first: Called when iteration begins; returns the number of the first step.
    """

    def __init__(
        self, columns: Mapping[str, torch.Tensor], size: int, seed: int | None, first: Callable[[], int] = lambda: 0
    ):
        self.columns, self.size, self.seed, self.first = columns, size, seed, first

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-self.rows // self.size)

    def order(self, epoch: int) -> torch.Tensor:
        if self.seed is None:
            return torch.arange(self.rows)
        return torch.from_numpy(
            np.random.default_rng(np.random.SeedSequence([self.seed, epoch])).permutation(self.rows)
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch, done = divmod(self.first(), self.steps)
        while True:
            for part in self.order(epoch).split(self.size)[done:]:
                yield {name: column[part] for name, column in self.columns.items()}
            epoch, done = epoch + 1, 0


class RowTrainer(Trainer):
    """Trainer on the batches of an [`EpochStream`]."""

    def get_train_dataloader(self) -> DataLoader:
        stream: Any = self.train_dataset
        return DataLoader(
            EpochStream(stream.columns, stream.size, stream.seed, lambda: self.state.global_step), batch_size=None
        )


def train_rows(
    model: PreTrainedModel, columns: Mapping[str, torch.Tensor], training: RowTraining, work: Path
) -> dict[str, Any]:
    """Train a model where it is, or go on from a checkpoint in `work`; returns what a table has to say of the run."""
    stream = EpochStream(columns, training.batch_size, training.seed if training.shuffle else None)
    steps = training.epochs * stream.steps
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=training.batch_size,
        logging_steps=max(1, steps // 10),
        logging_nan_inf_filter=False,
        save_strategy="steps" if steps > SAVE_EVERY else "no",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        max_grad_norm=0.0,
        seed=training.seed,
        ignore_data_skip=True,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    trainer = RowTrainer(
        model,
        arguments,
        train_dataset=stream,
        callbacks=[FiniteLosses()],
        optimizers=(optimizer, get_constant_schedule(optimizer)),
    )
    trainer.remove_callback(PrinterCallback)
    train_from(trainer, last_whole_checkpoint(work))
    check_weights(model, trainer.state.global_step)
    model.eval()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": trainer.state.global_step, "train_loss": float(losses[-1])}
