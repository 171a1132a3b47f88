"""What the probe is fed: one batch, a list of batches or a DataLoader, on the device of the model."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel


Inputs = Mapping[str, torch.Tensor] | Iterable[Mapping[str, torch.Tensor]]


def batches_of(model: PreTrainedModel, inputs: Inputs) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of `inputs` with what the model's forward takes, on its device; labels and the like are left out."""
    batches: Iterable[Mapping[str, torch.Tensor]] = [inputs] if isinstance(inputs, Mapping) else inputs
    accepted = set(inspect.signature(model.forward).parameters)
    empty = True
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"a batch must be a dict of tensors such as a tokenizer returns, got a {type(batch).__name__}."
            )
        kept = {name: value.to(model.device) for name, value in batch.items() if name in accepted}
        if not kept:
            raise ValueError(f"no entry of the batch is an input of {type(model).__name__}: got {', '.join(batch)}.")
        empty = False
        yield kept
    if empty:
        raise ValueError("there is no batch to measure: `inputs` is empty.")


def real_tokens(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The mask of a batch, 1 for tokens, or None where nothing is padded; refuses what has nothing to measure."""
    mask = batch.get("attention_mask")
    tokens = batch.get("input_ids", batch.get("points"))
    if tokens is not None:
        limit = getattr(model.config, "max_position_embeddings", None) or 0
        if 0 < limit < tokens.shape[1]:
            raise ValueError(
                f"the batch has {tokens.shape[1]} tokens, but the model has {limit} positions: truncate it."
            )
        if tokens.shape[1] < 2:
            raise ValueError("one token has no others to be equal to: give texts of at least two tokens.")
    if mask is None:
        return None
    lengths = mask.bool().sum(-1)
    if bool((lengths < 2).any()):
        rows = torch.nonzero(lengths < 2).flatten().tolist()
        raise ValueError(f"examples {rows} of the batch have fewer than two tokens that are not padding.")
    return None if bool(mask.bool().all()) else mask


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module goes back to the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
