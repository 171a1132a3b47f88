"""Training runs that can be stopped, killed and resumed: a folder, its settings, whole checkpoints, finite losses."""

import json
import math
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..files.atomic import UNFINISHED, write_whole
from .arguments import RunArguments, refusals
from .processes import on_cpu, process_state


SETTINGS = "run.json"
# written last, when all processes have written their part of a checkpoint
COMPLETE = "complete"
# Trainer and Accelerate go on without a file that is missing, with a fresh optimizer or other random numbers
PARTS = ("*model*", "optimizer*", "scheduler*", "r*_state*")


@dataclass(frozen=True)
class Run:
    """A run that may begin: `checkpoint` is where it goes on, if anywhere, and `step` how many steps are done."""

    folder: Path
    processes: int
    is_main: bool
    share: int
    checkpoint: Path | None
    step: int

    def write(self, name: str, text: str) -> None:
        """Write a file of the run, whole or not at all, by the first process."""
        if self.is_main:
            write_whole(self.folder / name, text)

    def write_history(self, history: Iterable[dict[str, Any]]) -> None:
        """The loss curve as `losses.csv`; floats in full, so that two runs can be compared to the last bit."""
        names = ("step", "loss", "learning_rate")
        rows = [[str(row[name]) for name in names] for row in history if "loss" in row]
        self.write("losses.csv", "".join(",".join(row) + "\r\n" for row in [names, *rows]))


def begin_run(arguments: RunArguments, **more_settings: Any) -> Run:
    """Check batch and folder, and find where to go on. It comes last in setting up: it makes the folder.

    Two runs are the same run if their `settings()` and `more_settings`, what else decides about the weights, are equal.
    """
    state = process_state()
    processes = state.num_processes
    if arguments.batch_size % processes:
        raise ValueError(
            f"--batch_size {arguments.batch_size} is the batch of all processes together and {processes} processes cannot "
            f"share it evenly: make it a multiple of {processes}."
        )
    settings = json.loads(json.dumps(arguments.settings() | more_settings))
    answer: list[Any] = [None, None]
    # one process looks and makes the folder: another one could find it made already, and refuse
    if state.is_main_process:
        try:
            answer[0] = open_folder(Path(arguments.output_dir), settings, arguments.resume)
        except ValueError as error:
            answer[1] = str(error)
    checkpoint, message = broadcast_object_list(answer)
    if message:
        raise ValueError(message)
    step = step_of(checkpoint) if checkpoint else 0
    if arguments.stop_at is not None and arguments.stop_at <= step < arguments.steps:
        raise ValueError(
            f"--stop_at must be above {step}, the step of the run in {arguments.output_dir}; got {arguments.stop_at}."
        )
    folder, share = Path(arguments.output_dir), arguments.batch_size // processes
    return Run(folder, processes, state.is_main_process, share, checkpoint, step)


def open_folder(folder: Path, settings: dict[str, Any], resume: bool) -> Path | None:
    """Make the folder of a new run, or find the last whole checkpoint of one that is there."""
    try:
        # the temporary file is of a run that was killed as it began
        entries = (
            {path.name for path in folder.iterdir() if not UNFINISHED.fullmatch(path.name)}
            if folder.exists()
            else set()
        )
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}.") from error
    if entries and not resume:
        raise ValueError(f"{folder} exists already: add --resume to go on with it, or choose another --output_dir.")
    if entries and SETTINGS not in entries:
        raise ValueError(f"{folder} holds no run to go on with (no {SETTINGS}): choose another --output_dir.")
    if not entries:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"{folder} cannot be made: {error}.") from error
        return None
    check_settings(folder, settings)
    for path in list(folder.glob("checkpoint-*")):
        if not (path / COMPLETE).is_file():
            shutil.rmtree(path)
    last = max(folder.glob("checkpoint-*"), key=step_of, default=None)
    if last is not None:
        try:
            check_checkpoint(last)
        except ValueError as error:
            raise ValueError(f"{error} Delete {last} to resume from the checkpoint before it, if any.") from error
    return last


