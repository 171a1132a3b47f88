"""A cache that keeps only what a rank limit keeps of keys and values."""

from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..probe.interface import LIMIT
from .heads import HeadLimits


LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer, LinearAttentionLayer)


class RankCache(Cache):
    """Keys and values of a limited model in the directions that the limit keeps.

    Args:
        model: A decoder within a [`RankLimit`].
        max_cache_len (`int`, *optional*): Allocate room for this number of tokens at once, as [`~transformers.StaticCache`] does.
        offloading (`bool`, *optional*, defaults to `False`): Keep the layers that do not run in the memory of the CPU.

    Layers with sliding windows keep their windows, and layers of hybrids without softmax attention their states. Where the ranks
    of the key heads of a layer differ, its keys are stored without the zeros behind the smaller ones.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_rankattn import RankCache, limit_rank

    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)).eval()
    >>> batch = {"input_ids": torch.randint(50, (2, 16))}
    >>> with limit_rank(model, 4, 6, calibration=batch):
    ...     cache = RankCache(model)
    ...     found = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, past_key_values=cache)
    >>> found.shape, cache.nbytes == 2 * 2 * 2 * 18 * (4 + 6) * 4  # layers, texts, key heads, tokens, widths, bytes
    (torch.Size([2, 19]), True)
    ```
    """

    def __init__(self, model: PreTrainedModel, max_cache_len: int | None = None, offloading: bool = False):
        self.limits = limits_of(model)
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} has an encoder and a decoder, whose caches also hold cross-attention: RankCache is for decoders "
                "alone. Within a limit this model runs with its own cache, which keeps whole keys and values."
            )
        options = {"config": model.config, "offloading": offloading}
        static = max_cache_len is not None
        layers = (StaticCache(max_cache_len=max_cache_len, **options) if static else DynamicCache(**options)).layers
        if strange := [layer for layer in layers if type(layer) not in LAYERS]:
            names = ", ".join(sorted(kind.__name__ for kind in LAYERS))
            raise ValueError(
                f"{type(model).__name__} caches in layers of the type {type(strange[0]).__name__}, which keep more than keys and values. "
                f"RankCache has these: {names}."
            )
        super().__init__(layers=layers, offloading=offloading)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self.limits.get(layer_idx)
        if module is None:  # not limited, such as a layer without softmax attention
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        limit: HeadLimits | None = module.__dict__.get(LIMIT)
        if limit is None:
            raise ValueError(
                "the model is not limited any more, and this cache holds limited keys: make another cache."
            )
        new = (
            limit.packed(limit.keys(key_states), limit.key_ranks),
            limit.packed(limit.values(value_states), limit.value_widths),
        )
        held = self.layers[layer_idx]
        if held.is_initialized and held.get_seq_length() > 0:
            widths = tuple(states.shape[-1] for states in new)
            if widths != (found := (held.keys.shape[-1], held.values.shape[-1])):
                raise ValueError(
                    f"the cache holds keys and values of widths {found} in layer {layer_idx}, and the limit of the model has {widths}: "
                    "make a cache for each limit."
                )
        keys, values = super().update(*new, layer_idx, *args, **kwargs)
        limit.cached = True
        return limit.unpacked(keys, limit.key_ranks), limit.unpacked(values, limit.value_widths)

    @property
    def nbytes(self) -> int:
        """The bytes of all keys and values that the cache holds now."""
        held = [(layer.keys, layer.values) for layer in self.layers if getattr(layer, "keys", None) is not None]
        return sum(states.nbytes for pair in held for states in pair)


def limits_of(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The attention modules within limits, by the number with which they call a cache."""
    found = {
        module.layer_idx: module
        for module in model.modules()
        if LIMIT in module.__dict__ and getattr(module, "layer_idx", None) is not None
    }
    if not found:
        raise ValueError(
            f"the {type(model).__name__} is not within a rank limit of layers that have numbers for a cache: make one with limit_rank first."
        )
    return found
