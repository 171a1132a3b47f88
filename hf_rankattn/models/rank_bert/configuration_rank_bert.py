"""RankBERT configuration: BERT with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from ..rank_attention import RankConfigMixin


@strict
class RankBertConfig(RankConfigMixin, BertConfig):
    r"""
    Configuration of a [`RankBertModel`]: every field of [`~transformers.BertConfig`], and the geometry of the heads.

    Args:
        qk_rank (`int`, *optional*, defaults to `hidden_size / num_attention_heads`):
            Query/key width of each head: the largest rank its bilinear form can have. A list gives one per layer.
        v_head_dim (`int`, *optional*, defaults to `hidden_size / num_attention_heads`):
            Value width of each head. When it is given, the heads need not divide the hidden size.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Unit-norm queries and keys, with one learned log-temperature per head.
        qk_scale (`float`, *optional*, defaults to `qk_rank ** -0.5`):
            Factor on the logits.

    With all four left alone, the model is stock BERT to the last bit, under the stock parameter names.

    Example:

    ```python
    >>> from hf_rankattn import RankBertConfig, RankBertModel

    >>> config = RankBertConfig(qk_rank=16, per_layer_config={0: {"qk_rank": 64}})
    >>> [config.head_geometry(layer).qk_rank for layer in range(3)]
    [64, 16, 16]

    >>> model = RankBertModel(config)
    ```"""

    model_type = "rank_bert"
    stock_model_type = "bert"
    keys_to_ignore_at_inference = ["past_key_values", "hidden_states", "attentions", "cross_attentions"]


__all__ = ["RankBertConfig"]
