"""The four training scripts: from YAML, stopped and resumed, killed, shared by two processes, refused where they must be."""

import csv
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hub_stand_in import HubStandIn
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from testing_common import FAMILIES, FAMILY_IDS, TORCHRUN
from transformers import BertModel


EXAMPLES = Path(__file__).parent.parent / "examples"
WORKER = str(Path(__file__).parent / "worker_scripts.py")
# ten steps, of which the third pass over small data, a warm-up and checkpoints before and after the middle are part
COMMON = {"steps": 10, "batch_size": 16, "log_every": 1, "save_every": 4, "learning_rate": 5e-3, "warmup": 0.2}
POINTS = {"task": "nearest_neighbor", "dim": 4, "num_points": 2, "num_eval_examples": 45}
POINTS |= {"intermediate_size": 8, "qk_norm": True}


@dataclass(frozen=True)
class Script:
    name: str
    settings: dict
    metrics: tuple[str, ...]
    baseline: str

    @property
    def path(self) -> str:
        return str(EXAMPLES / f"{self.name}.py")


TEXT = {"dataset": "rows", "max_length": 16}
SCRIPTS = [
    Script("run_points", POINTS, ("neighbor_error", "neighbor_accuracy"), "linear_attention"),
    Script("run_points_no_trainer", POINTS, ("neighbor_error", "neighbor_accuracy"), "linear_attention"),
    Script(
        "run_text_classification", {**TEXT, "hidden_size": 8, "num_layers": 1, "qk_rank": 3}, ("accuracy",), "0.511"
    ),
    Script("convert_and_finetune", {**TEXT, "model": "tiny", "qk_rank": 3}, ("accuracy",), "0.511"),
]
IDS = [script.name for script in SCRIPTS]


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    complained: str


def run(folder: Path, script: Script, *arguments: str) -> Ended:
    """Run a script as `python script.py ...` does, but in this process: importing torch takes longer than these runs."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [script.path, *arguments])
        try:
            runpy.run_path(script.path, run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    return Ended(code, out.getvalue(), err.getvalue())


def finished(folder: Path, script: Script, *arguments: str) -> str:
    ended = run(folder, script, *arguments)
    assert ended.code == 0, ended.complained
    return ended.said


def refused(folder: Path, script: Script, *arguments: str) -> str:
    ended = run(folder, script, *arguments)
    assert ended.code == 2, ended
    (line,) = ended.complained.splitlines()
    return line


def launched(folder: Path, *command: str, environment: dict | None = None) -> subprocess.CompletedProcess:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder, timeout=280, env=variables
    )


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def losses(folder: Path) -> torch.Tensor:
    with open(folder / "losses.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, COMMON["steps"] + 1))
    return torch.tensor([float(row["loss"]) for row in rows], dtype=torch.float64)


def furthest(first: Path, second: Path) -> tuple[float, float]:
    """The largest difference of any loss, and of any weight."""
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    apart = max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0])
    return (losses(first) - losses(second)).abs().max().item(), apart


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with data, a checkpoint, and for each script a YAML file and the run that others are compared with."""
    from transformers import BertConfig, BertModel

    from hf_rankattn.files.texts import package_text
    from hf_rankattn.files.texts.word_order import word_order_rows, word_tokenizer

    folder = tmp_path_factory.mktemp("scripts")
    (folder / "rows").mkdir()
    rows = word_order_rows(package_text()[:12], seed=0, words=8)
    for split, part in (("train", rows[:60]), ("test", rows[60:107])):
        with open(folder / "rows" / f"{split}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(part)
    tokenizer = word_tokenizer([str(row["text"]) for row in rows])
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16, hidden_dropout_prob=0.3, **sizes)
    BertModel(config).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    for script in SCRIPTS:
        (folder / f"{script.name}.yaml").write_text(json.dumps({**COMMON, **script.settings}))
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """The uninterrupted run of a script by one process, made once."""

    def run_once(script: Script) -> Path:
        output = folder / f"{script.name}-whole"
        if not output.exists():
            said = finished(folder, script, f"{script.name}.yaml", "--output_dir", output.name)
            assert said.splitlines()[0].startswith("processes: 1")
        return output

    return run_once


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_it_ends_with_a_model_a_card_and_held_out_results(script, folder, whole):
    from transformers import AutoConfig

    output = whole(script)
    results = results_of(output)
    assert set(script.metrics) <= set(results)
    config = AutoConfig.from_pretrained(output / "model")
    assert config.head_geometry(0).qk_rank == script.settings.get("qk_rank", 4)
    card = ModelCard.load(output / "model" / "README.md")
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured == {name: pytest.approx(results[name], abs=1e-6) for name in script.metrics}
    assert script.baseline in card.text, "results stand beside a baseline"
    curve = losses(output)
    assert curve[-1] != curve[0] and torch.isfinite(curve).all()
    assert (output / "checkpoint-10" / "complete").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_stopped_and_resumed_it_is_the_same_run(script, folder, whole):
    output = folder / f"{script.name}-stopped"
    command = [script, f"{script.name}.yaml", "--output_dir", output.name]
    assert "stopped at step 5 of 10" in finished(folder, *command, "--stop_at", "5")
    assert not (output / "model").exists()
    assert "--stop_at must be above" in refused(folder, *command, "--stop_at", "5", "--resume")
    assert "going on at step 5 of 10" in finished(folder, *command, "--resume")
    assert furthest(output, whole(script)) == (0, 0)
    assert results_of(output) == results_of(whole(script))


