"""Preparing and streaming `farthest_neighbor` at d 64, N 16: against one example at a time, and against drawing normals."""

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.timing import Row, at_least, at_most, median_ratio, timed
from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression, load_task
from hf_rankattn.tasks import task_builder


DIM, COUNT, BATCH = 64, 16, 256
PREPARED, STREAMED = 10_000, 16 * BATCH  # the rows that a train split has if nothing is said


def one_example(rng: np.random.Generator) -> dict[str, np.ndarray]:
    points = rng.standard_normal((COUNT, DIM), dtype=np.float32)
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    return {"points": points, "labels": points[(points @ points.T).argmin(-1)]}


class OneByOne(datasets.GeneratorBasedBuilder):
    """The usual way to write a builder, with the features of ours."""

    def _info(self):
        return datasets.DatasetInfo(features=task_builder("farthest_neighbor").info.features)

    def _split_generators(self, dl_manager):
        return [datasets.SplitGenerator(name="train", gen_kwargs={"rows": PREPARED})]

    def _generate_examples(self, rows):
        rng = np.random.default_rng(0)
        for row in range(rows):
            yield row, one_example(rng)


class OneByOneStream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        while True:
            yield one_example(rng)


def generate_examples(shards: list[int]) -> Iterator[dict[str, np.ndarray]]:
    for shard in shards:
        rng = np.random.default_rng(shard)
        while True:
            yield one_example(rng)


def prepare(make: Callable[[str], Any]) -> Callable[[], None]:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            make(folder).download_and_prepare()

    return run


def ours(folder: str) -> Any:
    return task_builder("farthest_neighbor", cache_dir=folder, num_examples=PREPARED, num_eval_examples=1)


def read(stream: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in islice(DataLoader(stream, batch_size=BATCH), STREAMED // BATCH):
            pass

    return run


def draw_normals() -> None:
    """The limit: nothing but the normals of as many rows, into memory that is there already."""
    rng = np.random.Generator(np.random.SFC64(0))
    block = np.empty((BATCH, COUNT, DIM), dtype=np.float32)
    for _ in range(STREAMED // BATCH):
        rng.standard_normal(dtype=np.float32, out=block)


def training_step() -> Callable[[], None]:
    """The smallest of the papers' models: one layer, one head, an MLP of 2048."""
    model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=DIM))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stream = load_task("farthest_neighbor", "train", streaming=True)
    batch = next(iter(DataLoader(stream, batch_size=BATCH)))

    def run() -> None:
        for _ in range(STREAMED // BATCH):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

    return run


def rate(seconds: list[float], rows: int) -> str:
    return f"{rows / min(seconds) / 1e3:.1f}k rows/s"


def run(repeats: int) -> Iterator[Row]:
    torch.manual_seed(0)
    datasets.disable_progress_bars()
    times = timed({"ours": prepare(ours), "one by one": prepare(OneByOne)}, repeats)
    # normals, products and bytes that have to be written are three quarters of ours: 5 is what is left if all else is free
    note = f"{rate(times['ours'], PREPARED)} against {rate(times['one by one'], PREPARED)}; drawing normals is half of ours"
    ratio = median_ratio(times, "one by one", "ours")
    yield at_least("farthest neighbour, preparation, speed", "a builder of single examples", ratio, 5.0, note)
    stream = load_task("farthest_neighbor", "train", streaming=True)
    generated = datasets.IterableDataset.from_generator(
        generate_examples, features=stream.features, gen_kwargs={"shards": [0, 1]}
    )
    runs = {
        "ours": read(stream),
        "datasets": read(generated.with_format("torch")),
        "bare": read(OneByOneStream()),
        "normals": draw_normals,
        "step": training_step(),
    }
    times = timed(runs, repeats)
    what = "farthest neighbour, stream to DataLoader, speed"
    for name, against in (
        ("datasets", "IterableDataset.from_generator of single examples"),
        ("bare", "a torch IterableDataset of single examples, without state"),
    ):
        # a row cannot be had for less than its normals, so this is the most that any stream could reach
        limit = median_ratio(times, name, "normals")
        note = f"{rate(times['ours'], STREAMED)} against {rate(times[name], STREAMED)}; normals alone: {limit:.1f}"
        yield at_least(what, against, median_ratio(times, name, "ours"), 4.0, note)
    normals = STREAMED * COUNT * DIM / min(times["normals"]) / 1e6
    note = f"the limit: {normals:.0f} million normals/s, {rate(times['normals'], STREAMED)}"
    ratio = median_ratio(times, "ours", "step")
    yield at_most(
        "farthest neighbour, stream to DataLoader, time", "a training step, d 64, 1 layer", ratio, 0.05, note
    )
