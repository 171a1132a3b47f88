"""RankXLNet: XLNet whose heads have a query-key rank of their own. Only attention differs from transformers' XLNet."""

from functools import partial, wraps

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.models.xlnet.modeling_xlnet import (
    XLNetForMultipleChoice,
    XLNetForQuestionAnswering,
    XLNetForQuestionAnsweringSimple,
    XLNetForSequenceClassification,
    XLNetForTokenClassification,
    XLNetLayer,
    XLNetLMHeadModel,
    XLNetModel,
    XLNetPreTrainedModel,
    XLNetRelativeAttention,
)

from ..rank_attention import RankModelMixin, rebind, set_heads, unit_norm
from .configuration_rank_xlnet import RankXLNetConfig


class RankXLNetRelativeAttention(XLNetRelativeAttention):
    def __init__(self, config, layer_idx=None):
        nn.Module.__init__(self)  # the parent's own refuses heads that do not divide the hidden size
        set_heads(self, config, layer_idx)
        self.n_head, self.d_model = config.n_head, config.d_model
        if (config if layer_idx is None else config.per_layer_config[layer_idx]).qk_scale is None:
            self.scaling = 1 / self.qk_rank**0.5  # as in stock XLNet; differs from qk_rank ** -0.5 in the last bit
        if self.qk_rank == self.v_head_dim:
            self.d_head = self.qk_rank
        query_shape = (self.n_head, self.qk_rank)
        value_shape = (self.n_head, self.v_head_dim)
        self.q = nn.Parameter(torch.empty(self.d_model, *query_shape))
        self.k = nn.Parameter(torch.empty(self.d_model, *query_shape))
        self.v = nn.Parameter(torch.empty(self.d_model, *value_shape))
        self.o = nn.Parameter(torch.empty(self.d_model, *value_shape))
        self.r = nn.Parameter(torch.empty(self.d_model, *query_shape))
        self.r_r_bias = nn.Parameter(torch.empty(query_shape))
        self.r_s_bias = nn.Parameter(torch.empty(query_shape))
        self.r_w_bias = nn.Parameter(torch.empty(query_shape))
        self.seg_embed = nn.Parameter(torch.empty(2, *query_shape))
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def scale(self) -> float | torch.Tensor:
        """The factor that stock `rel_attn_core` puts on the sum of its three terms (batch, heads, n, n)."""
        if self.log_temperature is None:
            return self.scaling
        return self.log_temperature.exp()[:, None, None].to(self.q.dtype) * self.scaling

    def forward(self, h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems=None, target_mapping=None, **kwargs):
        # the model makes both in float32, and stock attention on two streams casts neither
        r = r.to(self.r.dtype)
        target_mapping = None if target_mapping is None else target_mapping.to(self.q.dtype)
        return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems, target_mapping, **kwargs)

    def rel_attn_core(self, q_head, k_head_h, v_head_h, k_head_r, **kwargs):
        if self.log_temperature is not None:
            q_head, k_head_h, k_head_r = unit_norm(q_head), unit_norm(k_head_h), unit_norm(k_head_r)
        return super().rel_attn_core(q_head, k_head_h, v_head_h, k_head_r, **kwargs)


class RankXLNetLayer(XLNetLayer):
    def __init__(self, config, layer_idx=None):
        attention = partial(RankXLNetRelativeAttention, layer_idx=layer_idx)
        rebind(XLNetLayer.__init__, XLNetRelativeAttention=attention)(self, config)


class RankXLNetPreTrainedModel(RankModelMixin, XLNetPreTrainedModel):
    """Base class of the XLNet family on rank attention."""

    config: RankXLNetConfig
    _no_split_modules = ["RankXLNetLayer"]

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        if isinstance(self, XLNetModel):
            # stock code makes it in float32 whatever dtype the model is built or loaded in, and masks take its dtype
            self.mask_emb.data = self.mask_emb.data.to(torch.get_default_dtype())

    def rank_classes(self, config):
        if not isinstance(self, XLNetModel):
            return {"XLNetModel": RankXLNetModel}
        layers = iter(range(config.n_layer))  # stock code builds the layers in order and does not number them
        return {"XLNetLayer": lambda config: RankXLNetLayer(config, layer_idx=next(layers))}


class RankXLNetModel(RankXLNetPreTrainedModel, XLNetModel):
    """[`~transformers.XLNetModel`] on rank attention."""

    @wraps(XLNetModel.forward)
    def forward(self, input_ids=None, attention_mask=None, *args, **kwargs):
        # the ONNX exporter cannot translate stock's `1.0 - attention_mask` for integers
        mask = attention_mask if attention_mask is None else attention_mask.to(self.dtype)
        return super().forward(input_ids, mask, *args, **kwargs)


class RankXLNetLMHeadModel(RankXLNetPreTrainedModel, XLNetLMHeadModel, GenerationMixin):
    """[`~transformers.XLNetLMHeadModel`] on rank attention."""


class RankXLNetForSequenceClassification(RankXLNetPreTrainedModel, XLNetForSequenceClassification):
    """[`~transformers.XLNetForSequenceClassification`] on rank attention."""


class RankXLNetForTokenClassification(RankXLNetPreTrainedModel, XLNetForTokenClassification):
    """[`~transformers.XLNetForTokenClassification`] on rank attention."""


class RankXLNetForMultipleChoice(RankXLNetPreTrainedModel, XLNetForMultipleChoice):
    """[`~transformers.XLNetForMultipleChoice`] on rank attention."""


class RankXLNetForQuestionAnsweringSimple(RankXLNetPreTrainedModel, XLNetForQuestionAnsweringSimple):
    """[`~transformers.XLNetForQuestionAnsweringSimple`] on rank attention."""


class RankXLNetForQuestionAnswering(RankXLNetPreTrainedModel, XLNetForQuestionAnswering):
    """[`~transformers.XLNetForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankXLNetForMultipleChoice",
    "RankXLNetForQuestionAnswering",
    "RankXLNetForQuestionAnsweringSimple",
    "RankXLNetForSequenceClassification",
    "RankXLNetForTokenClassification",
    "RankXLNetLMHeadModel",
    "RankXLNetModel",
    "RankXLNetPreTrainedModel",
]
