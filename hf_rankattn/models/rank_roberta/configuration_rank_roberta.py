"""RankRoBERTa configuration: RoBERTa with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import RobertaConfig

from ..rank_attention import RankConfigMixin


@strict
class RankRobertaConfig(RankConfigMixin, RobertaConfig):
    model_type = "rank_roberta"
    stock_model_type = "roberta"


__all__ = ["RankRobertaConfig"]
