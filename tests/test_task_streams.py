"""The endless stream: it never repeats a row, resumes anywhere, and splits by node and worker without duplicates."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from datasets import IterableDataset, IterableDatasetDict
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from hf_rankattn import load_task
from hf_rankattn.tasks import task_builder


PARAMETERS = {"dim": 64, "num_points": 16, "num_examples": 300, "num_eval_examples": 20}  # blocks of 256 rows


def stream(**more) -> IterableDataset:
    return load_task("farthest_neighbor", "train", streaming=True, **(PARAMETERS | more))


def keys(rows) -> list[bytes]:
    return [np.asarray(row["points"]).tobytes() for row in rows]


def first(count: int, data) -> list[bytes]:
    return keys(itertools.islice(data, count))


class TestFresh:
    def test_it_begins_with_the_train_split_and_never_repeats(self):
        rows = first(1500, stream())
        train = task_builder("farthest_neighbor", **PARAMETERS).sample("train", 300)
        assert rows[:300] == [row.tobytes() for row in train["points"]]
        assert len(set(rows)) == 1500

    def test_epochs_and_shuffles_share_nothing_and_come_back(self):
        data = stream()
        passes = []
        for epoch in (0, 1, 2, 0, 1):
            data.set_epoch(epoch)
            passes.append(first(300, data))
        assert passes[0] == passes[3] and passes[1] == passes[4]
        shuffled = first(300, stream().shuffle(seed=7, buffer_size=50))
        assert shuffled == first(300, stream().shuffle(seed=7, buffer_size=50))
        assert len({*passes[0], *passes[1], *passes[2], *shuffled}) == 1200


class TestResume:
    @pytest.mark.parametrize("count", [0, 255, 256, 700])
    def test_in_the_middle(self, count):
        data = stream()
        rows = iter(data)
        for _ in range(count):
            next(rows)
        state = json.loads(json.dumps(data.state_dict()))
        would_have_come = first(300, rows)
        resumed = stream()
        resumed.load_state_dict(state)
        assert first(300, resumed) == would_have_come

    def test_in_a_later_epoch_and_on_one_of_three_nodes(self):
        def part():
            data = split_dataset_by_node(stream(), rank=1, world_size=3)
            data.set_epoch(4)
            return data

        data = part()
        rows = iter(data)
        first(400, rows)
        state = data.state_dict()
        resumed = part()
        resumed.load_state_dict(state)
        assert first(200, resumed) == first(200, rows)

    def test_far_away_at_once(self):
        """The position in the stream is a number: nothing before it is drawn."""
        data = stream()
        next(iter(data))
        state = data.state_dict()
        state["examples_iterable"]["row"] = 256 * 10**12 + 3
        data.load_state_dict(state)
        block = task_builder("farthest_neighbor", **PARAMETERS).block("train", 10**12)
        assert first(1, data) == [block["points"][3].tobytes()]


class TestSplitting:
    @pytest.mark.parametrize("world_size", [2, 7, 11])
    def test_nodes_share_nothing_and_leave_nothing_out(self, world_size):
        nodes = [split_dataset_by_node(stream(dim=4, num_points=2), rank, world_size) for rank in range(world_size)]
        size = task_builder("farthest_neighbor", dim=4, num_points=2).block_rows
        taken = -(-2 * size // world_size)
        # whole blocks go round where the nodes divide the shards; with 11 nodes, rows do
        count = size if world_size != 11 else taken
        parts = [first(count, node) for node in nodes]
        rows = list(itertools.chain.from_iterable(parts))
        assert len(set(rows)) == len(rows)
        assert set(first(min(2 * size, len(rows)), stream(dim=4, num_points=2))) <= set(rows)

    @pytest.mark.parametrize("nodes, workers", [(1, 1), (1, 2), (2, 2)])
    def test_workers_share_nothing_and_leave_nothing_out(self, nodes, workers):
        rows = []
        for rank in range(nodes):
            data = split_dataset_by_node(stream(), rank, nodes) if nodes > 1 else stream()
            batches = list(itertools.islice(DataLoader(data, batch_size=64, num_workers=workers), 4 * workers))
            assert batches[0]["points"].shape == batches[0]["labels"].shape == (64, 16, 64)
            rows += [row.numpy().tobytes() for batch in batches for row in batch["points"]]
        assert Counter(rows) == Counter(first(256 * nodes * workers, stream()))


class TestAsADataset:
    def test_without_a_split_all_three_come_and_only_train_is_endless(self):
        data = load_task("farthest_neighbor", streaming=True, **PARAMETERS)
        assert isinstance(data, IterableDatasetDict) and list(data) == ["train", "validation", "test"]
        assert len(list(data["validation"])) == len(list(data["test"])) == 20
        assert len(first(301, data["train"])) == 301

    @pytest.mark.parametrize("name, rows", [("memorization", None), ("circle", 500)])
    def test_what_has_no_further_rows_ends(self, name, rows):
        size = rows or task_builder(name).config.num_examples
        assert len(list(load_task(name, "train", streaming=True))) == size

    def test_a_split_that_does_not_exist(self):
        for streaming in (False, True):
            with pytest.raises(ValueError, match="train.*validation.*test"):
                load_task("sorting", "dev", streaming=streaming)

    def test_the_operations_of_datasets(self):
        data = stream()
        assert data.column_names == ["points", "labels"] and data.features["points"].shape == (16, 64)
        assert len(list(data.take(7))) == 7
        assert keys(data.skip(2).take(3)) == first(5, data)[2:]
        total = data.map(lambda row: {"total": row["points"].sum()}, remove_columns=["labels"])
        row = next(iter(total))
        assert set(row) == {"points", "total"} and row["total"] == row["points"].sum()
        batch = next(data.with_format("numpy").iter(batch_size=5))
        assert batch["points"].shape == (5, 16, 64)

    @pytest.mark.slow
    def test_workers_started_afresh(self):
        """Where processes are spawned, as on a Mac, the stream is pickled."""
        loader = DataLoader(stream(), batch_size=64, num_workers=1, multiprocessing_context="spawn")
        batch = next(iter(loader))
        assert [row.numpy().tobytes() for row in batch["points"]] == first(64, stream())
