"""Rank metrics in the log of a training run."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from ..families.architectures import base_of
from ..files.running import Inputs, batches_of
from .attention import measure_attention
from .batches import plain, real_tokens
from .collapse import measure_collapse
from .logits import measure_logits
from .weights import measure_weights


logger = logging.get_logger(__name__)
COLLAPSE = ("relative_residual", "residual_norm", "token_cosine")
CHEAP = ("stable_rank", "participation_ratio", "argmax_coverage", "row_entropy")
FULL = ("numerical_rank", "effective_rank", "energy_rank")
SPECTRA = ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "energy_rank")
LOGITS = tuple(f"logits/{name}" for name in (*SPECTRA, "logit_std"))
WEIGHTS = tuple(f"weights/{name}" for name in SPECTRA)
KNOWN = (*COLLAPSE, *CHEAP, *FULL, *LOGITS, *WEIGHTS)


class RankCallback(TrainerCallback):
    """Logs rank metrics during a `Trainer` run.

    `Trainer(callbacks=[RankCallback(...)])` writes them to `trainer.state.log_history`. `RankCallback(...).add_to(trainer)`
    also sends them to the console and to everything in `report_to`: transformers gives callbacks no way to log, so the
    callback must know its trainer.

    Args:
        every (`int`): Measure every so many optimiser steps, and before the first and after the last.
        inputs (*optional*):
            A batch, a list of batches, or a DataLoader to measure on. By default the first `max_examples` examples of the
            first training batch; then there is no measurement before the first step.
        metrics (`Sequence[str]`, *optional*):
            Of token states: `relative_residual`, `residual_norm`, `token_cosine`. Of attention maps: `stable_rank`,
            `participation_ratio`, `argmax_coverage`, `row_entropy`, and from singular values, which take longer,
            `numerical_rank`, `effective_rank`, `energy_rank`. With the prefix `logits/` or `weights/`, the rank metrics
            of row-centred logits and of query-key weights.
        per_layer (`bool`, *optional*, defaults to `False`):
            Also log each layer, under `rank/<metric>/layer_<i>`. By default one number is logged for each metric.
        max_examples (`int`, *optional*, defaults to 8): How many examples of the training batch to keep.

    Training is not changed: no random number is drawn, every module keeps its mode, and the losses are equal to those of a
    run without the callback to the last bit. The logged values are means over heads and examples: `rank/<metric>` is the
    mean over layers, and for metrics of token states the value after the last layer.

    Every process measures, each on its own first batch if `inputs` is not given. Sharded models exchange weights in every
    forward pass, so the processes agree before they measure: they wait until all of them have a batch, and if one process
    cannot use its batch, all of them stop with the same error. Give every process the same number of batches.
    """

    def __init__(
        self,
        every: int = 100,
        inputs: Inputs | None = None,
        metrics: Sequence[str] = ("relative_residual", "token_cosine", "participation_ratio", "argmax_coverage"),
        per_layer: bool = False,
        max_examples: int = 8,
    ):
        if every < 1 or max_examples < 1:
            raise ValueError(f"`every` and `max_examples` must be at least 1, got {every} and {max_examples}.")
        if isinstance(metrics, str) or not metrics:
            raise ValueError(f"`metrics` must be a list of names, got {metrics!r}.")
        if unknown := [name for name in metrics if name not in KNOWN]:
            raise ValueError(f"unknown metrics {unknown}; there are {', '.join(KNOWN)}.")
        self.every, self.metrics, self.per_layer, self.max_examples = every, tuple(metrics), per_layer, max_examples
        # read once: a loader draws a random number each time it is read, and a generator can be read only once
        with torch.random.fork_rng(devices=[]):
            self.given = [inputs] if isinstance(inputs, Mapping) else None if inputs is None else list(inputs)
        self.inputs: Inputs | None = self.given
        self.last_step = -1
        self.trainer: Trainer | None = None
        self.hook: Any = None

    def add_to(self, trainer: Trainer) -> "RankCallback":
        """Add the callback to a trainer, and log through `trainer.log`, which calls the console and all of `report_to`."""
        self.trainer = trainer
        trainer.pop_callback(self)
        trainer.add_callback(self)
        return self

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.last_step, self.inputs = -1, self.given
        if self.trainer is None and args.report_to:
            logger.warning(
                f"RankCallback writes to trainer.state.log_history only. To log to {', '.join(args.report_to)} as well, add it "
                "with RankCallback(...).add_to(trainer)."
            )
        self.log(state, control, model)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        # not earlier: an evaluation may run first
        if self.inputs is None and self.hook is None:
            self.hook = plain(model).register_forward_pre_hook(self.keep_first_batch, with_kwargs=True)

    def keep_first_batch(self, module, args, kwargs) -> None:
        names = [name for name in inspect.signature(module.forward).parameters if name not in ("self", "kwargs")]
        batch: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {
            name: value.detach() for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim
        }
        if tensors.get("input_ids", torch.empty(0)).ndim == 3:  # each choice is a text
            tensors = {name: value.flatten(0, 1) for name, value in tensors.items() if value.ndim == 3}
        mask = tensors.get("attention_mask")
        if mask is not None and mask.ndim == 2:
            enough = mask.bool().sum(-1) > 1  # a single token cannot be compared
            tensors = {name: value[enough] for name, value in tensors.items() if len(value) == len(enough)}
        if not all(len(value) for value in tensors.values()):
            return
        self.inputs = {name: value[: self.max_examples].clone() for name, value in tensors.items()}
        self.hook.remove()
        self.hook = None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            self.log(state, control, model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        if self.last_step != state.global_step:
            self.log(state, control, model)
        if self.last_step < 0:
            logger.warning("RankCallback has measured nothing: no batch had an example of at least two tokens.")

    def log(self, state, control, model) -> None:
        """Measure and log, unless a process has no batch yet."""
        if not self.ready(model):
            return
        self.last_step = state.global_step
        logs = self.measure(model)
        if self.trainer is None:
            state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
            return
        wanted = control.should_log  # a log resets it, and the loss of this step would not be logged
        self.trainer.log(logs)
        control.should_log = wanted

    def ready(self, model) -> bool:
        """Whether every process has a batch; raises in all processes if one of them cannot use its batch."""
        base, count, problem = base_of(plain(model)), 0, ""
        try:
            for batch in batches_of(base, self.inputs) if self.inputs is not None else ():
                real_tokens(base, batch)
                count += 1
        except Exception as error:  # of any type: the other processes wait for this one below
            problem = str(error) or type(error).__name__
        found = [(count, problem)]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            found *= torch.distributed.get_world_size()
            torch.distributed.all_gather_object(found, (count, problem))
        for rank, (_, problem) in enumerate(found):
            if problem:
                raise ValueError(problem if len(found) == 1 else f"RankCallback, process {rank}: {problem}")
        counts = [count for count, _ in found]
        if all(counts) and len(set(counts)) > 1:
            raise ValueError(
                f"RankCallback: the processes have {', '.join(map(str, counts))} batches, and a sharded model needs the same "
                "number of forward passes in all of them. Give each process the same number of batches in `inputs`."
            )
        return all(counts)

    def measure(self, model) -> dict[str, float]:
        """The metrics of a model, under the names in the log."""
        assert self.inputs is not None
        wanted, inputs = set(self.metrics), self.inputs
        probes: dict[tuple[str, ...], Callable[[], pd.DataFrame]] = {
            COLLAPSE: lambda: measure_collapse(model, inputs, variants=("transformer",)),
            (*CHEAP, *FULL): lambda: measure_attention(model, inputs, "full" if wanted & set(FULL) else "cheap"),
            LOGITS: lambda: measure_logits(model, inputs),
            WEIGHTS: lambda: measure_weights(model),
        }
        measured = {names: probe() for names, probe in probes.items() if wanted & set(names)}
        tables = {name: table for names, table in measured.items() for name in names}
        logs: dict[str, float] = {}
        for name in self.metrics:
            table = tables[name]
            by_layer = table[table.metric == name.split("/")[-1]].groupby("layer").value.mean()
            logs[f"rank/{name}"] = float(by_layer.iloc[-1] if name in COLLAPSE else by_layer.mean())
            if self.per_layer:
                logs |= {f"rank/{name}/layer_{layer}": float(value) for layer, value in by_layer.items()}
        return logs
