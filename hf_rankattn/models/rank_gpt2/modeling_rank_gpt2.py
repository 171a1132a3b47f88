"""RankGPT2: GPT-2 whose heads have a query-key rank of their own. Only attention differs from transformers' GPT-2."""

from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.models.gpt2 import modeling_gpt2 as stock
from transformers.pytorch_utils import Conv1D

from ..rank_attention import RankModelMixin, apply_qk_norm, rank_attention, rebind, set_heads, split_heads
from .configuration_rank_gpt2 import RankGPT2Config


class RankGPT2Attention(stock.GPT2Attention):
    """The columns of `c_attn` are queries and keys of width `heads * qk_rank` and values of width `heads * v_head_dim`."""

    def __init__(self, config, is_cross_attention=False, layer_idx=None):
        nn.Module.__init__(self)  # the stock class refuses heads that do not divide the hidden size
        set_heads(self, config, layer_idx)
        self.embed_dim, self.num_heads = config.hidden_size, self.num_attention_heads
        self.reorder_and_upcast_attn = config.reorder_and_upcast_attn
        self.is_cross_attention = is_cross_attention
        self.layer_idx = layer_idx
        query_key, values = self.num_heads * self.qk_rank, self.num_heads * self.v_head_dim
        self.split_size = [query_key, values] if is_cross_attention else [query_key, query_key, values]
        self.c_attn = Conv1D(sum(self.split_size), self.embed_dim)
        if is_cross_attention:
            self.q_attn = Conv1D(query_key, self.embed_dim)
        self.c_proj = Conv1D(self.embed_dim, values)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        self.is_causal = not is_cross_attention

    def forward(
        self,
        hidden_states,
        past_key_values=None,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        output_attentions=False,
        **kwargs,
    ):
        if self.is_cross_attention:
            query, attention_mask = self.q_attn(hidden_states), encoder_attention_mask
            key, value = self.encoder_states(encoder_hidden_states, past_key_values)
        else:
            query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
            key, value = split_heads(self, key, self.qk_rank), split_heads(self, value, self.v_head_dim)
            if past_key_values is not None:
                if isinstance(past_key_values, EncoderDecoderCache):
                    past_key_values = past_key_values.self_attention_cache
                key, value = past_key_values.update(key, value, self.layer_idx)
        query = split_heads(self, query, self.qk_rank)
        if self.reorder_and_upcast_attn and self.config._attn_implementation == "eager":
            query, key = apply_qk_norm(self, query, key)
            joined, maps = self._upcast_and_reordered_attn(query, key, value, attention_mask)
            joined = joined.flatten(2)
        else:
            dropout, eager = self.attn_dropout.p if self.training else 0.0, stock.eager_attention_forward
            joined, maps = rank_attention(self, query, key, value, attention_mask, dropout, eager, **kwargs)
        return self.resid_dropout(self.c_proj(joined)), maps

    def encoder_states(self, states, past_key_values):
        """Keys and values of the encoder, from the cache after the first call."""
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            cached = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return cached.keys, cached.values
        key, value = self.c_attn(states).split(self.split_size, dim=2)
        key, value = split_heads(self, key, self.qk_rank), split_heads(self, value, self.v_head_dim)
        if past_key_values is not None:
            key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return key, value


class RankGPT2Block(stock.GPT2Block):
    __init__ = rebind(stock.GPT2Block.__init__, GPT2Attention=RankGPT2Attention)


class RankGPT2PreTrainedModel(RankModelMixin, stock.GPT2PreTrainedModel):
    """Base class of the GPT-2 family on rank attention."""

    config: RankGPT2Config
    _no_split_modules = ["RankGPT2Block"]

    def rank_classes(self, config):
        inner = isinstance(self, stock.GPT2Model)
        return {"GPT2Block": RankGPT2Block} if inner else {"GPT2Model": RankGPT2Model}


class RankGPT2Model(RankGPT2PreTrainedModel, stock.GPT2Model):
    """[`~transformers.GPT2Model`] on rank attention."""


class RankGPT2LMHeadModel(RankGPT2PreTrainedModel, stock.GPT2LMHeadModel, GenerationMixin):
    """[`~transformers.GPT2LMHeadModel`] on rank attention."""


class RankGPT2DoubleHeadsModel(RankGPT2PreTrainedModel, stock.GPT2DoubleHeadsModel, GenerationMixin):
    """[`~transformers.GPT2DoubleHeadsModel`] on rank attention."""


class RankGPT2ForSequenceClassification(RankGPT2PreTrainedModel, stock.GPT2ForSequenceClassification):
    """[`~transformers.GPT2ForSequenceClassification`] on rank attention."""


class RankGPT2ForTokenClassification(RankGPT2PreTrainedModel, stock.GPT2ForTokenClassification):
    """[`~transformers.GPT2ForTokenClassification`] on rank attention."""


class RankGPT2ForQuestionAnswering(RankGPT2PreTrainedModel, stock.GPT2ForQuestionAnswering):
    """[`~transformers.GPT2ForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankGPT2DoubleHeadsModel",
    "RankGPT2ForQuestionAnswering",
    "RankGPT2ForSequenceClassification",
    "RankGPT2ForTokenClassification",
    "RankGPT2LMHeadModel",
    "RankGPT2Model",
    "RankGPT2PreTrainedModel",
]
