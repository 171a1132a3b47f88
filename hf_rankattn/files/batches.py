"""From texts to batches of tokens, and random batches for any model."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..families.architectures import family_of
from .checkpoints import one_line


logger = logging.get_logger(__name__)
Batch = dict[str, torch.Tensor]
# a text, a pair of texts, or the words of a text
Text = str | tuple[str, str] | list[str]
BATCH = 8
SOUNDS = ("input_values", "input_features")


class UnfitTokenizer(ValueError):
    """The tokenizer belongs to another model, knows no words, or fails."""


def longest(config) -> int | None:
    """The number of positions that a model has, or None if there is no limit."""
    return family_of(config).longest(config)


def encode(tokenizer, texts: Sequence[Text], limit: int, **options) -> Any:
    """One padded batch of texts, truncated to `limit` tokens; raises [`UnfitTokenizer`] if the tokenizer fails."""
    options = {"padding": True, "truncation": True, "max_length": limit, "return_tensors": "pt", **options}
    if isinstance(texts[0], tuple):
        columns = [list(column) for column in zip(*texts, strict=True)]
    else:
        columns, options["is_split_into_words"] = [list(texts)], isinstance(texts[0], list)
    try:
        return tokenizer(*columns, **options)
    except BaseException as error:  # the Rust code of tokenizers raises panics, which are not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UnfitTokenizer(f"the tokenizer fails on the texts: {one_line(error)}") from error


def padded_batches(tokenizer, texts: Sequence[Text], limit: int, size: int = BATCH, **options) -> list[Batch]:
    """Batches of `size` texts each, truncated to `limit` tokens."""
    starts = range(0, len(texts), size)
    return [dict(encode(tokenizer, texts[start : start + size], limit, **options)) for start in starts]


class EndlessBatches:
    """Batches of texts without end, tokenised and changed by `prepare` when they are read.

    `seed` determines the order of each pass over the texts.
    """

    def __init__(
        self,
        tokenizer,
        texts: Sequence[str],
        limit: int,
        seed: int,
        size: int = BATCH,
        prepare: Callable[[Batch], Batch] = dict,
    ):
        self.prepare = prepare
        self.tokenizer, self.texts, self.limit, self.seed, self.size = tokenizer, texts, limit, seed, size

    def order(self) -> Iterator[int]:
        random = np.random.default_rng(self.seed)
        while True:
            yield from random.permutation(len(self.texts)).tolist()

    def __iter__(self) -> Iterator[Batch]:
        order = self.order()
        while True:
            texts = [self.texts[place] for place in islice(order, self.size)]
            yield self.prepare(dict(encode(self.tokenizer, texts, self.limit)))


def text_batches(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], config, length: int = 128, batch_size: int = BATCH
) -> list[Batch]:
    """Batches to measure the model of `config` on. Texts of a single token are left out, with a warning."""
    if length < 2 or batch_size < 1:
        raise ValueError(f"`length` must be at least 2 and `batch_size` at least 1, got {length} and {batch_size}.")
    check_length(config, length)
    kept = [text for text in texts if len(encode(tokenizer, [text], length, padding=False)["input_ids"][0]) > 1]
    if len(kept) < len(texts):
        logger.warning(f"{len(texts) - len(kept)} of {len(texts)} texts have a single token and are left out.")
    if not kept:
        raise ValueError("no text has two tokens: there is nothing to measure.")
    padding = tokenizer.pad_token is not None
    batches = padded_batches(tokenizer, kept, length, batch_size if padding else 1, padding=padding)
    check_tokens(tokenizer, batches, config)
    if getattr(config, "is_encoder_decoder", False):  # the decoder reads the text, too
        return [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in batches]
    return batches


def check_length(config, length: int) -> None:
    limit = longest(config)
    if limit and length > limit:
        raise ValueError(f"`length`={length} is more than the {limit} positions that the model has.")


def check_tokens(tokenizer: PreTrainedTokenizerBase, batches: Sequence[Batch], config) -> None:
    """Refuse the tokenizer of another model, and a tokenizer without words."""
    ids = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in batches])
    if int(ids.max()) >= config.vocab_size:
        raise UnfitTokenizer(
            f"the tokenizer does not belong to the model: it gives the id {int(ids.max())}, and the largest id of the "
            f"model is {config.vocab_size - 1}."
        )
    unknown = float(torch.isin(ids, torch.tensor(tokenizer.all_special_ids)).float().mean())
    if unknown > 0.5 and len(ids) > 16 * len(batches):
        raise UnfitTokenizer(
            f"{unknown:.0%} of the text is unknown to the tokenizer: add the tokenizer files of the model to the "
            "checkpoint, or give a text in a language that the tokenizer knows."
        )


def random_batches(config, examples: int, length: int, batch_size: int, seed: int) -> list[Batch]:
    """Batches of uniformly random ids, or of normally distributed images, sounds or unit points, whichever the model of
    `config` reads. Images and sounds have the size of the model, and `length` tokens where that is free."""
    if examples < 1 or batch_size < 1 or length < 2:
        raise ValueError(f"got {examples} examples of {length} tokens: give at least 1 of at least 2.")
    random = np.random.default_rng(np.random.SeedSequence([seed, 1]))

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((examples, *shape))).float()

    def ids(config, length: int) -> torch.Tensor:
        check_length(config, length)
        return torch.from_numpy(random.integers(0, config.vocab_size, (examples, length)))

    wanted, text = main_input(config), config.get_text_config()
    if dimension := getattr(config, "input_dim", None):
        everything = {"points": torch.nn.functional.normalize(normal(length, dimension), dim=-1)}
    elif wanted in ("input_ids", "points") and getattr(text, "vocab_size", None):
        everything = {"input_ids": ids(text, length)}
        # a model such as CLIP always reads both, and a language model with eyes reads texts without images
        if image_size(getattr(config, "vision_config", None)) and not placeholder(config):
            everything["pixel_values"] = normal(*image_size(config.vision_config))
    elif wanted == "pixel_values" and image_size(config):
        everything = {wanted: normal(*image_size(config))}
    elif wanted in SOUNDS and (size := sound_size(config, wanted, length)):
        everything = {wanted: normal(*size)}
    else:
        raise ValueError(
            f"random inputs cannot be made for a model of type {config.model_type}, which reads {wanted}."
        )
    if getattr(config, "is_encoder_decoder", False):
        limit = getattr(config, "max_target_positions", None) or length
        everything["decoder_input_ids"] = (
            everything[wanted] if wanted == "input_ids" else ids(text, min(length, limit))
        )
    return [
        {name: value[start : start + batch_size] for name, value in everything.items()}
        for start in range(0, examples, batch_size)
    ]


def main_input(config) -> str:
    """The name of the first input of the base model of a config."""
    model: Any = AutoModel._model_mapping.get(type(config), None)
    model = model[0] if isinstance(model, tuple | list) else model
    return getattr(model, "main_input_name", "input_ids")


def placeholder(config) -> bool:
    """Whether texts have a token where an image belongs."""
    return any(getattr(config, name, None) is not None for name in ("image_token_id", "image_token_index"))


def image_size(config) -> tuple[int, ...]:
    """(channels, height, width), with the number of frames in front for videos; empty if the config does not say."""
    size = getattr(config, "image_size", None)
    if not size:
        return ()
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", None) or 3
    frames = getattr(config, "num_frames", None)
    return (frames, channels, height, width) if frames else (channels, height, width)


def sound_size(config, wanted: str, length: int) -> tuple[int, ...]:
    """The size of an example of a model of sounds, of `length` tokens where that is free; empty if the config does not say."""
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if wanted == "input_values":
        if bins:  # a spectrogram of fixed size
            return config.max_length, bins
        if not getattr(config, "conv_kernel", None):
            return ()
        samples = length
        for kernel, stride in reversed(list(zip(config.conv_kernel, config.conv_stride, strict=True))):
            samples = (samples - 1) * stride + kernel
        return (samples,)
    if width := getattr(config, "feature_projection_input_dim", None):
        return length, width
    if width := getattr(config, "input_feat_per_channel", None):
        return length * 2**config.num_conv_layers, width * config.input_channels
    if bins and positions:  # as Whisper, which reads half a minute and halves its frames
        return bins, 2 * positions
    if bins and (factor := getattr(config, "subsampling_factor", None)):
        return length * factor, bins
    return ()
