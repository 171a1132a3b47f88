"""RankBERT: BERT whose heads have a query-key rank of their own. Only attention differs from transformers' BERT."""

import inspect
import math
from functools import partial
from types import CodeType, FunctionType

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertCrossAttention,
    BertEncoder,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLayer,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
    BertSelfAttention,
    BertSelfOutput,
    eager_attention_forward,
)
from transformers.utils import logging

from .configuration_rank_bert import RankBertConfig


def names_of(code: CodeType) -> set[str]:
    """All global names that a code object uses, those of its comprehensions included."""
    nested = (names_of(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*nested)


def rebind(function, **names):
    """`function` with some of its global names bound to other objects.

    This is how the stock `__init__` builds our classes: its code runs as transformers wrote it, nothing is copied, and
    unlike a patched module nobody else sees the change.
    """
    function = inspect.unwrap(function)  # DeepSpeed and others wrap the constructors of all modules
    if absent := sorted(set(names) - names_of(function.__code__)):
        raise RuntimeError(
            f"{function.__module__}.{function.__qualname__} does not build {', '.join(absent)}: it is not the stock "
            "constructor, or not one of the supported transformers versions. To extend a rank model, derive from it."
        )
    scope = {**function.__globals__, **names}
    bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def set_heads(module: nn.Module, config, layer_idx: int | None) -> None:
    """Write the geometry of the layer on an attention module, as numbers."""
    heads = config.head_geometry(layer_idx)
    module.config = config
    module.num_attention_heads, module.qk_rank, module.v_head_dim = heads.num_heads, heads.qk_rank, heads.v_head_dim
    module.scaling = heads.qk_scale
    if (
        heads.qk_rank == heads.v_head_dim
    ):  # names of stock attention, which have a meaning only where there is one width
        module.attention_head_size = heads.qk_rank
        module.all_head_size = heads.num_heads * heads.qk_rank
    temperature = nn.Parameter(torch.full((heads.num_heads,), math.log(heads.qk_rank))) if heads.qk_norm else None
    module.register_parameter("log_temperature", temperature)


def split_heads(states: torch.Tensor, num_heads: int, width: int) -> torch.Tensor:
    """(batch, n, num_heads * width) -> (batch, num_heads, n, width). The count of heads is never left to be inferred."""
    return states.view(*states.shape[:-1], num_heads, width).transpose(1, 2)


def unit_norm(states: torch.Tensor) -> torch.Tensor:
    """Rows of length one, computed in float32 at least, as half precision has no room for the squares."""
    wide = states if states.dtype == torch.float64 else states.float()
    return nn.functional.normalize(wide, dim=-1).to(states.dtype)


def apply_qk_norm(module, query, key):
    """Unit-norm queries and keys (batch, heads, n, qk_rank), with the temperature of each head on its queries."""
    if module.log_temperature is None:
        return query, key
    temperature = module.log_temperature.exp()[:, None, None].to(query.dtype)
    return unit_norm(query) * temperature, unit_norm(key)


def rank_attention(module, query, key, value, attention_mask, dropout, **kwargs):
    """Attention through transformers' interface, with query/key and value widths free of each other.

    Takes queries and keys (batch, heads, n, qk_rank) and values (batch, heads, n, v_head_dim); returns the joined heads
    (batch, n, heads * v_head_dim), and the maps (batch, heads, n, n) where the implementation gives them.
    """
    implementation = module.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    v_width = value.shape[-1]
    # torch's CPU kernel is fast for equal widths and without dropout only; zeros change neither logits nor values.
    if query.shape[-1] != v_width and implementation == "sdpa" and query.device.type == "cpu" and dropout == 0.0:
        width = max(query.shape[-1], v_width)
        query, key, value = (nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    joined, maps = attend(module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs)
    return joined[..., :v_width].flatten(2).contiguous(), maps


def init_temperature(module: nn.Module) -> None:
    """Start with logits of unit variance for isotropic queries and keys: qk_scale * qk_rank * cos = sqrt(qk_rank) * cos."""
    if getattr(module, "log_temperature", None) is not None:
        init.constant_(module.log_temperature, math.log(module.qk_rank))


def check_config(model: nn.Module, config, expected: type) -> None:
    """Refuse a configuration of another family, or one that was spoilt since it was made, before anything is built."""
    # by model type too: exported source is loaded as modules of its own, in which the same class is another object
    if not isinstance(config, expected) and getattr(config, "model_type", None) != expected.model_type:
        stock = f" Use {expected.__name__}(**config.to_dict())." if hasattr(config, "to_dict") else ""
        raise ValueError(
            f"{type(model).__name__} is built from a {expected.__name__}, got a {type(config).__name__}."
            + (stock if getattr(config, "model_type", "") == expected.stock_model_type else "")
        )
    config.validate_architecture()


class ShapeMismatchError(RuntimeError, ValueError):
    """A `ValueError` that code written for stock `from_pretrained`, which raises a `RuntimeError`, catches as well."""


def load_safely(load, pretrained_model_name_or_path, *model_args, **kwargs):
    """`from_pretrained` that reads safetensors only, and says what to do when shapes do not fit."""
    kwargs.setdefault("use_safetensors", True)  # a pickle can run code when it is read
    try:
        return load(pretrained_model_name_or_path, *model_args, **kwargs)
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        raise OSError(
            f"{error} Only safetensors are read here; for a pickle you trust, pass use_safetensors=False."
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            kwargs.update(ignore_mismatched_sizes=True, output_loading_info=True)
            _, info = load(pretrained_model_name_or_path, *model_args, **kwargs)
        finally:
            logging.set_verbosity(verbosity)
        shapes = [
            f"{key} is {tuple(ours)}, the config asks for {tuple(asked)}"
            for key, ours, asked in info["mismatched_keys"]
        ]
        raise ShapeMismatchError(
            f"{len(shapes)} weights of {pretrained_model_name_or_path} do not fit the configuration: {sorted(shapes)[0]}. "
            "A checkpoint keeps the `qk_rank`, `v_head_dim` and `num_labels` it was saved with: load it without "
            "overriding them, or pass ignore_mismatched_sizes=True to start the misfits from fresh random weights."
        ) from error


class RankBertSelfAttention(BertSelfAttention):
    def __init__(self, config, is_causal=False, layer_idx=None):
        nn.Module.__init__(self)  # BertSelfAttention's own refuses heads that do not divide the hidden size
        set_heads(self, config, layer_idx)
        self.query = nn.Linear(config.hidden_size, self.num_attention_heads * self.qk_rank)
        self.key = nn.Linear(config.hidden_size, self.num_attention_heads * self.qk_rank)
        self.value = nn.Linear(config.hidden_size, self.num_attention_heads * self.v_head_dim)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.is_decoder = config.is_decoder
        self.is_causal = is_causal
        self.layer_idx = layer_idx

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        query = split_heads(self.query(hidden_states), self.num_attention_heads, self.qk_rank)
        key = split_heads(self.key(hidden_states), self.num_attention_heads, self.qk_rank)
        value = split_heads(self.value(hidden_states), self.num_attention_heads, self.v_head_dim)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)
        query, key = apply_qk_norm(self, query, key)
        dropout = self.dropout.p if self.training else 0.0
        return rank_attention(self, query, key, value, attention_mask, dropout, **kwargs)


class RankBertCrossAttention(BertCrossAttention):
    __init__ = RankBertSelfAttention.__init__

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, past_key_values=None, **kwargs):
        query = split_heads(self.query(hidden_states), self.num_attention_heads, self.qk_rank)
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            cached = past_key_values.cross_attention_cache.layers[self.layer_idx]
            key, value = cached.keys, cached.values
        else:
            key = split_heads(self.key(encoder_hidden_states), self.num_attention_heads, self.qk_rank)
            value = split_heads(self.value(encoder_hidden_states), self.num_attention_heads, self.v_head_dim)
            if past_key_values is not None:
                key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
                past_key_values.is_updated[self.layer_idx] = True
        query, key = apply_qk_norm(self, query, key)
        dropout = self.dropout.p if self.training else 0.0
        return rank_attention(self, query, key, value, attention_mask, dropout, **kwargs)


class RankBertSelfOutput(BertSelfOutput):
    def __init__(self, config, layer_idx=None):
        super().__init__(config)
        heads = config.head_geometry(layer_idx)
        if heads.num_heads * heads.v_head_dim != config.hidden_size:
            self.dense = nn.Linear(heads.num_heads * heads.v_head_dim, config.hidden_size)


class RankBertAttention(BertAttention):
    def __init__(self, config, is_causal=False, layer_idx=None, is_cross_attention=False):
        build = rebind(
            BertAttention.__init__,
            BertSelfAttention=RankBertSelfAttention,
            BertCrossAttention=RankBertCrossAttention,
            BertSelfOutput=partial(RankBertSelfOutput, layer_idx=layer_idx),
        )
        build(self, config, is_causal=is_causal, layer_idx=layer_idx, is_cross_attention=is_cross_attention)


class RankBertLayer(BertLayer):
    __init__ = rebind(BertLayer.__init__, BertAttention=RankBertAttention)


class RankBertEncoder(BertEncoder):
    __init__ = rebind(BertEncoder.__init__, BertLayer=RankBertLayer)


class RankBertPreTrainedModel(BertPreTrainedModel):
    config: RankBertConfig
    # Flash and flex kernels are off until they have been tested on a GPU with unequal widths.
    _supports_flash_attn = False
    _supports_flex_attn = False
    _no_split_modules = ["BertEmbeddings", "RankBertLayer"]
    model_tags = ["rank-attention"]

    def _get_static_cache_init_shape(self):
        return None  # generation would assume one width for keys and values; without a shape the cache takes both as they come

    def __init__(self, config, *args, **kwargs):
        check_config(self, config, RankBertConfig)
        names = {"BertEncoder": RankBertEncoder} if isinstance(self, BertModel) else {"BertModel": RankBertModel}
        build = super().__init__.__func__  # that of the stock class, or of PreTrainedModel below a class of the user's
        if inspect.unwrap(build) is not inspect.unwrap(PreTrainedModel.__init__):
            build = rebind(build, **names)
        build(self, config, *args, **kwargs)

    def _init_weights(self, module):
        super()._init_weights(module)
        init_temperature(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        load = super().from_pretrained
        return load_safely(load, pretrained_model_name_or_path, *model_args, **kwargs)


class RankBertModel(RankBertPreTrainedModel, BertModel):
    """[`~transformers.BertModel`] on rank attention."""


class RankBertForPreTraining(RankBertPreTrainedModel, BertForPreTraining):
    """[`~transformers.BertForPreTraining`] on rank attention."""


class RankBertLMHeadModel(RankBertPreTrainedModel, BertLMHeadModel, GenerationMixin):
    """[`~transformers.BertLMHeadModel`] on rank attention."""


class RankBertForMaskedLM(RankBertPreTrainedModel, BertForMaskedLM):
    """[`~transformers.BertForMaskedLM`] on rank attention."""


class RankBertForNextSentencePrediction(RankBertPreTrainedModel, BertForNextSentencePrediction):
    """[`~transformers.BertForNextSentencePrediction`] on rank attention."""


class RankBertForSequenceClassification(RankBertPreTrainedModel, BertForSequenceClassification):
    """[`~transformers.BertForSequenceClassification`] on rank attention."""


class RankBertForMultipleChoice(RankBertPreTrainedModel, BertForMultipleChoice):
    """[`~transformers.BertForMultipleChoice`] on rank attention."""


class RankBertForTokenClassification(RankBertPreTrainedModel, BertForTokenClassification):
    """[`~transformers.BertForTokenClassification`] on rank attention."""


class RankBertForQuestionAnswering(RankBertPreTrainedModel, BertForQuestionAnswering):
    """[`~transformers.BertForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankBertForMaskedLM",
    "RankBertForMultipleChoice",
    "RankBertForNextSentencePrediction",
    "RankBertForPreTraining",
    "RankBertForQuestionAnswering",
    "RankBertForSequenceClassification",
    "RankBertForTokenClassification",
    "RankBertLMHeadModel",
    "RankBertLayer",
    "RankBertModel",
    "RankBertPreTrainedModel",
]
