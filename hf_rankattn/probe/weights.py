"""How much query-key rank the weights of a model hold, head by head."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pandas as pd
import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..families.architectures import attention_of, family_of, layers_of
from ..measure import factor_spectrum
from ..measure.spectrum import spectrum_metrics
from .batches import probing
from .tables import LongTable


def rank_limit(config, width: int, rotated: bool = False) -> int:
    """The largest rank that a head with queries of this width can have in its weights, or in its logits if rotary positions
    rotate its queries and keys (`rotated`).

    The hidden size and the latent of DeepSeek's queries bound the form of a head at a single distance of two tokens. Over all
    distances the rotated features reach their own width, and only the others are bounded (see `theory.gqa_ranks`).
    """
    if not getattr(config, "kv_lora_rank", None):
        return width if rotated else min(config.hidden_size, width)
    nope, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.q_lora_rank or width
    content, source = min(nope, config.kv_lora_rank), min(latent, config.hidden_size)
    return min(content, source) + rope if rotated else min(content + rope, source)


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Load the weights of an offloaded module; other modules are not changed."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        yield


class PackedWeightsError(ValueError):
    """The weights are packed integers of a quantised model."""


def form_factors(model: PreTrainedModel, layer: int, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """W_Q and W_K of every head of a layer, each (heads, hidden, width), or a `ValueError` for weights without a spectrum."""
    attention = attention_of(model, module)
    if any(hasattr(part, "base_layer") or hasattr(part, "lora_A") for part in attention.modules()):
        raise ValueError(
            f"layer {layer} has an adapter beside its weights: merge it first (model.merge_and_unload() of PEFT)."
        )
    with present(attention):
        weights = [part.weight for part in attention.modules() if hasattr(part, "weight")]
        if any(not isinstance(weight, torch.Tensor) or not weight.is_floating_point() for weight in weights):
            raise PackedWeightsError(
                f"the weights of layer {layer} are quantised, and packed integers have no spectrum. Measure the model "
                "before it was quantised, or model.dequantize(); residuals and maps can be measured as it is."
            )
        factors = (factor.detach() for factor in family_of(model).projections.query_key(module, model.config))
        # a DTensor holds only the shard of this process
        query, key = (factor.full_tensor() if isinstance(factor, DTensor) else factor.clone() for factor in factors)
    if not (bool(torch.isfinite(query).all()) and bool(torch.isfinite(key).all())):
        raise ValueError(f"the query and key weights of layer {layer} hold NaN or Inf.")
    return query, key


@probing
def measure_weights(
    model: PreTrainedModel, rtol: float = 1e-2, energy: float = 0.9, spectra: bool = False
) -> pd.DataFrame:
    """Rank metrics of the bilinear form `W_Q W_K^T` of every head, without biases, positions and norms of queries.

    Args:
        model: A model of a family in the table of architectures.
        rtol (`float`, *optional*, defaults to 0.01): Tolerance of `numerical_rank`, relative to the largest value.
        energy (`float`, *optional*, defaults to 0.9): The share of squared singular values that `energy_rank` keeps.
        spectra (`bool`, *optional*):
            Add a column `component`, and rows of the metric `energy_share`: the share of squared singular values of each
            component, in descending order.

    The spectra are those of the d x d forms, computed from their factors. `rank_limit` is the largest rank for this
    geometry: the width of a head, and for multi-head latent attention
    `min(q_lora_rank, min(qk_nope_head_dim, kv_lora_rank) + qk_rope_head_dim)`.

    Returns a long table with the columns `model, layer, head, metric, value`. Layers that share weights have equal rows.

    Example:

    ```python
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import measure_weights

    >>> table = measure_weights(BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)))
    >>> bool(table[table.metric == "numerical_rank"].value.max() <= 16)
    True
    ```
    """
    table = LongTable(model, "layer", "head", *(["component"] if spectra else []))
    for layer, module in enumerate(layers_of(model)):
        query, key = form_factors(model, layer, module)
        singular = factor_spectrum(query, key)
        metrics = spectrum_metrics(singular, rtol, energy)
        metrics["rank_limit"] = torch.full_like(metrics["stable_rank"], rank_limit(model.config, query.shape[-1]))
        table.add_heads(metrics, layer, singular if spectra else None)
    return table.finish()
