"""How much query-key rank the weights of a model hold, head by head."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pandas as pd
import torch
from accelerate.utils import align_module_device
from torch import nn
from transformers import PreTrainedModel

from ..measure import factor_spectrum
from ..measure.spectrum import spectrum_metrics
from .architectures import family_of, layers_of, submodule
from .batches import plain


def rank_limit(config, width: int, rotated: bool = False) -> int:
    """The largest rank that a head with queries of this width can have, in its weights or, `rotated`, in its logits.

    The latent of DeepSeek's queries bounds the form of a head at any one distance of two tokens. Over all distances the
    rotary part is turned after the latent, fills its own width, and only the rest is bounded.
    """
    limit = min(config.hidden_size, width)
    if getattr(config, "kv_lora_rank", None):
        nope, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.q_lora_rank or width
        content = min(nope, config.kv_lora_rank)
        limit = min(limit, min(content, latent) + rope if rotated else min(content + rope, latent))
    return limit


def spectrum_rows(
    spectrum: torch.Tensor, metrics: dict[str, torch.Tensor], index: pd.Index, spectra: bool
) -> pd.DataFrame:
    """A long table of metrics (...), and of each component's share of the energy of spectra (..., r) if wanted."""
    columns = {name: value.flatten().cpu().double().numpy() for name, value in metrics.items()}
    wide = pd.DataFrame(columns, index=index).rename_axis(columns="metric")
    rows = wide.stack().rename("value").reset_index()
    if not spectra:
        return rows
    share = spectrum.square() / spectrum.square().sum(-1, keepdim=True)
    components = pd.RangeIndex(share.shape[-1], name="component")
    shares = pd.DataFrame(share.flatten(0, -2).cpu().double().numpy(), index=index, columns=components)
    return pd.concat([rows, shares.stack().rename("value").reset_index().assign(metric="energy_share")])


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Bring the weights of a module back from where offloading put them; nothing happens to others."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        yield


class PackedWeightsError(ValueError):
    """The weights are integers that stand for others."""


def form_factors(model: PreTrainedModel, layer: int, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """W_Q and W_K of every head of a layer, each (heads, hidden, width), or a `ValueError` that says what they are."""
    family = family_of(model)
    attention = submodule(module, family.attention)
    assert attention is not None
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
        query, key = (factor.detach().clone() for factor in family.query_key(attention, model.config))
    if not (bool(torch.isfinite(query).all()) and bool(torch.isfinite(key).all())):
        raise ValueError(f"the query and key weights of layer {layer} hold NaN or Inf.")
    return query, key


def measure_weights(
    model: PreTrainedModel, rtol: float = 1e-2, energy: float = 0.9, spectra: bool = False
) -> pd.DataFrame:
    """Rank metrics of the bilinear form `W_Q W_K^T` of every head; biases, positions and norms of queries are left aside.

    Args:
        model: A model of a family in the table of architectures.
        rtol (`float`, *optional*, defaults to 0.01): Tolerance of `numerical_rank`, relative to the largest value.
        energy (`float`, *optional*, defaults to 0.9): The share of squared singular values that `energy_rank` keeps.
        spectra (`bool`, *optional*):
            Add a column `component`, and rows of the metric `energy_share`: the share of squared singular values of each
            component, in descending order.

    The spectra are those of the d x d forms, computed from their factors. `rank_limit` is the rank that the geometry
    allows: the width of a head, and for multi-head latent attention
    `min(q_lora_rank, min(qk_nope_head_dim, kv_lora_rank) + qk_rope_head_dim)`.

    Returns a long table with the columns `model, layer, head, metric, value`. Layers that share weights have equal rows.

    Example:

    ```python
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import measure_weights

    >>> shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    >>> table = measure_weights(BertModel(BertConfig(**shape)))
    >>> bool(table[table.metric == "numerical_rank"].value.max() <= 16)
    True
    ```
    """
    model, frames = plain(model), []
    for layer, module in enumerate(layers_of(model)):
        query, key = form_factors(model, layer, module)
        singular = factor_spectrum(query, key)
        metrics = spectrum_metrics(singular, rtol, energy)
        metrics["rank_limit"] = torch.full_like(metrics["stable_rank"], rank_limit(model.config, query.shape[-1]))
        index = pd.RangeIndex(len(query), name="head")
        frames.append(spectrum_rows(singular, metrics, index, spectra).assign(layer=layer))
    table = pd.concat(frames, ignore_index=True).assign(model=model.config.model_type)
    columns = ["model", "layer", "head", "metric", "value"]
    return table[[*columns[:3], "component", *columns[3:]] if spectra else columns]