@pytest.fixture(scope="module")
def two(folder) -> str:
    """The text scripts by two processes, stopped in the middle and resumed; on points two take over from one."""
    runs = []
    for script in SCRIPTS:
        command = [f"{script.name}.yaml", "--output_dir", f"{script.name}-two"]
        if "points" in script.name:
            finished(folder, script, *command, "--stop_at", "5")
        else:
            runs.append([script.path, *command, "--stop_at", "5"])
        runs.append([script.path, *command, "--expect_processes", "2", "--resume"])
    runs.append([SCRIPTS[0].path, f"{SCRIPTS[0].name}.yaml", "--output_dir", "odd", "--batch_size", "15"])
    result = launched(folder, *TORCHRUN, WORKER, json.dumps(runs))
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_two_processes_are_one_run(script, folder, whole, two):
    assert two.count("processes: 2") == 7 and two.count("going on at step 5 of 10") == 4, "each run says so once"
    output = folder / f"{script.name}-two"
    loss, weight = furthest(output, whole(script))
    assert loss <= 1e-5 and weight <= 1e-5, (loss, weight)
    assert results_of(output) == pytest.approx(results_of(whole(script)), abs=1e-5), (
        "rows that fill up the last batch must not count"
    )


def test_a_batch_that_processes_cannot_share_is_refused(folder, two):
    assert "2 processes cannot share it evenly" in two and two.count("exit code 2") == 2
    assert not (folder / "odd").exists()


def test_finished_runs_are_pushed_with_their_cards(folder, whole):
    """Resuming a finished run trains nothing and evaluates, saves and pushes what is there."""
    before = {script.name: (whole(script) / "model" / "model.safetensors").read_bytes() for script in SCRIPTS}
    with HubStandIn() as hub:
        runs = [
            [script.path, f"{script.name}.yaml", "--output_dir", whole(script).name, "--resume"]
            + ["--push_to", f"user/{script.name}"]
            for script in SCRIPTS
        ]
        online = {**hub.env(), "HF_HUB_OFFLINE": "0"}
        result = launched(folder, WORKER, json.dumps(runs), environment=online)
        assert result.returncode == 0 and "exit code" not in result.stdout, (result.stdout + result.stderr)[-3000:]
        for script in SCRIPTS:
            files = hub.files(f"user/{script.name}")
            assert files["model.safetensors"] == before[script.name]
            card = ModelCard(files["README.md"].decode())
            assert {found.metric_type for found in card.data.eval_results} == set(script.metrics)
            assert f'from_pretrained("user/{script.name}"' in card.text
            losses(whole(script))


def test_the_twins_are_one(whole):
    assert furthest(whole(SCRIPTS[0]), whole(SCRIPTS[1])) == (0, 0)


@pytest.mark.parametrize("script", SCRIPTS[:2], ids=IDS[:2])
@pytest.mark.parametrize(
    "task, more, metric",
    [
        ("farthest_neighbor", "--dim 4 --num_points 3 --qk_rank 2 --budget 16", "neighbor_error"),
        ("biased_nearest_neighbor", "--dim 4", "neighbor_error"),
        ("convex_hull", "--hidden_size 8", "hull_vertex_f1"),
        ("circle", "--task_config uniform_n1000", "neighbor_error"),
    ],
)
def test_every_task_on_points(script, task, more, metric, folder):
    output = folder / f"{script.name}-{task}"
    size = "--steps 2 --batch_size 4 --log_every 1 --save_every 2 --intermediate_size 8 --num_eval_examples 6".split()
    finished(folder, script, "--task", task, *more.split(), *size, "--output_dir", output.name)
    twin = folder / f"run_points-{task}"
    assert metric in results_of(output)
    assert not twin.exists() or results_of(output) == results_of(twin)


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_fewer_processes_than_promised_is_refused(script, folder):
    command = [script, f"{script.name}.yaml", "--output_dir", "promised", "--expect_processes", "2"]
    assert "2 processes are expected and 1 are running" in refused(folder, *command)
    assert not (folder / "promised").exists()


