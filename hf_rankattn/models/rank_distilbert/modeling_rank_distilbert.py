"""RankDistilBERT: DistilBERT whose heads have a query-key rank of their own. Only attention differs from transformers'
DistilBERT."""

from copy import copy

from torch import nn
from transformers.models.distilbert import modeling_distilbert as stock

from ..rank_attention import RankModelMixin, rank_attention, rebind, set_heads, split_heads
from .configuration_rank_distilbert import RankDistilBertConfig


class RankDistilBertSelfAttention(stock.DistilBertSelfAttention):
    def __init__(self, config, layer_idx=None):
        nn.Module.__init__(self)  # the stock class refuses heads that do not divide the hidden size
        set_heads(self, config, layer_idx)
        self.n_heads, self.dim = config.n_heads, config.dim
        self.q_lin = nn.Linear(self.dim, self.n_heads * self.qk_rank)
        self.k_lin = nn.Linear(self.dim, self.n_heads * self.qk_rank)
        self.v_lin = nn.Linear(self.dim, self.n_heads * self.v_head_dim)
        self.out_lin = nn.Linear(self.n_heads * self.v_head_dim, self.dim)
        self.dropout = nn.Dropout(p=config.attention_dropout)
        self.is_causal = False

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        query = split_heads(self, self.q_lin(hidden_states), self.qk_rank)
        key = split_heads(self, self.k_lin(hidden_states), self.qk_rank)
        value = split_heads(self, self.v_lin(hidden_states), self.v_head_dim)
        dropout, eager = self.dropout.p if self.training else 0.0, stock.eager_attention_forward
        joined, maps = rank_attention(self, query, key, value, attention_mask, dropout, eager, **kwargs)
        return self.out_lin(joined), maps


class RankDistilBertBlock(stock.TransformerBlock):
    def __init__(self, config, layer_idx=None):
        build = rebind(
            stock.TransformerBlock.__init__,
            DistilBertSelfAttention=lambda _: RankDistilBertSelfAttention(config, layer_idx),
        )
        one_head = copy(config)
        one_head.n_heads = 1  # stock checks that the heads divide the hidden size, and else does not use them
        build(self, one_head)


class RankDistilBertTransformer(stock.Transformer):
    def __init__(self, config):
        layers = iter(range(config.n_layers))  # stock code builds the layers in order and does not number them
        build = rebind(
            stock.Transformer.__init__, TransformerBlock=lambda config: RankDistilBertBlock(config, next(layers))
        )
        build(self, config)


class RankDistilBertPreTrainedModel(RankModelMixin, stock.DistilBertPreTrainedModel):
    """Base class of the DistilBERT family on rank attention."""

    config: RankDistilBertConfig

    def rank_classes(self, config):
        inner = isinstance(self, stock.DistilBertModel)
        return {"Transformer": RankDistilBertTransformer} if inner else {"DistilBertModel": RankDistilBertModel}


class RankDistilBertModel(RankDistilBertPreTrainedModel, stock.DistilBertModel):
    """[`~transformers.DistilBertModel`] on rank attention."""


class RankDistilBertForMaskedLM(RankDistilBertPreTrainedModel, stock.DistilBertForMaskedLM):
    """[`~transformers.DistilBertForMaskedLM`] on rank attention."""


class RankDistilBertForSequenceClassification(
    RankDistilBertPreTrainedModel, stock.DistilBertForSequenceClassification
):
    """[`~transformers.DistilBertForSequenceClassification`] on rank attention."""


class RankDistilBertForMultipleChoice(RankDistilBertPreTrainedModel, stock.DistilBertForMultipleChoice):
    """[`~transformers.DistilBertForMultipleChoice`] on rank attention."""


class RankDistilBertForTokenClassification(RankDistilBertPreTrainedModel, stock.DistilBertForTokenClassification):
    """[`~transformers.DistilBertForTokenClassification`] on rank attention."""


class RankDistilBertForQuestionAnswering(RankDistilBertPreTrainedModel, stock.DistilBertForQuestionAnswering):
    """[`~transformers.DistilBertForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankDistilBertForMaskedLM",
    "RankDistilBertForMultipleChoice",
    "RankDistilBertForQuestionAnswering",
    "RankDistilBertForSequenceClassification",
    "RankDistilBertForTokenClassification",
    "RankDistilBertModel",
    "RankDistilBertPreTrainedModel",
]
