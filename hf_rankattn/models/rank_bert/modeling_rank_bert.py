"""RankBERT: BERT whose heads have a query-key rank of their own. Only attention differs from transformers' BERT."""

import inspect
from functools import partial

from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
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

from .building import (
    apply_qk_norm,
    check_config,
    init_temperature,
    load_safely,
    rank_attention,
    rebind,
    set_heads,
    split_heads,
)
from .configuration_rank_bert import RankBertConfig


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
        return rank_attention(self, query, key, value, attention_mask, dropout, eager_attention_forward, **kwargs)


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
        return rank_attention(self, query, key, value, attention_mask, dropout, eager_attention_forward, **kwargs)


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
    """[`~transformers.models.bert.modeling_bert.BertLayer`] on rank attention."""

    __init__ = rebind(BertLayer.__init__, BertAttention=RankBertAttention)


class RankBertEncoder(BertEncoder):
    __init__ = rebind(BertEncoder.__init__, BertLayer=RankBertLayer)


class RankBertPreTrainedModel(BertPreTrainedModel):
    """Base class of the BERT family on rank attention: loading, checks and defaults."""

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
