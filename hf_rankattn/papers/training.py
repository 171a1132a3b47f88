"""One trainer for all experiments: on streams of whole batches, silent, and resumed from checkpoints in a folder."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, get_constant_schedule
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..training.runs import FiniteLosses, check_checkpoint, check_weights, train_from


Batch = dict[str, torch.Tensor]
SAVE_EVERY = 2000


class StreamTrainer(Trainer):
    """Trainer on a stream of whole batches, whose attribute `first` is a function that returns the number of its first step."""

    def __init__(self, model, stream, optimizer, schedule, work, callbacks, *, steps: int, **arguments):
        quiet: dict[str, Any] = {"disable_tqdm": True, "report_to": "none", "dataloader_pin_memory": False}
        quiet |= {"logging_steps": max(1, steps // 10), "logging_nan_inf_filter": False, "max_grad_norm": 0.0}
        saving = {"save_strategy": "steps" if steps > SAVE_EVERY else "no", "save_steps": SAVE_EVERY}
        # the stream itself starts where a resumed run goes on
        saving |= {"save_total_limit": 1, "ignore_data_skip": True}
        chosen = TrainingArguments(output_dir=str(work), max_steps=steps, **quiet | saving | arguments)
        how: dict[str, Any] = {"callbacks": callbacks, "optimizers": (optimizer, schedule), "train_dataset": stream}
        super().__init__(model, chosen, **how)
        self.remove_callback(PrinterCallback)
        stream.first = lambda: self.state.global_step

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(cast(IterableDataset, self.train_dataset), batch_size=None)

    def resume(self) -> list[float]:
        """Train, or go on from a checkpoint in the folder; returns the losses that were logged."""
        train_from(self, last_whole_checkpoint(Path(cast(str, self.args.output_dir))))
        return [entry["loss"] for entry in self.state.log_history if "loss" in entry]


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


def train_rows(
    model: PreTrainedModel, columns: Mapping[str, torch.Tensor], training: RowTraining, work: Path
) -> dict[str, Any]:
    """Train a model in place, or resume from a checkpoint in `work`; returns the columns that describe the run."""
    stream = EpochStream(columns, training.batch_size, training.seed if training.shuffle else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    sizes = {"steps": training.epochs * stream.steps, "per_device_train_batch_size": training.batch_size}
    schedule = get_constant_schedule(optimizer)
    trainer = StreamTrainer(model, stream, optimizer, schedule, work, [FiniteLosses()], **sizes, seed=training.seed)
    losses = trainer.resume()
    check_weights(model, trainer.state.global_step)
    model.eval()
    return {"steps": trainer.state.global_step, "train_loss": float(losses[-1])}


def tensors_of(arrays: Mapping[str, np.ndarray]) -> Batch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def in_parts(rows: Mapping[str, torch.Tensor], size: int, device: torch.device) -> Iterator[Batch]:
    """Rows in batches of at most `size`."""
    for parts in zip(*(column.split(size) for column in rows.values()), strict=True):
        yield {name: part.to(device) for name, part in zip(rows, parts, strict=True)}
