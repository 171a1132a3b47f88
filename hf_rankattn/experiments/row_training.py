"""Training on a fixed set of rows for some epochs, as the experiments on paths and on the circle do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, get_constant_schedule
from transformers.trainer_utils import get_last_checkpoint

from .training import SAVE_EVERY


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


class Rows(Dataset):
    """Columns of tensors as rows."""

    def __init__(self, columns: Mapping[str, torch.Tensor]):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {name: column[place] for name, column in self.columns.items()}


class RowTrainer(Trainer):
    """Trainer that cuts its batches from columns: collating small rows one by one takes longer than a step on them."""

    def get_train_dataloader(self):
        columns, size = self.train_dataset.columns, self.args.per_device_train_batch_size  # type: ignore[union-attr]
        return Batches(columns, size, self.args.seed if self.args.train_sampling_strategy == "random" else None)


class Batches:
    """The batches of an epoch, in an order drawn for that epoch, or in that of the rows."""

    def __init__(self, columns: Mapping[str, torch.Tensor], size: int, seed: int | None):
        self.columns, self.size, self.seed, self.epoch = columns, size, seed, 0
        self.dataset = Rows(columns)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        order = torch.arange(len(self.dataset))
        if self.seed is not None:
            draw = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
            order = torch.randperm(len(self.dataset), generator=draw)
        for part in order.split(self.size):
            yield {name: column[part] for name, column in self.columns.items()}


def train_rows(
    model: PreTrainedModel, columns: Mapping[str, torch.Tensor], training: RowTraining, work: Path
) -> dict[str, Any]:
    """Train a model where it is, or go on from a checkpoint in `work`; returns what a table has to say of the run."""
    steps = training.epochs * -(-len(next(iter(columns.values()))) // training.batch_size)
    arguments = TrainingArguments(
        output_dir=str(work),
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size,
        train_sampling_strategy="random" if training.shuffle else "sequential",
        logging_steps=max(1, steps // 10),
        save_strategy="steps" if steps > SAVE_EVERY else "no",
        save_steps=SAVE_EVERY,
        save_total_limit=1,
        max_grad_norm=0.0,
        seed=training.seed,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    trainer = RowTrainer(
        model, arguments, train_dataset=Rows(columns), optimizers=(optimizer, get_constant_schedule(optimizer))
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(work)) if work.is_dir() else None)
    model.eval()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": trainer.state.global_step, "train_loss": float(losses[-1])}
