"""How many parameters a head geometry costs, which geometries cost the same, and whether all parameters are finite."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel


class ParameterCounts(NamedTuple):
    """Parameters in both conventions; `published` and `query_key` have one entry per layer."""

    published: list[int]
    query_key: list[int]
    live: int


def parameter_counts(model: PreTrainedModel | PreTrainedConfig) -> ParameterCounts:
    """Count parameters in the convention of the papers, and all trainable parameters.

    `published` is `qk_rank * hidden_size * num_attention_heads` for each layer: one of the four projections, without
    biases. `query_key` is what the queries and keys of the layer have as weights, also those of cross-attention: twice that
    for each attention. `live` is every
    trainable number of the model, shared ones counted once. A configuration is counted without building its weights.

    >>> from hf_rankattn import RankEncoderConfig, parameter_counts
    >>> counts = parameter_counts(RankEncoderConfig(input_dim=64, num_attention_heads=4))
    >>> counts.published, counts.live
    ([4096], 280898)
    """
    if isinstance(model, PreTrainedConfig):
        with torch.device("meta"):
            return parameter_counts(AutoModel.from_config(model))
    if not hasattr(getattr(model, "config", None), "head_geometry"):
        raise ValueError(
            f"parameter_counts takes a rank model or its config, got a {type(model).__name__}. Load the checkpoint with "
            "the Rank class of its family."
        )
    layers = [model.config.head_geometry(layer) for layer in range(model.config.num_hidden_layers)]
    published = [heads.qk_rank * model.config.hidden_size * heads.num_heads for heads in layers]
    return ParameterCounts(
        published=published,
        query_key=[2 * count * (1 + getattr(model.config, "add_cross_attention", False)) for count in published],
        live=sum(weight.numel() for weight in nn.Module.parameters(model) if weight.requires_grad),
    )


def equal_budget_grid(budget: int, hidden_size: int, ranks: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The head geometries that spend one `budget` of `qk_rank * hidden_size * num_attention_heads` per layer.

    Each entry holds keyword arguments for a rank config, with value heads as wide as the query-key rank. Without
    `ranks`, all powers of two up to the hidden size that divide the budget are taken.

    >>> equal_budget_grid(64**2, hidden_size=64, ranks=[64, 16])
    [{'qk_rank': 64, 'v_head_dim': 64, 'num_attention_heads': 1}, {'qk_rank': 16, 'v_head_dim': 16, 'num_attention_heads': 4}]
    """
    for name, value in (("budget", budget), ("hidden_size", hidden_size)):
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    budget, hidden_size = int(budget), int(hidden_size)
    if ranks is None:
        powers = [2**k for k in range(hidden_size.bit_length()) if 2**k <= hidden_size]
        ranks = [rank for rank in powers if budget % (rank * hidden_size) == 0]
        if not ranks:
            raise ValueError(
                f"no power of two gives a whole number of heads: budget={budget} must be a multiple of hidden_size={hidden_size}."
            )
    if not len(ranks):
        raise ValueError("`ranks` is empty: leave it out for all powers of two that fit.")
    for rank in ranks:
        if rank < 1 or budget % (rank * hidden_size):
            fitting = [rank for rank in range(1, hidden_size + 1) if budget % (rank * hidden_size) == 0]
            raise ValueError(
                f"rank {rank} does not spend the budget: {budget} / ({rank} * {hidden_size}) heads is not a whole number. "
                f"These ranks do: {', '.join(map(str, fitting)) or 'none'}."
            )
    return [
        {"qk_rank": int(rank), "v_head_dim": int(rank), "num_attention_heads": budget // (int(rank) * hidden_size)}
        for rank in ranks
    ]


def check_finite_weights(model: PreTrainedModel, what: str) -> None:
    """Refuse NaN and Inf anywhere in the weights and buffers of a model; offloaded ones are not there to be checked."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        # in pieces, because isfinite makes copies of what it gets, and embeddings are most of a small model
        if not all(bool(torch.isfinite(piece).all()) for piece in tensor.flatten().split(2**20)):
            raise ValueError(f"{name} of {what} holds NaN or Inf: only finite weights are converted and exported.")