def check_checkpoint(checkpoint: Path) -> None:
    """Raise a ValueError if a file of a checkpoint is missing or cut off. No pickle is opened."""
    for pattern in PARTS:
        if not any(checkpoint.glob(pattern)):
            raise ValueError(f"{checkpoint} is not complete: it has no file {pattern}.")
    for path in sorted(checkpoint.iterdir()):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            elif path.suffix in (".bin", ".pkl", ".pt", ".pth") and not zipfile.is_zipfile(path):
                raise ValueError("it is not a file of torch.save")
        except (SafetensorError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read ({error}).") from error


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise a ValueError that names what differs between a run and what was asked for."""
    try:
        there = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / SETTINGS} cannot be read: {error}.") from error
    if not isinstance(there, dict):
        raise ValueError(
            f"{folder / SETTINGS} must hold the settings of a run, got {there!r:.80}: choose another --output_dir."
        )
    names = [name for name in {**there, **settings} if settings.get(name) != there.get(name)]
    if differ := [f"{name} is {settings.get(name)!r} here and {there.get(name)!r} there" for name in names]:
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(differ)}. Give the same to go on with it, or choose another "
            "--output_dir."
        )


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def complete_checkpoint(checkpoint: Path) -> None:
    """Say that a checkpoint is whole, once every process has written its part."""
    state = process_state()
    state.wait_for_everyone()
    if state.is_main_process:
        (checkpoint / COMPLETE).touch()


def drop_checkpoints(run: Run, keep: int) -> None:
    """Delete all but the last checkpoints of a run."""
    if run.is_main:
        for path in sorted(run.folder.glob("checkpoint-*"), key=step_of)[:-keep]:
            shutil.rmtree(path)


def check_finite(values: Mapping[str, float], step: int) -> None:
    """Raise a ValueError if one of the values, such as a loss, is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(
                f"training diverged: {name} is {value} at step {step}. No model is written; try a lower learning rate."
            )


def check_weights(model: nn.Module, step: int) -> None:
    """Raise a ValueError if a weight is NaN or infinite: the loss of the last step does not show what that step did."""
    broken = [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]
    check_finite(dict.fromkeys(broken, math.nan), step)


class FiniteLosses(TrainerCallback):
    """Stops training with a ValueError at a loss that is not finite. `TrainingArguments` must not filter such losses."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        losses = {name: value for name, value in (logs or {}).items() if name.endswith("loss")}
        check_finite(losses, state.global_step)


class RunCallback(FiniteLosses):
    """Marks the checkpoints of `Trainer` as whole, stops where the arguments say, and refuses losses that are not finite."""

    def __init__(self, arguments: RunArguments):
        self.stop_at = arguments.stop_at

    def on_log(self, *args, **kwargs):
        with refusals():
            super().on_log(*args, **kwargs)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.stop_at:
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        complete_checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def training_arguments(arguments: RunArguments, run: Run) -> dict[str, Any]:
    """What the arguments of a run are called in `TrainingArguments`."""
    return {
        "output_dir": arguments.output_dir,
        "max_steps": arguments.steps,
        "per_device_train_batch_size": run.share,
        "learning_rate": arguments.learning_rate,
        "warmup_steps": int(round(arguments.warmup * arguments.steps, 6)),
        "seed": arguments.seed,
        "data_seed": arguments.data_seed,
        "logging_steps": arguments.log_every,
        "logging_nan_inf_filter": False,
        "save_steps": arguments.save_every,
        # two, as one may still be in the writing when a run is killed
        "save_total_limit": 2,
        "report_to": arguments.report_to,
        "disable_tqdm": True,
        "use_cpu": on_cpu(),
        "dataloader_pin_memory": not on_cpu(),
    }


def train_from(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train from the beginning or from a checkpoint. Nothing is trained if the checkpoint is that of the last step."""
    if checkpoint is None or step_of(checkpoint) < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return
    # Trainer would train one step more
    trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    model: Any = trainer.model
    model.load_state_dict(type(model).from_pretrained(checkpoint, use_safetensors=True).state_dict())


def train(trainer: Trainer, run: Run) -> bool:
    """Train from the beginning or from the checkpoint of the run; returns whether all steps are done."""
    train_from(trainer, run.checkpoint)
    run.write_history(trainer.state.log_history)
    with refusals():
        check_weights(cast(nn.Module, trainer.model), trainer.state.global_step)
    return trainer.state.global_step >= trainer.args.max_steps
