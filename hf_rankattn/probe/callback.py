"""Rank metrics in the log of a training run."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from .attention import measure_attention
from .batches import Inputs, plain
from .collapse import measure_collapse
from .logits import measure_logits
from .weights import measure_weights


COLLAPSE = ("relative_residual", "residual_norm", "token_cosine")
CHEAP = ("stable_rank", "participation_ratio", "argmax_coverage", "row_entropy")
FULL = ("numerical_rank", "effective_rank", "energy_rank")
SPECTRA = ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "energy_rank")
KNOWN = (
    *COLLAPSE,
    *CHEAP,
    *FULL,
    *(f"logits/{name}" for name in (*SPECTRA, "logit_std")),
    *(f"weights/{name}" for name in SPECTRA),
)


class RankCallback(TrainerCallback):
    """Logs rank metrics during a `Trainer` run, to whatever `report_to` says, and to `trainer.state.log_history`.

    Args:
        every (`int`): Measure every so many optimiser steps, and before the first and after the last.
        inputs (*optional*):
            What to measure on: a batch, a list of batches, or a DataLoader. By default the first `max_examples` examples
            of the first training batch, which are kept; then a measurement before the first step is not possible.
        metrics (`Sequence[str]`, *optional*):
            Of token states: `relative_residual`, `residual_norm`, `token_cosine`. Of attention maps: `stable_rank`,
            `participation_ratio`, `argmax_coverage`, `row_entropy`, and from singular values, which take time,
            `numerical_rank`, `effective_rank`, `energy_rank`. With the prefix `logits/` or `weights/`, the rank metrics
            of row-centred logits and of query-key weights.
        per_layer (`bool`, *optional*): Log each layer under `rank/<metric>/layer_<i>` besides the mean over layers.
        max_examples (`int`, *optional*, defaults to 8): How many examples of the training batch to keep.

    Training is not disturbed: no random number is drawn, no mode of a module changed, and the losses are those of a run
    without the callback to the last bit. Every process measures; each on its own first batch where `inputs` is not
    given. What is logged is the mean over heads and examples, `rank/<metric>` the mean over layers, and for
    metrics of token states the value after the last layer.
    """

    def __init__(
        self,
        every: int = 100,
        inputs: Inputs | None = None,
        metrics: Sequence[str] = ("relative_residual", "token_cosine", "participation_ratio", "argmax_coverage"),
        per_layer: bool = True,
        max_examples: int = 8,
    ):
        if every < 1 or max_examples < 1:
            raise ValueError(f"`every` and `max_examples` must be at least 1, got {every} and {max_examples}.")
        if isinstance(metrics, str) or not metrics:
            raise ValueError(f"`metrics` must be a list of names, got {metrics!r}.")
        if unknown := [name for name in metrics if name not in KNOWN]:
            raise ValueError(f"unknown metrics {unknown}; there are {', '.join(KNOWN)}.")
        self.every, self.metrics, self.per_layer, self.max_examples = every, tuple(metrics), per_layer, max_examples
        # read once: a loader would draw a random number whenever it is read, and a generator is read only once
        with torch.random.fork_rng(devices=[]):
            self.given = [inputs] if isinstance(inputs, Mapping) else None if inputs is None else list(inputs)
        self.inputs: Inputs | None = self.given
        self.last_step = -1
        self.handler: CallbackHandler | None = None
        self.hook: Any = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.handler, self.last_step, self.inputs = calling_handler(), -1, self.given
        if self.inputs is not None:
            self.log(args, state, control, model)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        # not before: an evaluation may come first
        if self.inputs is None and self.hook is None:
            self.hook = plain(model).register_forward_pre_hook(self.keep_first_batch, with_kwargs=True)

    def keep_first_batch(self, module, args, kwargs) -> None:
        names = [name for name in inspect.signature(module.forward).parameters if name not in ("self", "kwargs")]
        batch: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {
            name: value.detach() for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim
        }
        if tensors.get("input_ids", torch.empty(0)).ndim == 3:  # choices are texts of their own
            tensors = {name: value.flatten(0, 1) for name, value in tensors.items() if value.ndim == 3}
        mask = tensors.get("attention_mask")
        if mask is not None and mask.ndim == 2:
            enough = mask.bool().sum(-1) > 1  # one token has no others to be equal to
            tensors = {name: value[enough] for name, value in tensors.items() if len(value) == len(enough)}
        if not all(len(value) for value in tensors.values()):
            return
        self.inputs = {name: value[: self.max_examples].clone() for name, value in tensors.items()}
        self.hook.remove()
        self.hook = None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 and self.inputs is not None:
            self.log(args, state, control, model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        if self.inputs is not None and self.last_step != state.global_step:
            self.log(args, state, control, model)
        self.handler = None

    def log(self, args, state, control, model) -> None:
        """What `Trainer.log` does, which callbacks have no way to call."""
        self.last_step = state.global_step
        logs = self.measure(model)
        state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
        wanted = control.should_log  # a log resets it, and would swallow the loss of this step
        assert self.handler is not None
        self.handler.on_log(args, state, control, logs)
        control.should_log = wanted

    def measure(self, model) -> dict[str, float]:
        """The metrics of a model now, under the names they are logged by."""
        assert self.inputs is not None
        tables: dict[str, pd.DataFrame] = {}
        if set(self.metrics) & set(COLLAPSE):
            states = measure_collapse(model, self.inputs, variants=("transformer",))
            tables |= dict.fromkeys(COLLAPSE, states)
        if wanted := set(self.metrics) & {*CHEAP, *FULL}:
            maps = measure_attention(model, self.inputs, metrics="full" if wanted & set(FULL) else "cheap")
            tables |= dict.fromkeys((*CHEAP, *FULL), maps)
        if any(name.startswith("logits/") for name in self.metrics):
            logits = measure_logits(model, self.inputs)
            tables |= {f"logits/{name}": logits for name in (*SPECTRA, "logit_std")}
        if any(name.startswith("weights/") for name in self.metrics):
            weights = measure_weights(model)
            tables |= {f"weights/{name}": weights for name in SPECTRA}
        logs: dict[str, float] = {}
        for name in self.metrics:
            table = tables[name]
            by_layer = table[table.metric == name.split("/")[-1]].groupby("layer").value.mean()
            logs[f"rank/{name}"] = float(by_layer.iloc[-1] if name in COLLAPSE else by_layer.mean())
            if self.per_layer:
                logs |= {f"rank/{name}/layer_{layer}": float(value) for layer, value in by_layer.items()}
        return logs


def calling_handler() -> CallbackHandler:
    """The handler that is calling a callback now.

    transformers tells callbacks of logs but gives them no way to log; the handler, which does, is only to be found among
    the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(handler := frame.f_locals.get("self"), CallbackHandler):
            return handler
        frame = frame.f_back
    raise ValueError("RankCallback must be called by a transformers Trainer: pass it in `callbacks`.")
