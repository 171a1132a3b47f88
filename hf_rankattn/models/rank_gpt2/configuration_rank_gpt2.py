"""RankGPT2 configuration: GPT-2 with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import GPT2Config

from ..rank_attention import RankConfigMixin


@strict
class RankGPT2Config(RankConfigMixin, GPT2Config):
    r"""
    The default of `qk_scale` is the stock factor on the logits: 1 with `scale_attn_weights=False`, and divided by the number
    of the layer, counted from one, with `scale_attn_by_inverse_layer_idx=True`. A given `qk_scale` replaces all of it.
    """

    model_type = "rank_gpt2"
    stock_model_type = "gpt2"

    def head_geometry(self, layer_idx=None):
        heads = super().head_geometry(layer_idx)
        if (self if layer_idx is None else self.per_layer_config[layer_idx]).qk_scale is not None:
            return heads
        scale = heads.qk_scale if self.scale_attn_weights else 1.0
        if self.scale_attn_by_inverse_layer_idx and layer_idx is not None:
            scale /= float(layer_idx + 1)
        return heads._replace(qk_scale=scale)


__all__ = ["RankGPT2Config"]
