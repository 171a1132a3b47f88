"""Endless streams of rows: one row at a time as a `datasets` stream, or in whole batches."""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from itertools import count
from typing import Any

import datasets
import numpy as np
import torch
from datasets.iterable_dataset import _BaseExamplesIterable

from ._building import TaskBuilder


# The number of parts that the stream can be split into: a multiple of the usual counts of nodes and workers. datasets gives
# whole shards to nodes only for such a multiple; otherwise each node draws all rows and drops those of the others.
STREAM_SHARDS = 2**10 * 3**2 * 5 * 7


class FreshExamples(_BaseExamplesIterable):
    """Blocks `first`, `first + step`, `first + 2 step`, ... of a split, without end, row by row as tensors.

    Splitting by node or by worker widens the step, so no row is drawn twice, and the position in the stream is one number.
    """

    def __init__(self, builder: TaskBuilder, split: str):
        super().__init__()
        self.builder = builder
        self.split = split
        self.first, self.step = 0, 1
        self.keys: tuple[int, ...] = ()
        self._sleep_on_threads_shutdown = False  # datasets reads it when streams are interleaved

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        # datasets' own row-by-row iteration over tables costs more than drawing, so tensors are cut from the block
        state: dict[str, Any] = self._state_dict or self._init_state_dict()
        size = self.builder.block_rows
        while True:
            turn, done = divmod(state["row"], size)
            number = self.first + turn * self.step
            block = self.builder.block(self.split, number, keys=self.keys)
            columns = (torch.from_numpy(array)[done:].unbind() for array in block.values())
            for key, row in enumerate(zip(*columns, strict=True), start=number * size + done):
                state["row"] += 1
                yield key, dict(zip(block, row, strict=True))

    def _init_state_dict(self) -> dict:
        self._state_dict = {"row": 0, "type": type(self).__name__}
        return self._state_dict

    @property
    def is_typed(self) -> bool:
        return True

    @property
    def features(self) -> datasets.Features:
        return self.builder.info.features

    @property
    def num_shards(self) -> int:
        return max(1, STREAM_SHARDS // self.step)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "FreshExamples":
        part = copy(self)
        part.first, part.step = self.first + index * self.step, self.step * num_shards
        return part

    def shuffle_data_sources(self, generator: np.random.Generator) -> "FreshExamples":
        """Another stream, chosen by the generator: `set_epoch(n)` and `shuffle(seed)` of datasets call this."""
        other = copy(self)
        other.keys = (*self.keys, *(int(word) for word in deepcopy(generator).integers(2**32, size=2)))
        return other

    def reshard_data_sources(self) -> "FreshExamples":
        return self


def fresh_stream(builder: TaskBuilder, split: str) -> datasets.IterableDataset:
    """The rows of a split, followed by new ones without end."""
    return datasets.IterableDataset(FreshExamples(builder, split), info=builder.info, split=datasets.NamedSplit(split))


class BatchStream(torch.utils.data.IterableDataset):
    """The rows of the endless train split in whole batches, cut from its blocks, for a `DataLoader(..., batch_size=None)`.

    Collating single rows costs as much time as a step of a small model. Batch b holds the rows from b * batch_size on, and
    each process takes its own part of it, so several processes train on the same batches as one. Iteration can start at any
    batch without drawing those before it.

    Args:
        builder ([`TaskBuilder`]): The task.
        batch_size (`int`): Rows of a batch, of all processes together.
        first (`Callable`, *optional*): Called when iteration begins; returns the number of the first batch.
        replay (`int`, *optional*): Start again at the first batch after this many; without it, no row is repeated.
        process, processes (`int`, *optional*): The number of this process, and of all processes.
    """

    def __init__(
        self,
        builder: TaskBuilder,
        batch_size: int,
        *,
        first: Callable[[], int] = lambda: 0,
        replay: int | None = None,
        process: int = 0,
        processes: int = 1,
    ):
        if batch_size < 1 or batch_size % processes:
            raise ValueError(f"`batch_size`={batch_size} is not a positive multiple of the {processes} processes.")
        if not builder.endless:
            raise ValueError(f"{builder.task_name()} has no endless train split: load it with load_task instead.")
        self.builder, self.batch_size, self.first, self.replay = builder, batch_size, first, replay
        part = batch_size // processes
        self.part = slice(process * part, (process + 1) * part)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size, number, block = self.builder.block_rows, -1, {}
        for batch in count(self.first()):
            start = (batch if self.replay is None else batch % self.replay) * self.batch_size
            row, stop, pieces = start + self.part.start, start + self.part.stop, []
            while row < stop:
                if row // size != number:
                    number = row // size
                    arrays = self.builder.block("train", number)
                    block = {name: torch.from_numpy(array) for name, array in arrays.items()}
                end = min(stop, (number + 1) * size)
                pieces.append({name: column[row % size :][: end - row] for name, column in block.items()})
                row = end
            yield {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def start_at(stream: datasets.IterableDataset, row: int) -> datasets.IterableDataset:
    """Move an endless stream to one of its rows without drawing the rows before it.

    >>> from hf_rankattn import load_task
    >>> stream = load_task("farthest_neighbor", "train", streaming=True, dim=4, num_points=3)
    >>> further = start_at(load_task("farthest_neighbor", "train", streaming=True, dim=4, num_points=3), row=2)
    >>> torch.equal(list(stream.take(3))[2]["points"], next(iter(further))["points"])
    True
    """
    state = stream.state_dict()
    if state["examples_iterable"].get("type") != FreshExamples.__name__:
        raise ValueError("only an endless stream, load_task(..., 'train', streaming=True), can start at any row.")
    state["examples_iterable"]["row"] = row
    stream.load_state_dict(state)
    return stream
