"""Caches that are never shared, stale or half written, and rows that do not depend on the process that draws them."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hf_rankattn import load_task, tasks
from hf_rankattn.tasks import TASKS, TaskBuilder, _building, task_builder
from hf_rankattn.tasks.farthest_neighbor import FarthestNeighbor


TINY = {"dim": 4, "num_points": 3, "num_examples": 5, "num_eval_examples": 5}


def arrays(data, column="points") -> np.ndarray:
    return np.stack([np.asarray(row[column]) for row in data])


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


class TestSameRows:
    def test_whatever_the_number_of_processes(self, tmp_path):
        sizes = {"num_examples": 1100, "num_eval_examples": 300}  # five blocks and two
        builder = task_builder("farthest_neighbor", **sizes)
        expected = {split: builder.sample(split, rows) for split, rows in builder.split_sizes().items()}
        for num_proc in (1, 3):
            prepared = load_task("farthest_neighbor", cache_dir=tmp_path / str(num_proc), num_proc=num_proc, **sizes)
            for split, columns in expected.items():
                assert len(columns["points"]) > builder.block_rows
                for column, array in columns.items():
                    np.testing.assert_array_equal(prepared[split][column][:].numpy(), array)

    @pytest.mark.parametrize("name", TASKS)
    def test_of_every_task_also_in_streaming(self, name, cache):
        small = {"memorization": {"max_length": 4}, "circle": {}}.get(name, {"num_examples": 5000})
        small |= {"num_points": 3} if name == "farthest_neighbor" else {}
        data = load_task(name, cache_dir=cache, num_eval_examples=40, **small)
        streams = load_task(name, streaming=True, num_eval_examples=40, **small)
        for split in data:
            rows = len(data[split])
            streamed = list(streams[split].take(rows))
            assert len(streamed) == rows and data[split].features == streams[split].features
            for column in data[split].column_names:
                np.testing.assert_array_equal(data[split][column][:].numpy(), arrays(streamed, column))


class Nearest(FarthestNeighbor):
    """A second builder in this module, with the configs of the first."""

    def draw(self, rng, rows, *, split, first):
        drawn = super().draw(rng, rows, split=split, first=first)
        return {"points": drawn["points"], "labels": drawn["points"]}


class Renamed(FarthestNeighbor):
    """A third one, which differs in nothing but its name."""


MODULE = """
import os, time
from pathlib import Path
import numpy as np
from hf_rankattn.tasks.farthest_neighbor import FarthestNeighbor
from helper_of_mine import shift

class Mine(FarthestNeighbor):
    def draw(self, rng, rows, *, split, first):
        if "SLOW" in os.environ and first >= 512:
            Path(os.environ["SLOW"]).touch()
            time.sleep(60)
        points = shift(rng.standard_normal((rows, self.config.num_points, self.config.dim), dtype=np.float32))
        return {"points": points, "labels": points}
