"""A cache that keeps only what a rank limit keeps of keys and values."""

import copy
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..probe.interface import LIMIT
from .heads import HeadLimits


LAYERS = (
    *(DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer),
    *(LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionAndStaticFullAttentionLayer),
)


class RankCache(Cache):
    """Keys and values of a limited model in the directions that the limit keeps.

    Args:
        model: A decoder within a [`RankLimit`].
        max_cache_len (`int`, *optional*): Allocate room for this number of tokens at once, as [`~transformers.StaticCache`] does.
        offloading (`bool`, *optional*, defaults to `False`): Keep the layers that do not run in the memory of the CPU.

    Layers with sliding windows keep their windows, and layers of hybrids without softmax attention their states. Where the ranks
    of the key heads of a layer differ, its keys are stored without the zeros behind the smaller ones. Models that cache a latent
    in the place of keys and values, such as DeepSeek-V3, cache the same latent here.

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
    """

    def __init__(self, model: PreTrainedModel, max_cache_len: int | None = None, offloading: bool = False):
        self.limits = limits_of(model)
        check_cached(model)
        options: dict[str, Any] = {"config": model.config, "offloading": offloading}
        if max_cache_len is None:
            layers = DynamicCache(**options).layers
        else:
            layers = StaticCache(max_cache_len=max_cache_len, **options).layers
        if strange := [layer for layer in layers if type(layer) not in LAYERS]:
            names = ", ".join(sorted(kind.__name__ for kind in LAYERS))
            raise ValueError(
                f"{type(model).__name__} caches in layers of the type {type(strange[0]).__name__}, which keep more than keys and values. "
                f"RankCache has these: {names}."
            )
        if not offloading:  # a layer that moves between devices is copied anyway
            layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in layers]
        super().__init__(layers=layers, offloading=offloading)
        self.versions: dict[int, tuple[int, ...]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module = self.limits.get(layer_idx)
        limit: HeadLimits | None = None if module is None else module.__dict__.get(LIMIT)
        if module is not None and limit is None:
            raise ValueError(
                "the model is not limited any more, and this cache is for its limit: make another cache, or attach() the limit."
            )
        if limit is None or limit.whole or not limit.fits(key_states, value_states):
            # a layer without a limit, or one that caches latents, from which it computes keys and values anew
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        new = (
            limit.packed(limit.keys(key_states), limit.key_ranks),
            limit.packed(limit.values(value_states), limit.value_widths),
        )
        version = limit.version()
        if self.get_seq_length(layer_idx) and self.versions.get(layer_idx, version) != version:
            raise ValueError(
                f"the cache holds keys and values of another limit in layer {layer_idx}, or of this one before its projections were "
                "trained: make a cache for each limit."
            )
        self.versions[layer_idx] = version
        keys, values = super().update(*new, layer_idx, *args, **kwargs)
        limit.given = keys
        return keys, values

    @property
    def nbytes(self) -> int:
        """The bytes of all keys and values that the cache holds now.

        A layer that grows has room for at most 256 more tokens, which are not counted here; a static one is counted as a whole.
        """
        held = (getattr(layer, name, None) for layer in self.layers for name in ("keys", "values"))
        return sum(states.nbytes for states in held if states is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankCache":
        """Another cache of the same model, for prompts that are used several times."""
        memo[id(self.limits)] = self.limits
        found = memo[id(self)] = type(self).__new__(type(self))
        found.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return found


class GrowingLayer(DynamicLayer):
    """Keys and values with room behind them, so that a new token does not copy those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.room: list[torch.Tensor | None] = [None, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            self.appended(place, held, new)
            for place, (held, new) in enumerate(((self.keys, key_states), (self.values, value_states)))
        )
        return self.keys, self.values

    def appended(self, place: int, held: Any, new: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (held.requires_grad or new.requires_grad)):
            return torch.cat([held, new], dim=-2)
        before = held.shape[-2] if held.ndim == 4 else 0
        length, room = before + new.shape[-2], self.room[place]
        # held is the beginning of the room, unless beams were reordered, a text was taken out or a copy was made
        fits = (
            room is not None
            and before > 0
            and length <= room.shape[-2]
            and (held.data_ptr(), held.stride(), held.shape[:2]) == (room.data_ptr(), room.stride(), room.shape[:2])
            and room.is_inference() <= torch.is_inference_mode_enabled()
        )
        if not fits:
            room = new.new_empty((*new.shape[:2], length + min(256, max(16, length // 8)), new.shape[-1]))
            if before:
                room[:, :, :before] = held
            self.room[place] = room
        assert room is not None
        room[:, :, before:length] = new
        return room[:, :, :length]

    def __copy__(self) -> "GrowingLayer":
        """A layer with room of its own: both would write behind the same tokens."""
        found = type(self).__new__(type(self))
        found.__dict__.update(self.__dict__, room=[None, None])
        return found

    def reset(self) -> None:
        super().reset()
        self.room = [None, None]


def check_cached(model: PreTrainedModel) -> None:
    """Refuse models whose caches hold more than the keys and values of one decoder."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder and a decoder, whose caches also hold cross-attention: RankCache is for decoders "
            "alone. Within a limit this model runs with its own cache, which keeps whole keys and values."
        )
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        raise ValueError(
            f"layers of {type(model).__name__} read the keys and values of other layers (num_kv_shared_layers), which a limit keeps in the "
            "directions of that other layer: use a DynamicCache, which keeps them whole."
        )


def limits_of(model: PreTrainedModel) -> dict[int, Any]:
    """The attention modules within limits, by the number with which they call a cache."""
    found: dict[Any, torch.nn.Module] = {
        module.layer_idx: module
        for module in model.modules()
        if LIMIT in module.__dict__ and getattr(module, "layer_idx", None) is not None
    }
    if not found:
        raise ValueError(
            f"no layer of the {type(model).__name__} that uses a cache is limited: call limit_rank(model, ...) first, and make the cache while "
            "the model is limited."
        )
    if shared := [module for module in found.values() if not isinstance(module.__dict__[LIMIT], HeadLimits)]:
        raise ValueError(
            f"several layers of {type(model).__name__} share one {type(shared[0]).__name__}, which has one number for a cache: use a "
            "DynamicCache."
        )
    return found
