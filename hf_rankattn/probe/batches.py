"""What the probe is fed: one batch, a list of batches or a DataLoader, on the device of the model."""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)
Inputs = Mapping[str, torch.Tensor] | Iterable[Mapping[str, torch.Tensor]]


def plain(model: Any) -> PreTrainedModel:
    """The module inside what `torch.compile` or data parallelism wraps around a model; a compiled one is said."""
    if hasattr(model, "_orig_mod"):
        logger.warning_once("the model is compiled: what is measured is the module it was compiled from.")
        return plain(model._orig_mod)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return plain(model.module)
    return model


def batches_of(model: PreTrainedModel, inputs: Inputs) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of `inputs` with what the model's forward takes, on its device; labels and the like are left out."""
    if not hasattr(inputs, "__iter__") and not hasattr(inputs, "__getitem__"):
        raise ValueError(f"`inputs` must be a batch, a list of batches or a DataLoader, got {inputs!r}.")
    batches: Iterable[Mapping[str, torch.Tensor]] = [inputs] if isinstance(inputs, Mapping) else inputs
    accepted = set(inspect.signature(model.forward).parameters)
    # the weights of an offloaded model are nowhere until they are used, and its hooks move what it is given
    device = None if model.device.type == "meta" else model.device
    empty = True
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"a batch must be a dict of tensors such as a tokenizer returns, got a {type(batch).__name__}."
            )
        kept = {name: value for name, value in batch.items() if name in accepted and value is not None}
        if not kept:
            raise ValueError(f"no entry of the batch is an input of {type(model).__name__}: got {', '.join(batch)}.")
        if lists := [name for name, value in kept.items() if not isinstance(value, torch.Tensor)]:
            raise ValueError(f"{', '.join(lists)} must be tensors: ask the tokenizer for return_tensors='pt'.")
        empty = False
        yield {name: value.to(device) for name, value in kept.items()}
    if empty:
        raise ValueError("there is no batch to measure: `inputs` is empty.")


def longest(config) -> int | None:
    """How many tokens the position table of a model has room for."""
    limit = getattr(config, "max_position_embeddings", None)
    if getattr(config, "position", None) == "none":
        return None
    if limit is None or limit < 1:  # XLNet's is -1: positions that are relative have no end
        return None
    if config.model_type in ("roberta", "xlm-roberta"):
        limit -= config.pad_token_id + 1  # their positions are counted from the one after the padding index
    return limit


def real_tokens(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The mask of a batch, 1 for tokens, or None where nothing is padded; refuses what has nothing to measure."""
    if "encoder_hidden_states" in batch:
        raise ValueError("cross-attention is not measured: leave `encoder_hidden_states` away.")
    mask = batch.get("attention_mask")
    if mask is None and "input_mask" in batch:  # XLNet's other mask, in which 1 is padding
        mask = 1 - batch["input_mask"].long()
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"`attention_mask` must be (batch, n), 1 for tokens and 0 for padding, got {tuple(mask.shape)}."
        )
    if empty := [name for name, value in batch.items() if value.ndim < 1 or len(value) < 1]:
        raise ValueError(f"{', '.join(empty)} must hold at least one example.")
    tokens = next((batch[name] for name in ("input_ids", "points", "inputs_embeds") if name in batch), None)
    if tokens is not None:
        if tokens.ndim < 2:
            raise ValueError(f"tokens must be (batch, n), got {tuple(tokens.shape)}: add the batch in front.")
        if mask is not None and mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"the mask is {tuple(mask.shape)}, and the tokens are {tuple(tokens.shape[:2])}, examples by tokens."
            )
        limit = longest(model.config)
        if limit and limit < tokens.shape[1]:
            raise ValueError(
                f"the batch has {tokens.shape[1]} tokens, but the model has {limit} positions: truncate it."
            )
        if tokens.shape[0] < 1 or tokens.shape[1] < 2:
            raise ValueError(
                f"the batch is {tuple(tokens.shape[:2])}, examples by tokens: there must be an example, and one token "
                "has no others to be equal to. Give texts of at least two tokens."
            )
    if mask is None:
        return None
    lengths = mask.bool().sum(-1)
    if bool((lengths < 2).any()):
        rows = torch.nonzero(lengths < 2).flatten().tolist()
        raise ValueError(f"examples {rows} of the batch have fewer than two tokens that are not padding.")
    if "queries" in batch:  # they follow the points, and are never padding
        mask = nn.functional.pad(mask, (0, batch["queries"].shape[1]), value=1)
    return None if bool(mask.bool().all()) else mask


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, by one thread; every module goes back to the mode it was in."""
    with owned(model), uncompiled(model):
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def run(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> None:
    """One forward pass for its hooks alone: whatever the config says, it keeps no maps, no states and no cache."""
    unwanted = {"output_attentions": False, "output_hidden_states": False}
    if "use_cache" in inspect.signature(model.forward).parameters:
        unwanted["use_cache"] = False
    model(**{**batch, **unwanted})


_owners: "weakref.WeakKeyDictionary[nn.Module, list[int]]" = weakref.WeakKeyDictionary()
_owners_lock = threading.Lock()


@contextmanager
def owned(model: nn.Module) -> Iterator[None]:
    """Let one thread at a time probe a model; the same thread may do so again inside."""
    thread = threading.get_ident()
    with _owners_lock:
        owners = _owners.setdefault(model, [])
        if owners and owners[-1] != thread:
            raise ValueError(
                "another thread is measuring or ablating this model: hooks of both would mix. Use a copy of the model."
            )
        owners.append(thread)
    try:
        yield
    finally:
        with _owners_lock:
            owners.pop()


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run modules that were compiled in place (`module.compile()`) as they are written: compiled code misses new hooks."""
    compiled = {module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def over_processes(
    measure: Callable[[Mapping[str, torch.Tensor]], pd.DataFrame],
    batches: Iterable[Mapping[str, torch.Tensor]],
    done: Callable[[], object] = lambda: None,
) -> pd.DataFrame:
    """The table of all batches, each measured by one of the processes that run; every process gets the whole table.

    Args:
        measure: From a batch to a table with a column `example` that counts from 0.
        batches: The same batches, in the same order, in every process.
        done: Called after every batch that this process has measured or left to another.

    Batches go round, and what comes out of a batch does not depend on who measured it, so the table is the same for any
    number of processes, to the last bit.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    world = torch.distributed.get_world_size() if distributed else 1
    offset, own = 0, []
    for number, batch in enumerate(batches):
        if number % world == rank:
            own.append((number, measure(batch).assign(example=lambda table, offset=offset: table.example + offset)))
        offset += len(next(iter(batch.values())))
        done()
    gathered: list[list[tuple[int, pd.DataFrame]]] = [own] * world
    if distributed:
        torch.distributed.all_gather_object(gathered, own)
    tables = sorted((entry for entries in gathered for entry in entries), key=lambda entry: entry[0])
    if not tables:
        raise ValueError("there is no batch to measure.")
    return pd.concat([table for _, table in tables], ignore_index=True)