@pytest.mark.slow
def test_accelerate_launch_on_the_cpu_is_caught(folder):
    """It starts one process where two were asked for, and says nothing."""
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command = [SCRIPTS[1].path, f"{SCRIPTS[1].name}.yaml", "--output_dir", "launched", "--expect_processes", "2"]
    result = launched(folder, *launch, *command)
    assert result.returncode != 0 and "2 processes are expected and 1 are running" in result.stderr
    assert not (folder / "launched").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_what_it_would_mix_or_overwrite_is_refused(script, folder, whole):
    command = [script, f"{script.name}.yaml", "--output_dir", whole(script).name]
    before = sorted(path.name for path in whole(script).iterdir())
    assert "exists already: add --resume" in refused(folder, *command)
    line = refused(folder, *command, "--resume", "--qk_rank", "2", "--seed", "7", "--batch_size", "8")
    for change in ("batch_size is 8 here and 16 there", "seed is 7 here and 0 there", "qk_rank is 2 here"):
        assert change in line
    assert sorted(path.name for path in whole(script).iterdir()) == before


@pytest.mark.parametrize("script", SCRIPTS[:1], ids=IDS[:1])
def test_killed_it_goes_on_from_the_last_whole_checkpoint(script, folder):
    """Killed without warning somewhere in 2000 steps with a checkpoint every second; the curve shows no seam."""
    size = "--steps 2000 --save_every 2 --num_eval_examples 4 --output_dir".split() + [f"{script.name}-killed"]
    command = [sys.executable, script.path, f"{script.name}.yaml", *size]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    output = folder / f"{script.name}-killed"
    try:
        deadline = time.monotonic() + 120
        while len(list(output.glob("checkpoint-*/complete"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (output / "model").exists()
    # what a kill in the middle of writing leaves
    torn = output / "checkpoint-1998"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    said = finished(folder, script, f"{script.name}.yaml", *size, "--resume", "--stop_at", "60")
    step = int(said.split("going on at step ")[1].split()[0])
    assert 2 <= step < 60 and not torn.exists()
    with open(output / "losses.csv") as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    straight = ["--output_dir", f"{script.name}-straight", "--stop_at", "60"]
    finished(folder, script, f"{script.name}.yaml", *size[:-2], *straight)
    with open(folder / f"{script.name}-straight" / "losses.csv") as file:
        assert rows == [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_a_diverged_run_stops_and_exports_nothing(script, folder):
    output = folder / f"{script.name}-diverged"
    command = [f"{script.name}.yaml", "--output_dir", output.name, "--learning_rate", "1e30", "--warmup", "0"]
    ended = run(folder, script, *command)
    line = ended.complained.splitlines()[-1]  # the data set may show its progress before it
    assert ended.code == 2 and "training diverged: loss is" in line and "try a lower learning rate" in line
    assert not (output / "model").exists() and not (output / "results.json").exists()
    # of one step, the loss is that of the fresh weights: only what is measured after it shows that they are broken
    broken = "--steps 1 --log_every 1 --save_every 1 --learning_rate 1e30 --output_dir one".split()
    assert "training diverged" in refused(folder, script, *command[:1], "--warmup", "0", *broken)
    assert not (folder / "one" / "model").exists()
    shutil.rmtree(folder / "one")


@pytest.mark.parametrize("script", SCRIPTS[:2], ids=IDS[:2])
@pytest.mark.parametrize("file", ["run.json", "nested", "model.safetensors", "optimizer.*", "complete"])
def test_a_damaged_run_is_refused_or_resumed_from_an_earlier_checkpoint(script, file, folder, whole):
    output = folder / f"{script.name}-damaged-{file.split('.')[0]}"
    shutil.copytree(whole(script), output)
    command = [script, f"{script.name}.yaml", "--output_dir", output.name, "--resume"]
    last = output / "checkpoint-10"
    if file == "run.json":
        (output / file).write_text("[]")
        assert "run.json must hold the settings of a run, got []" in refused(folder, *command)
    elif file == "nested":
        (output / "run.json").write_text("[" * 100_000)
        assert "run.json cannot be read: maximum recursion depth" in refused(folder, *command)
    elif file == "complete":
        (last / file).unlink()
        assert "going on at step 8 of 10" in finished(folder, *command)
        assert furthest(output, whole(script)) == (0, 0)
    else:
        (path,) = last.glob(file)
        path.write_bytes(path.read_bytes()[:-100])
        line = refused(folder, *command)
        assert f"{path.name} cannot be read" in line and "Delete" in line and "checkpoint-10" in line
        path.unlink()
        assert "it has no file" in refused(folder, *command)


def test_dropout_is_resumed_too_but_not_by_another_number_of_processes(folder):
    script = SCRIPTS[3]
    curves = []
    for name, stops in (("dropout", ["5", "10"]), ("dropout-whole", ["10"])):
        for stop in stops:
            command = [f"{script.name}.yaml", "--output_dir", name, "--dropout", "0.3", "--resume", "--stop_at", stop]
            finished(folder, script, *command)
        curves.append(losses(folder / name))
    assert torch.equal(*curves)
    assert json.loads((folder / "dropout" / "run.json").read_text())["processes"] == 1
    assert "processes" not in json.loads((folder / f"{script.name}-whole" / "run.json").read_text())


def spoilt_checkpoints(folder):
    """Copies of the tiny checkpoint that must not be trained."""
    bare, strange, adapted, integers, partial = (
        shutil.copytree(folder / "tiny", folder / name)
        for name in ("bare", "strange", "adapted", "integers", "partial")
    )
    for file in bare.glob("tokenizer*"):
        file.unlink()
    small = BertModel.from_pretrained(strange)
    small.resize_token_embeddings(5)
    small.save_pretrained(strange)
    (adapted / "adapter_config.json").write_text("{}")
    weights = load_file(folder / "tiny" / "model.safetensors")
    query = "encoder.layer.0.attention.self.query.weight"
    save_file({**weights, query: weights[query].to(torch.int32)}, integers / "model.safetensors")
    del weights[query]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})


def test_what_cannot_be_trained_leaves_no_folder(folder):
    spoilt_checkpoints(folder)
    points, _, text, convert = SCRIPTS
    for script, arguments, line in (
        (points, ["--qk_rank", "0"], "qk_rank"),
        (points, ["--task", "sorting"], "--task sorting is no task on points; these are: farthest_neighbor"),
        (points, ["--task", "circle", "--task_config", "grid_n1000"], "uniform_n1000"),
        (points, ["--budget", "16", "--num_attention_heads", "2"], "give one of them"),
        (points, ["--budget", "17"], "does not spend the budget"),
        (text, ["--dataset", "nowhere"], "--dataset nowhere cannot be loaded"),
        (text, ["--label_column", "mark"], "it has text, label"),
        (text, ["--model", "tiny"], "--qk_rank 3 is for a model from scratch"),
        (convert, ["--model", "absent"], "absent cannot be read as a checkpoint: there is no folder absent"),
        (convert, ["--model", "bare"], "bare has no tokenizer"),
        (convert, ["--model", "strange"], "the tokenizer does not belong to the model"),
        (convert, ["--model", "adapted"], "adapted holds a PEFT adapter"),
        (convert, ["--model", "integers"], "weights are floats"),
        (convert, ["--model", "partial"], "query.weight: they would be random"),
        (convert, ["--max_length", "17"], "which has 16 positions"),
        (convert, ["--qk_rank", "0"], "qk_rank"),
    ):
        settings = script.settings if script is not points else {}
        given = [f"--{name}={value}" for name, value in settings.items() if f"--{name}" not in arguments]
        assert line in refused(folder, script, *given, *arguments, "--output_dir", "bad"), arguments
        assert not (folder / "bad").exists(), arguments


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
@pytest.mark.parametrize("kind", ["stock", "rank"])
def test_any_checkpoint_becomes_a_rank_classifier(family, kind, tmp_path):
    from hf_rankattn.training.texts import TextArguments, classifier

    config = family.rank_config(qk_rank=3, v_head_dim=5) if kind == "rank" else family.stock_config()
    model = getattr(family, kind)("Model")(config)
    model.save_pretrained(tmp_path)
    found = classifier(str(tmp_path), ["no", "yes", "perhaps"], TextArguments(max_length=4))
    assert type(found) is family.rank("ForSequenceClassification") and found.config.num_labels == 3
    if kind == "rank":
        assert found.config.head_geometry(0).qk_rank == 3
    carried = found.base_model.state_dict()
    left_out = () if hasattr(found.base_model, "pooler") and found.base_model.pooler is not None else ("pooler",)
    given = {name: value for name, value in model.state_dict().items() if not name.startswith(left_out)}
    assert all(torch.equal(value, carried[name]) for name, value in given.items())
    assert all(module.p == 0 for module in found.modules() if isinstance(module, torch.nn.Dropout))


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_help_shows_commands_and_defaults(script, folder):
    said = " ".join(finished(folder, script, "--help").split())
    assert f"torchrun --nproc_per_node 2 examples/{script.name}.py config.yaml" in said
    assert "--expect_processes" in said and "over ALL processes together (default: " in said
