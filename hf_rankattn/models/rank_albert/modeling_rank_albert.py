"""RankALBERT: ALBERT whose heads have a query-key rank of their own. Only attention differs from transformers' ALBERT."""

from functools import partial

from torch import nn
from transformers.models.albert.modeling_albert import (
    AlbertAttention,
    AlbertForMaskedLM,
    AlbertForMultipleChoice,
    AlbertForPreTraining,
    AlbertForQuestionAnswering,
    AlbertForSequenceClassification,
    AlbertForTokenClassification,
    AlbertLayer,
    AlbertLayerGroup,
    AlbertModel,
    AlbertPreTrainedModel,
    AlbertTransformer,
    eager_attention_forward,
)

from ..rank_attention import RankModelMixin, project, rank_attention, rebind, set_heads, set_projections
from .configuration_rank_albert import RankAlbertConfig


class RankAlbertAttention(AlbertAttention):
    def __init__(self, config, layer_idx=None):
        nn.Module.__init__(self)  # the parent would build all three projections with one width
        set_heads(self, config, layer_idx)
        self.attention_dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.output_dropout = nn.Dropout(config.hidden_dropout_prob)
        set_projections(self, config.hidden_size)
        self.dense = nn.Linear(self.num_attention_heads * self.v_head_dim, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.is_causal = False

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        states = [project(self, name, hidden_states) for name in ("query", "key", "value")]
        dropout = self.attention_dropout.p if self.training else 0.0
        attended, maps = rank_attention(self, *states, attention_mask, dropout, eager_attention_forward, **kwargs)
        attended = self.output_dropout(self.dense(attended))
        return self.LayerNorm(hidden_states + attended), maps


class RankAlbertLayer(AlbertLayer):
    def __init__(self, config, layer_idx=None):
        build = rebind(AlbertLayer.__init__, AlbertAttention=partial(RankAlbertAttention, layer_idx=layer_idx))
        build(self, config)


class RankAlbertLayerGroup(AlbertLayerGroup):
    def __init__(self, config, layer_idx=None):
        build = rebind(AlbertLayerGroup.__init__, AlbertLayer=partial(RankAlbertLayer, layer_idx=layer_idx))
        build(self, config)


class RankAlbertTransformer(AlbertTransformer):
    def __init__(self, config):
        # Stock code builds the groups in order and does not number them; the geometry of a group is that of its first layer.
        groups = map(config.layers_of_group, range(config.num_hidden_groups))
        first_layers = (layers[0] if layers else None for layers in groups)
        build = rebind(
            AlbertTransformer.__init__,
            AlbertLayerGroup=lambda config: RankAlbertLayerGroup(config, layer_idx=next(first_layers)),
        )
        build(self, config)


class RankAlbertPreTrainedModel(RankModelMixin, AlbertPreTrainedModel):
    """Base class of the ALBERT family on rank attention."""

    config: RankAlbertConfig

    def rank_classes(self, config):
        inner = isinstance(self, AlbertModel)
        return {"AlbertTransformer": RankAlbertTransformer} if inner else {"AlbertModel": RankAlbertModel}


class RankAlbertModel(RankAlbertPreTrainedModel, AlbertModel):
    """[`~transformers.AlbertModel`] on rank attention."""


class RankAlbertForPreTraining(RankAlbertPreTrainedModel, AlbertForPreTraining):
    """[`~transformers.AlbertForPreTraining`] on rank attention."""


class RankAlbertForMaskedLM(RankAlbertPreTrainedModel, AlbertForMaskedLM):
    """[`~transformers.AlbertForMaskedLM`] on rank attention."""


class RankAlbertForSequenceClassification(RankAlbertPreTrainedModel, AlbertForSequenceClassification):
    """[`~transformers.AlbertForSequenceClassification`] on rank attention."""


class RankAlbertForTokenClassification(RankAlbertPreTrainedModel, AlbertForTokenClassification):
    """[`~transformers.AlbertForTokenClassification`] on rank attention."""


class RankAlbertForQuestionAnswering(RankAlbertPreTrainedModel, AlbertForQuestionAnswering):
    """[`~transformers.AlbertForQuestionAnswering`] on rank attention."""


class RankAlbertForMultipleChoice(RankAlbertPreTrainedModel, AlbertForMultipleChoice):
    """[`~transformers.AlbertForMultipleChoice`] on rank attention."""


__all__ = [
    "RankAlbertForMaskedLM",
    "RankAlbertForMultipleChoice",
    "RankAlbertForPreTraining",
    "RankAlbertForQuestionAnswering",
    "RankAlbertForSequenceClassification",
    "RankAlbertForTokenClassification",
    "RankAlbertModel",
    "RankAlbertPreTrainedModel",
]
