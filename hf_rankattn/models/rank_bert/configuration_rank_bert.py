"""RankBERT configuration: BERT with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from ..rank_attention import RankConfigMixin


@strict
class RankBertConfig(RankConfigMixin, BertConfig):
    r"""
    >>> from hf_rankattn import RankBertConfig, RankBertModel
    >>> config = RankBertConfig(qk_rank=16, per_layer_config={0: {"qk_rank": 64}})
    >>> [config.head_geometry(layer).qk_rank for layer in range(3)]
    [64, 16, 16]
    >>> model = RankBertModel(config)
    """

    model_type = "rank_bert"
    stock_model_type = "bert"


__all__ = ["RankBertConfig"]
