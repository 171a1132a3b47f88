"""Running a model: batches are checked and moved to its device, and the model runs in evaluation mode."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..measure.norms import full_precision


Inputs = Mapping[str, torch.Tensor] | Iterable[Mapping[str, torch.Tensor]]
# index inputs, and the field of the config with the number of rows of their table
TABLES = {"input_ids": "vocab_size", "token_type_ids": "type_vocab_size", "position_ids": "max_position_embeddings"}
CONTINUOUS = ("inputs_embeds", "pixel_values", "points", "queries")


def forward_names(model: PreTrainedModel) -> set[str]:
    """The inputs that `model(**batch)` takes by name: where `forward` has `**kwargs`, also those of the parent classes."""
    names = set()
    for forward in (model.forward, *(parent.forward for parent in type(model).__mro__ if hasattr(parent, "forward"))):
        parameters = inspect.signature(forward).parameters.values()
        names |= {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        if not any(entry.kind is entry.VAR_KEYWORD for entry in parameters):
            break
    return names - {"self"}


def check_values(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that the embeddings of the model cannot take."""
    for name, value in batch.items():
        if value.is_meta:
            raise ValueError(f"`{name}` is on the meta device, where it has no values: give a tensor with values.")
        if name in CONTINUOUS and not value.is_floating_point():
            raise ValueError(f"`{name}` must hold floating-point numbers, got {value.dtype}.")
        if name not in TABLES:
            continue
        if value.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"`{name}` must be of dtype torch.int64 or torch.int32, got {value.dtype}.")
        rows = getattr(model.config, TABLES[name], None) or 0
        low, high = map(int, value.aminmax()) if value.numel() else (0, 0)
        if low < 0 or 0 < rows <= high:  # XLNet has -1 rows of positions: they have no limit
            allowed = f"0 to {rows - 1} ({TABLES[name]} is {rows})" if rows > 0 else "at least 0"
            raise ValueError(f"`{name}` must be {allowed}, got values from {low} to {high}.")


def batches_of(model: PreTrainedModel, inputs: Inputs) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of `inputs`, with the entries that the model's forward takes, on its device."""
    if not hasattr(inputs, "__iter__") and not hasattr(inputs, "__getitem__"):
        raise ValueError(f"`inputs` must be a batch, a list of batches or a DataLoader, got {inputs!r}.")
    batches: Iterable[Mapping[str, torch.Tensor]] = [inputs] if isinstance(inputs, Mapping) else inputs
    accepted = forward_names(model)
    # the hooks of an offloaded model move its inputs
    device = None if model.device.type == "meta" else model.device
    empty = True
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ValueError(f"a batch must be a dict of tensors, as tokenizers return, got a {type(batch).__name__}.")
        kept = {name: value for name, value in batch.items() if name in accepted and value is not None}
        if not kept:
            raise ValueError(f"no entry of the batch is an input of {type(model).__name__}: got {', '.join(batch)}.")
        if lists := [name for name, value in kept.items() if not isinstance(value, torch.Tensor)]:
            raise ValueError(f"{', '.join(lists)} must be tensors: ask the tokenizer for return_tensors='pt'.")
        check_values(model, kept)
        empty = False
        yield {name: value.to(device) for name, value in kept.items()}
    if empty:
        raise ValueError("there is no batch to measure: `inputs` is empty.")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and autocast; the mode of every module is restored."""
    with uncompiled(model), full_precision():
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextmanager
def training_only(weights: Collection[nn.Parameter], model: nn.Module) -> Iterator[None]:
    """Within the block these weights, and no others of the model, get gradients, which are dropped at the end."""
    flags = {weight: weight.requires_grad for weight in (*model.parameters(), *weights)}
    try:
        for weight in flags:
            weight.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight, flag in flags.items():
            weight.requires_grad_(flag)
        for weight in weights:
            weight.grad = None


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run modules that were compiled in place (`module.compile()`) without compilation: compiled code misses new hooks."""
    compiled = {module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call
