"""From texts to batches of tokens, and random batches for models that read no text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..families.architectures import family_of
from .checkpoints import one_line


logger = logging.get_logger(__name__)
Batch = dict[str, torch.Tensor]
# a text, a pair of texts, or the words of a text
Text = str | tuple[str, str] | list[str]
BATCH = 8


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
    """Batches of uniformly random ids, of random images, or of random unit points, whichever the model reads."""
    if examples < 1 or batch_size < 1 or length < 2:
        raise ValueError(f"got {examples} examples of {length} tokens: give at least 1 of at least 2.")
    check_length(config, length)
    random = np.random.default_rng(np.random.SeedSequence([seed, 1]))
    if getattr(config, "image_size", None):
        images = random.standard_normal((examples, config.num_channels, config.image_size, config.image_size))
        everything = {"pixel_values": torch.from_numpy(images).float()}
    elif getattr(config, "input_dim", None):
        points = torch.from_numpy(random.standard_normal((examples, length, config.input_dim))).float()
        everything = {"points": torch.nn.functional.normalize(points, dim=-1)}
    else:
        everything = {"input_ids": torch.from_numpy(random.integers(0, config.vocab_size, (examples, length)))}
    return [
        {name: value[start : start + batch_size] for name, value in everything.items()}
        for start in range(0, examples, batch_size)
    ]
