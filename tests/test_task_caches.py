"""Caches that are never shared, stale or half written, and rows that do not depend on who draws them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import DownloadMode

from hf_rankattn import load_task
from hf_rankattn.tasks import TASKS, sampling, task_builder
from hf_rankattn.tasks.farthest_neighbor import FarthestNeighbor


SMALL = {"num_examples": 1100, "num_eval_examples": 300}  # five blocks and two of d64_n16


def arrays(data, column="points") -> np.ndarray:
    return np.stack([np.asarray(row[column]) for row in data])


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


class TestSameRows:
    @pytest.mark.parametrize("split", ["train", "validation", "test"])
    def test_whatever_the_number_of_processes_and_in_streaming(self, split, tmp_path):
        builder = task_builder("farthest_neighbor", **SMALL)
        expected = builder.sample(split, builder.split_sizes()[split])
        assert len(expected["points"]) > builder.block_rows
        for num_proc in (1, 2, 4):
            prepared = load_task(
                "farthest_neighbor", split, cache_dir=tmp_path / str(num_proc), num_proc=num_proc, **SMALL
            )
            for column in ("points", "labels"):
                np.testing.assert_array_equal(prepared[column][:].numpy(), expected[column])
        streamed = list(builder.as_streaming_dataset(split).with_format("numpy"))
        for column in ("points", "labels"):
            np.testing.assert_array_equal(arrays(streamed, column), expected[column])

    @pytest.mark.parametrize("name", TASKS)
    def test_of_every_task(self, name, cache):
        small = {"memorization": {"max_length": 4}, "circle": {}}.get(name, {"num_examples": 5000})
        small |= {"num_points": 3} if name == "farthest_neighbor" else {}
        data = load_task(name, cache_dir=cache, num_proc=2, num_eval_examples=40, **small)
        streams = load_task(name, streaming=True, num_eval_examples=40, **small)
        for split in data:
            rows = len(data[split])
            streamed = list(streams[split].take(rows))
            assert len(streamed) == rows
            for column in data[split].column_names:
                np.testing.assert_array_equal(data[split][column][:].numpy(), arrays(streamed, column))
                assert data[split].features == streams[split].features


class Nearest(FarthestNeighbor):
    """A second builder in this module, with the configs of the first."""

    def draw(self, rng, rows, *, split, first):
        drawn = super().draw(rng, rows, split=split, first=first)
        return {"points": drawn["points"], "labels": drawn["points"]}


class Renamed(FarthestNeighbor):
    """A third one, which differs in nothing but its name."""


class TestCacheNames:
    def test_builders_with_equal_configs_never_share(self, cache):
        parameters = {"dim": 4, "num_points": 3, "num_examples": 5, "num_eval_examples": 5}
        builders = [builder(cache, **parameters) for builder in (FarthestNeighbor, Nearest, Renamed)]
        # even where somebody gives them one name
        builders += [builder(cache, dataset_name="mine", **parameters) for builder in (FarthestNeighbor, Nearest)]
        assert len({builder.cache_dir for builder in builders}) == 5
        for builder in builders:
            builder.download_and_prepare()
            (stored,) = builder.as_dataset("test").with_format("numpy").iter(5)
            np.testing.assert_array_equal(stored["labels"], builder.sample("test", 5)["labels"])

    def test_every_parameter_has_a_cache_of_its_own(self, cache):
        base = {"dim": 16, "num_points": 4, "num_examples": 50, "num_eval_examples": 5, "seed": 0}
        changed = [base | change for change in ({}, {"dim": 17}, {"num_points": 5}, {"num_examples": 51}, {"seed": 1})]
        folders = {
            task_builder("farthest_neighbor", cache_dir=cache, **parameters).cache_dir for parameters in changed
        }
        assert len(folders) == len(changed)
        spelled_otherwise = task_builder(
            "farthest_neighbor", "d16_n16", cache_dir=cache, **(base | {"dim": np.int64(16)})
        )
        assert spelled_otherwise.cache_dir in folders

    def test_a_changed_helper_changes_the_cache(self, monkeypatch, cache):
        parameters = {"dim": 4, "num_points": 3, "num_examples": 5, "num_eval_examples": 5, "cache_dir": cache}
        before = load_task("farthest_neighbor", "train", **parameters)["points"][:]
        take_points = sampling.take_points

        def unit_vectors(rng, rows, count, dim):
            return np.ones((rows, count, dim), dtype=np.float32)

        monkeypatch.setattr("hf_rankattn.tasks.farthest_neighbor.unit_vectors", unit_vectors)
        changed = load_task("farthest_neighbor", "train", **parameters)["points"][:]
        assert (changed == 1).all()
        monkeypatch.undo()
        assert sampling.take_points is take_points
        np.testing.assert_array_equal(load_task("farthest_neighbor", "train", **parameters)["points"][:], before)


MODULE = """
import os, time
from pathlib import Path
import numpy as np
from hf_rankattn.tasks.farthest_neighbor import FarthestNeighbor
from helper import shift

class Mine(FarthestNeighbor):
    def draw(self, rng, rows, *, split, first):
        if "SLOW" in os.environ and first >= 512:
            Path(os.environ["SLOW"]).touch()
            time.sleep(60)
        points = shift(rng.standard_normal((rows, 16, 64), dtype=np.float32))
        return {"points": points, "labels": points}
"""
HELPER = """
SHIFT = {shift}

def shift(points):
    return points + SHIFT
"""
RUN = """
import sys
from pathlib import Path
import datasets
datasets.disable_progress_bars()
import mine
{before}
builder = mine.Mine(sys.argv[1], num_examples=1100, num_eval_examples=5)
builder.download_and_prepare(num_proc={num_proc})
data = builder.as_dataset("train").with_format("numpy")
print(len(data), round(float(data["points"][:].mean())), float(data["points"][:].astype("float64").sum()))
"""


class TestOtherProcesses:
    @pytest.fixture
    def project(self, tmp_path) -> Path:
        (tmp_path / "mine.py").write_text(MODULE)
        (tmp_path / "helper.py").write_text(HELPER.format(shift=3))
        return tmp_path

    def start(self, project: Path, before: str = "", num_proc: int = 1, **env: str) -> subprocess.Popen:
        path = os.pathsep.join([str(project), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-c", RUN.format(before=before, num_proc=num_proc), str(project / "cache")],
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen) -> list[str]:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        return output.split()

    def test_an_edited_generator_never_returns_stale_rows(self, project):
        # the first process edits the file after importing it: its rows are those of the old code, and so is their name
        edit = f"Path({str(project / 'helper.py')!r}).write_text({HELPER.format(shift=5)!r})"
        assert self.finish(self.start(project, before=edit))[:2] == ["1100", "3"]
        assert self.finish(self.start(project))[:2] == ["1100", "5"]

    def test_a_killed_preparation_leaves_nothing_that_is_trusted(self, project):
        reached = project / "reached"
        victim = self.start(project, num_proc=2, SLOW=str(reached))
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
        # two at once find the ruins
        both = [self.start(project), self.start(project)]
        first, second = map(self.finish, both)
        assert first[:2] == ["1100", "3"] and first == second
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


def test_a_cache_can_be_made_anew(cache):
    builder = task_builder("sorting", cache_dir=cache)
    builder.download_and_prepare()
    (info,) = cache.rglob("dataset_info.json")
    before = info.stat().st_mtime_ns
    task_builder("sorting", cache_dir=cache).download_and_prepare()
    assert info.stat().st_mtime_ns == before
    builder.download_and_prepare(download_mode=DownloadMode.FORCE_REDOWNLOAD)
    assert info.stat().st_mtime_ns > before
