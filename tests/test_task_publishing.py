"""`rankattn make-data`: Parquet and a card that datasets reads alone, from a folder and from the Hub."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import load_dataset
from hub_stand_in import HubStandIn
from huggingface_hub import DatasetCard
from test_sharing import BLOCKER
from testing_common import run_code, run_python
from testing_probe import run

from hf_rankattn.tasks import _publishing, baselines, make_data, task_builder


SMALL = {"num_examples": 40, "num_eval_examples": 10}
READ = (
    BLOCKER
    + """
import json
import datasets
datasets.disable_progress_bars()

def report(where, config):
    found = {}
    for split, rows in datasets.load_dataset(where, config).items():
        columns = rows.with_format("numpy")[:]
        sums = {name: [list(array.shape), float(array.astype("float64").sum())] for name, array in columns.items()}
        found[split] = [rows.features.to_dict(), sums]
    return found
"""
)


def run_clean(code: str, home: Path, cwd: Path | None = None, **env: str) -> list[str]:
    """Run code in a process that cannot import this package; return the lines that it prints."""
    env = {"HF_HOME": str(home), "HF_DATASETS_CACHE": str(home / "datasets"), **env}
    return run_code(code, cwd=cwd, **env).stdout.strip().splitlines()


def check_report(line: str, builder) -> None:
    report = json.loads(line)
    assert list(report) == ["train", "validation", "test"]
    for split, (features, columns) in report.items():
        assert features == json.loads(json.dumps(builder.info.features.to_dict()))
        expected = builder.sample(split, builder.split_sizes()[split])
        for name, (shape, total) in columns.items():
            assert tuple(shape) == expected[name].shape
            assert total == pytest.approx(expected[name].astype(np.float64).sum(), rel=1e-6, abs=1e-3)


class TestFolder:
    def test_is_read_without_this_package_and_the_snippet_of_the_card_runs(self, tmp_path):
        folders = [
            ("farthest_neighbor", ["d64_n4", "d16_n16"], SMALL),
            ("convex_hull", ["n10"], SMALL),
            ("memorization", ["package_text_l32"], {}),
        ]
        code = READ
        for task, configs, parameters in folders:
            made = make_data(task, tmp_path / task, configs, **parameters)
            code += f"print(json.dumps(report({made.folder!r}, {configs[-1]!r})))\n"
        make_data("sorting", tmp_path / "made", **SMALL)
        assert {path.name for path in tmp_path.iterdir()} == {"made", *(task for task, _, _ in folders)}
        code += (tmp_path / "made" / "README.md").read_text().split("```python\n")[1].split("```")[0]
        code += "\nprint(data['train'].num_rows, data['train'].column_names)"
        *reports, snippet = run_clean(code, tmp_path / "home", cwd=tmp_path)
        for (task, configs, parameters), line in zip(folders, reports, strict=True):
            check_report(line, task_builder(task, configs[-1], **parameters))
        assert snippet == "40 ['input_ids', 'labels']"

    def test_the_card_says_what_is_inside(self, tmp_path):
        made = make_data("farthest_neighbor", tmp_path / "made", ["d64_n16", "d64_n4"], license="cc0-1.0", **SMALL)
        card = DatasetCard.load(Path(made.folder) / "README.md")
        data = card.data.to_dict()
        assert data["license"] == "cc0-1.0" and data["size_categories"] == ["n<1K"]
        assert [entry["config_name"] for entry in data["configs"]] == ["d64_n16", "d64_n4"]
        (splits,) = (info["splits"] for info in data["dataset_info"] if info["config_name"] == "d64_n4")
        sizes = {split["name"]: split["num_examples"] for split in splits}
        assert list(sizes.items()) == [("train", 40), ("validation", 10), ("test", 10)]
        measured = baselines("farthest_neighbor", "d64_n16", **SMALL)["own_token_and_mean_pool"]["neighbor_error"]
        assert f"| own_token_and_mean_pool | {measured:.4g} |" in card.text
        for part in ("## How the labels are made", "## Citation", "2407.16153", "`points`", "dim 64, num_points 4"):
            assert part in card.text
        assert "\n\n\n" not in card.text

    def test_a_large_split_makes_several_files(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_publishing, "FILE_BYTES", 2_000_000)
        make_data("farthest_neighbor", tmp_path / "made", num_examples=700, num_eval_examples=10)
        names = sorted(path.name for path in (tmp_path / "made" / "d64_n16").glob("train*"))
        assert names == [f"train-{number:05d}-of-00003.parquet" for number in range(3)]
        rows = load_dataset(str(tmp_path / "made"), "d64_n16", split="train", cache_dir=str(tmp_path / "cache"))
        expected = task_builder("farthest_neighbor").sample("train", 700)["points"]
        np.testing.assert_array_equal(rows.with_format("numpy")[:]["points"], expected)

    def test_an_existing_folder_is_left_alone(self, tmp_path):
        folder = Path(make_data("sorting", tmp_path / "made", **SMALL).folder)
        (folder / "note.txt").write_text("mine")
        with pytest.raises(ValueError, match="exists already"):
            make_data("sorting", folder, **SMALL)
        assert (folder / "note.txt").exists()
        make_data("sorting", folder, overwrite=True, **SMALL)
        assert not (folder / "note.txt").exists()
        (tmp_path / "thesis").mkdir()
        with pytest.raises(ValueError, match="does not hold data of a task"):
            make_data("sorting", tmp_path / "thesis", overwrite=True)
        with pytest.raises(ValueError, match="two of the configs have the same name 'd64_n8'"):
            make_data("farthest_neighbor", tmp_path / "other", ["d64_n4", "d64_n16"], num_points=8)
        assert {path.name for path in tmp_path.iterdir()} == {"made", "thesis"}


class TestCommand:
    def test_json_names_rows_and_baselines(self, tmp_path, capsys):
        options = "--json --dim 8 --num-points 4 --num-examples 30 --num-eval-examples 5 --seed 3".split()
        code, out, error = run(capsys, "make-data", "farthest_neighbor", "--out", tmp_path / "made", *options)
        assert code == 0, error
        report = json.loads(out)
        assert report["rows"] == {"d8_n4": {"train": 30, "validation": 5, "test": 5}} and report["pushed"] is None
        assert report["baselines"]["d8_n4"]["zero"]["neighbor_error"] == pytest.approx(1, abs=1e-5)
        assert Path(report["folder"]) == tmp_path / "made"

    def test_a_text_of_ones_own(self, tmp_path, capsys):
        (tmp_path / "text.txt").write_text("\n\n".join(f"Line number {i} of a poem." for i in range(20)))
        options = ["--out", tmp_path / "made", "--text-file", tmp_path / "text.txt", "--max-length", "8"]
        code, out, _ = run(capsys, "make-data", "memorization", *options)
        assert code == 0 and "text_l8, 16 train, 2 validation, 2 test rows" in out.replace("\n", "")
        assert "poem" not in (tmp_path / "made" / "README.md").read_text()

    def test_no_home_is_needed(self, tmp_path):
        command = "-m hf_rankattn make-data sorting --num-examples 5 --out".split()
        nowhere = {"HOME": "/dev/null", "HF_HOME": "/dev/null/hf", "HF_DATASETS_CACHE": "/dev/null/datasets"}
        run_python(*command, tmp_path / "made", **nowhere)
        assert list((tmp_path / "made").rglob("train-*.parquet"))

    def test_bad_input_is_one_line_and_exit_code_2(self, tmp_path, capsys):
        for arguments, message in [
            (["explode"], "there is no task 'explode'; the tasks are associative_recall, biased_nearest_neighbor"),
            (["sorting", "--dim", "3"], "sorting has no parameter 'dim'"),
            (["farthest_neighbor", "--num-points", "1"], "--num-points must be at least 2, got 1"),
            (["farthest_neighbor", "--num-points", f"{10**30}"], "--num-points must be at most 2147483647"),
            (["sorting", "--push", "me/x"], "while HF_HUB_OFFLINE is set"),
        ]:
            code, _, error = run(capsys, "make-data", *arguments, "--out", tmp_path / "made")
            assert code == 2 and message in error and error.count("\n") == 1
        assert not list(tmp_path.iterdir())


class TestHub:
    """Against a stand-in of the Hub's HTTP interface on loopback, through the real clients."""

    ARGUMENTS = "make-data --push user/tasks --num-examples 40 --num-eval-examples 10".split()

    @pytest.fixture
    def hub(self, monkeypatch, tmp_path_factory):
        constants = "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # before retries
        with HubStandIn() as hub:
            monkeypatch.setattr(f"{constants}.ENDPOINT", hub.endpoint)
            template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
            monkeypatch.setenv("HF_TOKEN", hub.token)
            yield hub

    def refused(self, capsys, *arguments: str) -> str:
        code, _, error = run(capsys, *self.ARGUMENTS, *arguments)
        assert code == 2 and error.count("\n") == 1
        return error

    def test_what_is_pushed_is_what_was_written_and_loads_without_this_package(self, hub, tmp_path, capsys):
        configs = ["--config", "d64_n4", "--config", "d16_n16"]
        code, _, error = run(capsys, *self.ARGUMENTS, "farthest_neighbor", *configs, "--out", tmp_path / "made")
        assert code == 0, error
        pushed = hub.files("user/tasks", "dataset")
        for path in (tmp_path / "made").rglob("*.*"):
            assert pushed[path.relative_to(tmp_path / "made").as_posix()] == path.read_bytes()
        assert 'load_dataset("user/tasks", "d64_n4")' in DatasetCard(pushed["README.md"].decode()).text
        env = hub.env()
        code = READ + "print(json.dumps(report('user/tasks', 'd16_n16')))"
        (line,) = run_clean(code, Path(env.pop("HF_HOME")), **env)
        check_report(line, task_builder("farthest_neighbor", "d16_n16", **SMALL))
        # a card that would hide d16_n16 is not pushed, and nothing is written
        error = self.refused(capsys, "farthest_neighbor", "--config", "d64_n4", "--out", str(tmp_path / "again"))
        assert "other configs, which a new card would hide: d16_n16" in error
        assert not (tmp_path / "again").exists() and hub.files("user/tasks", "dataset") == pushed

    def test_without_network_the_error_names_the_written_folder(self, hub, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        arguments = ["sorting", "--out", str(tmp_path / "made")]
        assert "'user/tasks' cannot be written" in self.refused(capsys, *arguments) and not list(tmp_path.iterdir())
        # the network may also be lost later
        monkeypatch.setattr(_publishing, "open_repository", lambda repo, names: repo)
        assert "made is written, but could not be uploaded to 'user/tasks'" in self.refused(capsys, *arguments)
        assert (tmp_path / "made" / "README.md").exists()

    def test_a_wrong_token_is_one_line_before_anything_is_drawn(self, hub, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        assert "401" in self.refused(capsys, "sorting", "--out", str(tmp_path / "made"))
        assert not list(tmp_path.iterdir())
