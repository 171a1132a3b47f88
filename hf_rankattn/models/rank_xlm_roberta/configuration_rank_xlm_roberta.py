"""RankXLM-RoBERTa configuration: XLM-RoBERTa with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import XLMRobertaConfig

from ..rank_attention import RankConfigMixin


@strict
class RankXLMRobertaConfig(RankConfigMixin, XLMRobertaConfig):
    model_type = "rank_xlm_roberta"
    stock_model_type = "xlm-roberta"


__all__ = ["RankXLMRobertaConfig"]
