"""Checks of fields that transformers' own configs take unseen, and that break a model only when it is built or run.

The four model folders hold the same copy of this file, since exported source cannot import across folders.
"""

import math
from dataclasses import fields
from numbers import Integral
from reprlib import repr as brief
from typing import Any

import torch
from transformers.activations import ACT2FN


LARGEST = 2**31 - 1  # beyond any table or layer that can be allocated
MOST_LAYERS = 2**16
MOST_LABELS = 2**24  # transformers writes a name for each
SIZES = (
    "vocab_size",
    "hidden_size",
    "d_model",
    "embedding_size",
    "intermediate_size",
    "d_inner",
    "num_attention_heads",
    "n_head",
    "max_position_embeddings",
    "type_vocab_size",
    "inner_group_num",
    "input_dim",
    "output_dim",
)
RATES = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "classifier_dropout_prob",
    "dropout",
    "summary_last_dropout",
)
SMALL = ("layer_norm_eps", "norm_eps", "initializer_range")
ACTIVATIONS = ("hidden_act", "ff_activation")
# transformers declares these in strings, which its strict configs do not check
SWITCHES = ("output_hidden_states", "output_attentions", "return_dict", "is_encoder_decoder")
PROBLEMS = (None, "regression", "single_label_classification", "multi_label_classification")


def whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_loose_arguments(given: dict[str, Any]) -> None:
    """Refuse arguments that transformers would use before, or without, a look at their types."""
    for name in SWITCHES:
        if not isinstance(given.get(name), bool | None):
            raise ValueError(f"`{name}` is a switch and must be True or False, got {brief(given[name])}.")
    labels = given.get("num_labels", 2)
    labels = 2 if labels is None and given.get("id2label") is not None else labels  # as files may say it
    if not whole(labels) or not 0 <= labels <= MOST_LABELS:
        raise ValueError(f"`num_labels` must be an integer from 0 to {MOST_LABELS}, got {brief(labels)}.")
    for name in ("id2label", "label2id"):
        if not isinstance(given.get(name), dict | None):
            raise ValueError(f"`{name}` must be a dict such as {{0: 'no', 1: 'yes'}}, got {brief(given[name])}.")
    for label in given.get("id2label") or ():
        if not whole(label) and not (isinstance(label, str) and label.isdecimal()):
            raise ValueError(f"the keys of `id2label` are the numbers of the labels, got {brief(label)}.")
    for name in ("dtype", "torch_dtype"):
        dtype = None if given.get(name) == "auto" else given.get(name)
        found = getattr(torch, dtype, "no such name") if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype | None):
            raise ValueError(f"`{name}` must be a dtype of torch or the name of one, got {brief(dtype)}.")
    if not isinstance(given.get("attn_implementation"), str | dict | None):
        raise ValueError(f"`attn_implementation` must be a name, got {brief(given['attn_implementation'])}.")
    if not isinstance(given.get("architectures"), list | tuple | None):
        raise ValueError(f"`architectures` must be a list of class names, got {brief(given['architectures'])}.")
    problem = given.get("problem_type")
    if not isinstance(problem, str | None) or problem not in PROBLEMS:
        raise ValueError(f"`problem_type` must be one of {', '.join(map(repr, PROBLEMS))}; got {brief(problem)}.")
    chunk = given.get("chunk_size_feed_forward", 0)
    if not whole(chunk) or not 0 <= chunk <= LARGEST:
        raise ValueError(f"`chunk_size_feed_forward` must be 0 (no chunks) or a number of tokens, got {brief(chunk)}.")


def check_stock_fields(config) -> None:
    """Refuse sizes, rates and names of which no model can be built, whichever of them the family has."""
    names = {field.name for field in fields(config)}
    present = {name: getattr(config, name) for name in (*SIZES, *RATES, *SMALL, *ACTIVATIONS) if name in names}
    for name, value in present.items():
        if value is None:
            continue
        if name in SIZES and not 1 <= value <= LARGEST:
            raise ValueError(f"`{name}` must be at least 1 and at most {LARGEST}, got {value}.")
        if name in RATES and not 0 <= value <= 1:
            raise ValueError(f"`{name}` is a probability, at least 0 and at most 1, got {value}.")
        if name in SMALL and not 0 <= value < math.inf:
            raise ValueError(f"`{name}` must be a finite number of at least 0, got {value}.")
        if name in ACTIVATIONS and value not in ACT2FN:
            raise ValueError(f"`{name}` must be one of {', '.join(sorted(ACT2FN))}; got {value!r}.")
    if not 0 <= config.num_hidden_layers <= MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers must not be negative, and at most {MOST_LAYERS}, got {config.num_hidden_layers}."
        )
    # BERT and ALBERT have a row for it; torch counts from the end below zero, and some checkpoints say -1
    if "type_vocab_size" in names and config.pad_token_id is not None:
        if not -config.vocab_size <= config.pad_token_id < config.vocab_size:
            raise ValueError(
                f"`pad_token_id`={config.pad_token_id} is not in the vocabulary of {config.vocab_size} tokens."
            )
