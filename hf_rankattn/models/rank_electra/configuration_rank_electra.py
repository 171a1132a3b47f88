"""RankELECTRA configuration: ELECTRA with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import ElectraConfig

from ..rank_attention import RankConfigMixin


@strict
class RankElectraConfig(RankConfigMixin, ElectraConfig):
    model_type = "rank_electra"
    stock_model_type = "electra"


__all__ = ["RankElectraConfig"]
