"""How much query-key rank the weights of a model hold, head by head."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pandas as pd
import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..families.architectures import attention_of, base_of, family_of, layers_of, listed
from ..files.batches import random_batches
from ..files.running import Inputs, batches_of
from ..measure import factor_spectrum
from ..measure.spectrum import spectrum_metrics
from .batches import probing
from .read_weights import query_key, read_layouts, values
from .tables import LongTable


LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")


def rank_limit(config, width: int, rotated: bool = False) -> int:
    """The largest rank that a head with queries of this width can have in its weights, or in its logits if rotary positions
    rotate its queries and keys (`rotated`).

    The hidden size and the latent of DeepSeek's queries bound the form of a head at a single distance of two tokens. Over all
    distances the rotated features reach their own width, and only the others are bounded (see `theory.gqa_ranks`).
    """
    if not getattr(config, "kv_lora_rank", None):
        return width if rotated else min(config.hidden_size, width)
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    latent = getattr(config, "q_lora_rank", None) or width
    content, source = min(nope, config.kv_lora_rank), min(latent, config.hidden_size)
    return min(content, source) + rope if rotated else min(content + rope, source)


def limit_of(attention: nn.Module, config, width: int, hidden: int) -> tuple[int, int]:
    """[`rank_limit`] of the weights and of the logits of an attention module without a row in the table of architectures."""
    config = getattr(attention, "config", config)
    if not all(getattr(config, name, None) for name in LATENT):
        return min(width, hidden), width
    return rank_limit(config, width), rank_limit(config, width, rotated=True)


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Load the weights of an offloaded module; other modules are not changed."""
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        yield


class PackedWeightsError(ValueError):
    """The weights are those of a quantised model: packed integers, or floats of eight bits with scales beside them."""


def check_weights_of(attention: nn.Module, layer: int) -> None:
    """Refuse weights without a spectrum: adapters beside them, and quantised numbers."""
    if any(hasattr(part, "base_layer") or hasattr(part, "lora_A") for part in attention.modules()):
        raise ValueError(
            f"layer {layer} has an adapter beside its weights: merge it first (model.merge_and_unload() of PEFT)."
        )
    weights = [part.weight for part in attention.modules() if hasattr(part, "weight")]
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if any(not weight.is_floating_point() or weight.itemsize < 2 for weight in tensors) or any(
        weight is not None and not isinstance(weight, torch.Tensor) for weight in weights
    ):
        raise PackedWeightsError(
            f"the weights of layer {layer} are quantised, and packed numbers have no spectrum. Measure the model "
            "before it was quantised, or model.dequantize(); residuals and maps can be measured as it is."
        )


def whole_tensors(factors: Iterable[torch.Tensor], layer: int) -> list[torch.Tensor]:
    """Copies of weights; a DTensor holds only the shard of this process."""
    found = [factor.detach() for factor in factors]
    found = [factor.full_tensor() if isinstance(factor, DTensor) else factor.clone() for factor in found]
    if not all(bool(torch.isfinite(factor).all()) for factor in found):
        raise ValueError(f"the attention weights of layer {layer} hold NaN or Inf.")
    return found


def form_factors(model: PreTrainedModel, layer: int, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """W_Q and W_K of every head of a layer, each (heads, hidden, width), or a `ValueError` for weights without a spectrum."""
    attention = attention_of(model, module)
    with present(attention):
        check_weights_of(attention, layer)
        query, key = whole_tensors(listed(model, "these weights").projections.query_key(module, model.config), layer)
    return query, key


def written_factors(value: torch.Tensor, output: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """W_V and W_O^T of every head, each (heads, hidden, v), from (groups * v, hidden) and (hidden, heads * v)."""
    written = output.unflatten(1, (heads, -1)).transpose(0, 1)
    read = value.unflatten(0, (-1, written.shape[-1])).mT
    return read.repeat_interleave(heads // len(read), dim=0), written


@probing
def measure_weights(
    model: PreTrainedModel,
    rtol: float = 1e-2,
    energy: float = 0.9,
    spectra: bool = False,
    inputs: Inputs | None = None,
) -> pd.DataFrame:
    """Rank metrics of the bilinear form `W_Q W_K^T` of every head, without biases, positions and norms of queries.

    The same metrics with the prefix `value_` are those of the map `W_V W_O` by which a head writes what it reads.

    Args:
        model: A model of any type with linear maps in its attention.
        rtol (`float`, *optional*, defaults to 0.01): Tolerance of `numerical_rank`, relative to the largest value.
        energy (`float`, *optional*, defaults to 0.9): The share of squared singular values that `energy_rank` keeps.
        spectra (`bool`, *optional*):
            Add a column `component`, and rows of the metric `energy_share`: the share of squared singular values of each
            component, in descending order.
        inputs (*optional*):
            A batch for models without a row in the table of architectures: one forward pass finds which rows of which
            weights belong to a head. By default a few random tokens.

    The spectra are those of the d x d forms, computed from their factors. `rank_limit` is the largest rank for this
    geometry: the width of a head, and for multi-head latent attention
    `min(q_lora_rank, min(qk_nope_head_dim, kv_lora_rank) + qk_rope_head_dim)`.

    Returns a long table with the columns `model, layer, head, metric, value`. Layers that share weights have equal rows.

    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import measure_weights
    >>> table = measure_weights(BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)))
    >>> bool(table[table.metric == "numerical_rank"].value.max() <= 16)
    True
    """
    table = LongTable(model, "layer", "head", *(["component"] if spectra else []))
    family = family_of(model)
    layouts = {}
    if not family.layers:
        for layer, module in enumerate(layers_of(model)):  # packed weights do not run on numbers of rows
            check_weights_of(attention_of(model, module) or nn.Identity(), layer)
        batch = random_batches(model.config, 1, 2, 1, seed=0)[0] if inputs is None else inputs  # any will do
        layouts = read_layouts(model, next(batches_of(base_of(model), batch)))
    for layer, module in enumerate(layers_of(model)):
        if (attention := attention_of(model, module)) is None:
            continue
        with present(module):
            check_weights_of(attention, layer)
            if family.layers:
                found = family.projections.query_key(module, model.config)
                written = family.projections.values(module)
            else:
                found, written = query_key(layer, layouts[layer]), values(layer, layouts[layer])
            query, key, value, output = whole_tensors([*found, written.value, written.output], layer)
        singular = factor_spectrum(query, key)
        metrics = spectrum_metrics(singular, rtol, energy)
        width = query.shape[-1]
        if family.layers:
            limit = rank_limit(model.config, width)
        else:
            limit, _ = limit_of(attention, model.config, width, query.shape[1])
        metrics["rank_limit"] = torch.full_like(metrics["stable_rank"], limit)
        values_metrics = spectrum_metrics(factor_spectrum(*written_factors(value, output, len(query))), rtol, energy)
        metrics |= {f"value_{name}": value for name, value in values_metrics.items()}
        table.add_heads(metrics, layer, singular if spectra else None)
    return table.finish()