"""
HELPER = "def shift(points):\n    return points + SHIFT\n"


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with a task of the user, which imports from a second file."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "helper_of_mine.py").write_text(HELPER.replace("SHIFT", "3"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def imported_again() -> type[TaskBuilder]:
    for name in ("mine", "helper_of_mine"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module("mine").Mine


class TestCacheKeys:
    def test_builders_with_equal_configs_never_share(self, cache):
        builders = [builder(cache, **TINY) for builder in (FarthestNeighbor, Nearest, Renamed)]
        # not even with one name
        builders += [builder(cache, dataset_name="mine", **TINY) for builder in (FarthestNeighbor, Nearest)]
        assert len({builder.cache_dir for builder in builders}) == 5
        for builder in builders:
            builder.download_and_prepare()
            (stored,) = builder.as_dataset("test").with_format("numpy").iter(5)
            np.testing.assert_array_equal(stored["labels"], builder.sample("test", 5)["labels"])

    def test_every_parameter_has_a_cache_of_its_own(self, cache):
        base = {"dim": 16, "num_points": 4, "num_examples": 50, "num_eval_examples": 5, "seed": 0, "cache_dir": cache}
        changes = ({}, {"dim": 17}, {"num_points": 5}, {"num_examples": 51}, {"seed": 1})
        folders = {task_builder("farthest_neighbor", **(base | change)).cache_dir for change in changes}
        assert len(folders) == len(changes)
        other_words = task_builder("farthest_neighbor", "d16_n16", **(base | {"dim": np.int64(16)}))
        assert other_words.cache_dir in folders

    def test_an_edited_generator_never_returns_stale_rows(self, project, cache):
        def mean(builder_class) -> int:
            builder = builder_class(cache, num_examples=200, num_eval_examples=5)
            builder.download_and_prepare()
            return round(float(builder.as_dataset("train").with_format("numpy")["points"][:].mean()))

        first = imported_again()
        # an edit after the import: the rows, and their cache key, are those of the old code
        (project / "helper_of_mine.py").write_text(HELPER.replace("SHIFT", "5"))
        assert mean(first) == 3
        assert mean(imported_again()) == 5
        (project / "helper_of_mine.py").write_text(HELPER.replace("SHIFT", "3"))
        assert imported_again().source_hash == first.source_hash

    def test_every_file_of_the_tasks_counts(self, tmp_path):
        folder = shutil.copytree(Path(tasks.__file__).parent, tmp_path / "tasks")
        hashes = [_building.folder_hash(folder)]
        for path in sorted(folder.glob("*.py")):
            path.write_text(path.read_text() + "# edited\n")
            hashes.append(_building.folder_hash(folder))
        assert len(set(hashes)) == len(hashes) > len(TASKS)

    def test_a_task_without_a_file_is_refused(self):
        with pytest.raises(ValueError, match="the task Typed must be defined in a file"):
            exec("class Typed(TaskBuilder): pass", {"TaskBuilder": TaskBuilder, "__name__": "nowhere"})


RUN = """
import sys
import datasets
datasets.disable_progress_bars()
from hf_rankattn.tasks import TASKS, task_builder
import mine
builder = mine.Mine(sys.argv[1], num_examples=1100, num_eval_examples=5)
builder.download_and_prepare(num_proc=int(sys.argv[2]))
data = builder.as_dataset("train").with_format("numpy")
print(float(data["points"][:].astype("float64").sum()), *(task_builder(name).hash for name in TASKS))
"""


def start(project: Path, num_proc: int = 1, **env: str) -> subprocess.Popen:
    path = os.pathsep.join([str(project), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env}
    command = [sys.executable, "-c", RUN, str(project / "cache"), str(num_proc)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_killed_preparation_is_started_again_and_hashes_are_equal_in_every_process(project):
    reached = project / "reached"
    victim = start(project, num_proc=2, SLOW=str(reached))
    try:
        deadline = time.monotonic() + 200
        while not reached.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert reached.exists() and victim.poll() is None
    finally:
        os.killpg(victim.pid, signal.SIGKILL)
        victim.communicate()
    (half,) = (project / "cache").rglob("*.incomplete")
    assert list(half.iterdir()) and not list((project / "cache").rglob("dataset_info.json"))
    # this process and another one find the incomplete folder
    other = start(project, PYTHONHASHSEED="1")
    builder = imported_again()(project / "cache", num_examples=1100, num_eval_examples=5)
    builder.download_and_prepare()
    total, *hashes = other.communicate(timeout=240)[0].split()
    points = builder.as_dataset("train").with_format("numpy")["points"][:]
    np.testing.assert_array_equal(points, builder.sample("train", 1100)["points"])
    assert float(total) == points.astype("float64").sum()
    assert hashes == [task_builder(name).hash for name in TASKS] and len(set(hashes)) == len(TASKS)
    assert not list((project / "cache").rglob("*.incomplete"))
    (info,) = (project / "cache").rglob("dataset_info.json")
    assert sorted(path.suffix for path in info.parent.iterdir()) == [".arrow", ".arrow", ".arrow", ".json"]


def test_a_failed_preparation_leaves_nothing(cache, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("hf_rankattn.tasks.farthest_neighbor.take_points", fail)
    with pytest.raises(Exception, match="generating the dataset") as caught:
        load_task("farthest_neighbor", cache_dir=cache, num_examples=5)
    assert "disk full" in str(caught.value.__cause__)
    assert not list(cache.rglob("*.arrow"))
