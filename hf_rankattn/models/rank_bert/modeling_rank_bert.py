"""RankBERT: BERT whose heads have a query-key rank of their own. Only attention differs from transformers' BERT."""

from functools import partial

from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin
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

from ..rank_attention import RankModelMixin, project, rank_attention, rebind, set_heads, set_projections
from .configuration_rank_bert import RankBertConfig


class RankBertSelfAttention(BertSelfAttention):
    def __init__(self, config, is_causal=False, layer_idx=None):
        nn.Module.__init__(self)  # BertSelfAttention's own refuses heads that do not divide the hidden size
        set_heads(self, config, layer_idx)
        set_projections(self, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.is_decoder = config.is_decoder
        self.is_causal = is_causal
        self.layer_idx = layer_idx

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        query = project(self, "query", hidden_states)
        key = project(self, "key", hidden_states)
        value = project(self, "value", hidden_states)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)
        dropout = self.dropout.p if self.training else 0.0
        return rank_attention(self, query, key, value, attention_mask, dropout, eager_attention_forward, **kwargs)


class RankBertCrossAttention(BertCrossAttention):
    __init__ = RankBertSelfAttention.__init__

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, past_key_values=None, **kwargs):
        query = project(self, "query", hidden_states)
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            cached = past_key_values.cross_attention_cache.layers[self.layer_idx]
            key, value = cached.keys, cached.values
        else:
            key = project(self, "key", encoder_hidden_states)
            value = project(self, "value", encoder_hidden_states)
            if past_key_values is not None:
                key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
                past_key_values.is_updated[self.layer_idx] = True
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


class RankBertPreTrainedModel(RankModelMixin, BertPreTrainedModel):
    """Base class of the BERT family on rank attention."""

    config: RankBertConfig
    _no_split_modules = ["BertEmbeddings", "RankBertLayer"]

    def rank_classes(self, config):
        return {"BertEncoder": RankBertEncoder} if isinstance(self, BertModel) else {"BertModel": RankBertModel}

    def _get_static_cache_init_shape(self):
        return None  # generation assumes one width for keys and values; without a shape the cache adapts to both


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
