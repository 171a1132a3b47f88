"""RankDistilBERT configuration: DistilBERT with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import DistilBertConfig

from ..rank_attention import RankConfigMixin


@strict
class RankDistilBertConfig(RankConfigMixin, DistilBertConfig):
    model_type = "rank_distilbert"
    stock_model_type = "distilbert"


__all__ = ["RankDistilBertConfig"]
