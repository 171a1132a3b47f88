"""Calibration batches for the model below its head, and the masks of their real tokens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ..families.architectures import base_of, family_of
from ..files.running import Inputs, batches_of, forward_names


def calibration_batches(base: PreTrainedModel, calibration: Inputs) -> Iterator[dict[str, torch.Tensor]]:
    """Batches for the model below its head; the choices of a multiple-choice batch become separate texts."""
    accepted, limit = forward_names(base), family_of(base).longest(base.config)
    for batch in batches_of(base, calibration):
        if "decoder_input_ids" in accepted and not {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & set(
            batch
        ):
            raise ValueError(
                f"{type(base).__name__} has a decoder, and the calibration batch has no text for it: add `decoder_input_ids`."
            )
        if strangers := sorted({"mems", "perm_mask", "target_mapping", "past_key_values"} & set(batch)):
            raise ValueError(
                f"calibrate on plain texts: the batch has {', '.join(strangers)}, which change the keys that a row sees."
            )
        ids = batch.get("input_ids")
        if ids is not None and (ids.ndim < 2 or not ids.shape[-1]):
            raise ValueError(f"`input_ids` must be (batch, n) with at least one token, got shape {tuple(ids.shape)}.")
        if ids is not None and ids.ndim == 3:
            batch = {name: value.flatten(0, 1) for name, value in batch.items()}
        if limit and ids is not None and ids.shape[-1] > limit:
            raise ValueError(
                f"the calibration has texts of {ids.shape[-1]} tokens, and the model has {limit} positions: truncate them "
                f"(`truncation=True, max_length={limit}`)."
            )
        # a tensor of inference mode cannot be saved for a backward pass
        yield {name: value.clone() if value.is_inference() else value for name, value in batch.items()}


@contextmanager
def same_draws() -> Iterator[None]:
    """The same random numbers in each of these contexts: ViT-MAE draws the patches that it hides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def in_pieces(batch: dict[str, torch.Tensor], rows: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """The batch, `rows` texts at a time (all of them if None); tensors that texts share, such as position ids, are passed on whole.

    >>> [piece["input_ids"].tolist() for piece in in_pieces({"input_ids": torch.arange(3)[:, None]}, rows=2)]
    [[[0], [1]], [[2]]]
    """
    names = ("input_ids", "inputs_embeds", "pixel_values", "input_values")
    texts = next((batch[name] for name in names if name in batch), None)
    if texts is None or rows is None:
        yield batch
        return
    for start in range(0, len(texts), rows):
        yield {
            name: value[start : start + rows] if value.ndim and len(value) == len(texts) else value
            for name, value in batch.items()
        }


def real_tokens(
    batch: Mapping[str, torch.Tensor], shape: tuple[int, ...], name: str = "attention_mask"
) -> torch.Tensor:
    """The mask (batch, n) of the tokens that are not padding; `name` is its entry in the batch."""
    mask = batch.get(name)
    if mask is None and name == "attention_mask" and "input_mask" in batch:
        mask = 1 - batch["input_mask"]  # XLNet's own mask has ones for padding
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    if tuple(mask.shape) != shape:
        raise ValueError(f"calibration takes masks of shape (batch, n), here {shape}, got {tuple(mask.shape)}.")
    return mask.bool().cpu()


def with_decoder_texts(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch, in which the decoder of an encoder-decoder model reads the text of the encoder."""
    if "decoder_input_ids" not in forward_names(base_of(model)) or "input_ids" not in batch:
        return batch
    return {**batch, "decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
