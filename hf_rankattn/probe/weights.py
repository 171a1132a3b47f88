"""How much query-key rank the weights of a model hold, head by head."""

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..measure import factor_spectrum
from ..measure.spectrum import spectrum_metrics
from .architectures import family_of, layers_of, submodule


def rank_limit(config, query: torch.Tensor) -> int:
    """The largest rank that the bilinear form of a head can have."""
    hidden, width = query.shape[-2:]
    limit = min(hidden, width)
    if getattr(config, "kv_lora_rank", None):
        limit = min(hidden, min(config.qk_nope_head_dim, config.kv_lora_rank) + config.qk_rope_head_dim)
        limit = min(limit, config.q_lora_rank or limit)
    return limit


def measure_weights(model: PreTrainedModel, rtol: float = 1e-2, energy: float = 0.9) -> pd.DataFrame:
    """Rank metrics of the bilinear form `W_Q W_K^T` of every head, biases and positions left aside.

    Args:
        model: A model of a family in the table of architectures.
        rtol (`float`, *optional*, defaults to 0.01): Tolerance of `numerical_rank`, relative to the largest value.
        energy (`float`, *optional*, defaults to 0.9): The share of squared singular values that `energy_rank` keeps.

    The spectra are those of the d x d forms, computed from their factors. `rank_limit` is the rank that the geometry
    allows: the width of a head, and for multi-head latent attention
    `min(q_lora_rank, min(qk_nope_head_dim, kv_lora_rank) + qk_rope_head_dim)`.

    Returns a long table with the columns `model, layer, head, metric, value`. Layers that share weights have equal rows.
    """
    model = getattr(model, "_orig_mod", model)
    family, frames = family_of(model), []
    for layer, module in enumerate(layers_of(model)):
        query, key = family.query_key(submodule(module, family.attention), model.config)
        if not (bool(torch.isfinite(query).all()) and bool(torch.isfinite(key).all())):
            raise ValueError(f"the query and key weights of layer {layer} hold NaN or Inf.")
        singular = factor_spectrum(query.detach(), key.detach())
        metrics = spectrum_metrics(singular, rtol, energy)
        metrics["rank_limit"] = torch.full((len(query),), rank_limit(model.config, query), dtype=singular.dtype)
        columns = {name: value.double().cpu().numpy() for name, value in metrics.items()}
        wide = pd.DataFrame(columns).rename_axis(index="head", columns="metric")
        frames.append(wide.stack().rename("value").reset_index().assign(layer=layer))
    table = pd.concat(frames, ignore_index=True).assign(model=model.config.model_type)
    return table[["model", "layer", "head", "metric", "value"]]
