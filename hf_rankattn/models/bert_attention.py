"""What the families with BERT's attention share: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA.

Their attention classes have the same code under other names. Each class here stands before the stock class of a family.
"""

from functools import partial

from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.bert.modeling_bert import eager_attention_forward

from .rank_attention import project, rank_attention, rebind, set_heads, set_projections


class RankSelfAttention(nn.Module):
    def __init__(self, config, is_causal=False, layer_idx=None):
        nn.Module.__init__(self)  # the stock class refuses heads that do not divide the hidden size
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


class RankCrossAttention(nn.Module):
    __init__ = RankSelfAttention.__init__

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


class RankSelfOutput(nn.Module):
    def __init__(self, config, layer_idx=None):
        super().__init__(config)
        heads = config.head_geometry(layer_idx)
        if heads.num_heads * heads.v_head_dim != config.hidden_size:
            self.dense = nn.Linear(heads.num_heads * heads.v_head_dim, config.hidden_size)


class RankAttention(nn.Module):
    """The stock class with the `parts` of the family inside: self-attention, cross-attention and output."""

    parts: tuple[type[nn.Module], type[nn.Module], type[nn.Module]]

    def __init__(self, config, is_causal=False, layer_idx=None, is_cross_attention=False):
        stock_names = [part.__name__.removeprefix("Rank") for part in self.parts]
        classes = dict(zip(stock_names, self.parts, strict=True))
        classes[stock_names[-1]] = partial(self.parts[-1], layer_idx=layer_idx)
        build = rebind(super().__init__.__func__, **classes)
        build(self, config, is_causal=is_causal, layer_idx=layer_idx, is_cross_attention=is_cross_attention)
