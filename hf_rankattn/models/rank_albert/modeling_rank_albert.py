"""RankALBERT: ALBERT whose heads have a query-key rank of their own. Only attention differs from transformers' ALBERT."""

import inspect
from functools import partial

from torch import nn
from transformers.modeling_utils import PreTrainedModel
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
from .configuration_rank_albert import RankAlbertConfig


class RankAlbertAttention(AlbertAttention):
    def __init__(self, config, layer_idx=None):
        nn.Module.__init__(self)  # the parent would build all three projections with one width
        set_heads(self, config, layer_idx)
        self.attention_dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.output_dropout = nn.Dropout(config.hidden_dropout_prob)
        self.query = nn.Linear(config.hidden_size, self.num_attention_heads * self.qk_rank)
        self.key = nn.Linear(config.hidden_size, self.num_attention_heads * self.qk_rank)
        self.value = nn.Linear(config.hidden_size, self.num_attention_heads * self.v_head_dim)
        self.dense = nn.Linear(self.num_attention_heads * self.v_head_dim, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.is_causal = False

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        query = split_heads(self.query(hidden_states), self.num_attention_heads, self.qk_rank)
        key = split_heads(self.key(hidden_states), self.num_attention_heads, self.qk_rank)
        value = split_heads(self.value(hidden_states), self.num_attention_heads, self.v_head_dim)
        query, key = apply_qk_norm(self, query, key)
        dropout = self.attention_dropout.p if self.training else 0.0
        attended, maps = rank_attention(
            self, query, key, value, attention_mask, dropout, eager_attention_forward, **kwargs
        )
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
        # Stock code builds the groups in order and does not number them; the first layer of a group speaks for it.
        first_layers = (
            layers[0] if layers else None for layers in map(config.layers_of_group, range(config.num_hidden_groups))
        )
        build = rebind(
            AlbertTransformer.__init__,
            AlbertLayerGroup=lambda config: RankAlbertLayerGroup(config, layer_idx=next(first_layers)),
        )
        build(self, config)


class RankAlbertPreTrainedModel(AlbertPreTrainedModel):
    """Base class of the ALBERT family on rank attention: loading, checks and defaults."""

    config: RankAlbertConfig
    # Flash and flex kernels are off until they have been tested on a GPU with unequal widths.
    _supports_flash_attn = False
    _supports_flex_attn = False
    model_tags = ["rank-attention"]

    def __init__(self, config, *args, **kwargs):
        check_config(self, config, RankAlbertConfig)
        names = (
            {"AlbertTransformer": RankAlbertTransformer}
            if isinstance(self, AlbertModel)
            else {"AlbertModel": RankAlbertModel}
        )
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
