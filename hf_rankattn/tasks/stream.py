"""The endless stream: a train split that goes on."""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from itertools import count
from typing import Any

import datasets
import numpy as np
import torch
from datasets.iterable_dataset import _BaseExamplesIterable

from .building import TaskBuilder


# Into this many parts the stream can be split: a number that the usual counts of nodes and workers divide, as datasets
# hands whole shards to nodes only then, and otherwise lets each node draw all rows and drop those of the others.
STREAM_SHARDS = 2**10 * 3**2 * 5 * 7


class FreshExamples(_BaseExamplesIterable):
    """Blocks `first`, `first + step`, `first + 2 step`, ... of a split, without end, row by row as tensors.

    Splitting by node or by worker widens the step, so nobody draws what another one yields, and the place in the stream is
    one number.
    """

    def __init__(self, builder: TaskBuilder, split: str):
        super().__init__()
        self.builder = builder
        self.split = split
        self.first, self.step = 0, 1
        self.keys: tuple[int, ...] = ()
        self._sleep_on_threads_shutdown = False  # datasets asks for it where streams are interleaved

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        # iterating over datasets' own tables row by row costs more than drawing: tensors are cut from the block instead
        state: dict[str, Any] = self._state_dict or self._init_state_dict()
        size = self.builder.block_rows
        while True:
            turn, done = divmod(state["row"], size)
            number = self.first + turn * self.step
            block = self.builder.block(self.split, number, keys=self.keys)
            names = list(block)
            columns = (torch.from_numpy(array)[done:].unbind() for array in block.values())
            for key, row in enumerate(zip(*columns, strict=True), start=number * size + done):
                state["row"] += 1
                yield key, dict(zip(names, row, strict=True))

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
        """Another stream, chosen by the generator: `set_epoch(n)` and `shuffle(seed)` of datasets come here."""
        other = copy(self)
        other.keys = (*self.keys, *(int(word) for word in deepcopy(generator).integers(2**32, size=2)))
        return other

    def reshard_data_sources(self) -> "FreshExamples":
        return self


def fresh_stream(builder: TaskBuilder, split: str) -> datasets.IterableDataset:
    """The rows of a split, and then fresh ones for ever."""
    return datasets.IterableDataset(FreshExamples(builder, split), info=builder.info, split=datasets.NamedSplit(split))


class BatchStream(torch.utils.data.IterableDataset):
    """The rows of the endless train split as whole batches, cut from its blocks, for a `DataLoader(..., batch_size=None)`.

    Collating rows one by one costs as much as a step of a small model. Batch b holds rows b * batch_size and on, of which
    each process takes its own part, so that a number of processes trains on the batches of one. Any batch can be the first:
    a resumed run skips nothing by drawing it.

    Args:
        builder ([`TaskBuilder`]): The task.
        batch_size (`int`): Rows of a batch, of all processes together.
        first (`Callable`, *optional*): Called when iteration begins; returns the number of the first batch.
        replay (`int`, *optional*): Come back to the first batch after so many, for ever; without it, no row is seen twice.
        process, processes (`int`, *optional*): Which of how many processes this is.
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
                    block = {
                        name: torch.from_numpy(array) for name, array in self.builder.block("train", number).items()
                    }
                upto = min(stop, (number + 1) * size)
                pieces.append(
                    {name: column[row - number * size : upto - number * size] for name, column in block.items()}
                )
                row = upto
            yield {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def start_at(stream: datasets.IterableDataset, row: int) -> datasets.IterableDataset:
    """Let an endless stream go on at one of its rows, at once: nothing before it is drawn.

    >>> from hf_rankattn import load_task
    >>> stream = load_task("farthest_neighbor", "train", streaming=True, dim=4, num_points=3)
    >>> further = start_at(load_task("farthest_neighbor", "train", streaming=True, dim=4, num_points=3), row=2)
    >>> torch.equal(list(stream.take(3))[2]["points"], next(iter(further))["points"])
    True
    """
    state = stream.state_dict()
    if state["examples_iterable"].get("type") != FreshExamples.__name__:
        raise ValueError(
            "only an endless stream, as load_task(..., 'train', streaming=True) gives it, starts at any row."
        )
    state["examples_iterable"]["row"] = row
    stream.load_state_dict(state)
    return stream
