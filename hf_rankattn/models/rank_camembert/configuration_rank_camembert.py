"""RankCamemBERT configuration: CamemBERT with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import CamembertConfig

from ..rank_attention import RankConfigMixin


@strict
class RankCamembertConfig(RankConfigMixin, CamembertConfig):
    model_type = "rank_camembert"
    stock_model_type = "camembert"


__all__ = ["RankCamembertConfig"]
