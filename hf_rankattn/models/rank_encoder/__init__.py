from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

from .configuration_rank_encoder import RankEncoderConfig
from .modeling_rank_encoder import (
    RankEncoderForPointRegression,
    RankEncoderForTokenClassification,
    RankEncoderModel,
    RankEncoderPreTrainedModel,
)


AutoConfig.register(RankEncoderConfig.model_type, RankEncoderConfig, exist_ok=True)
AutoModel.register(RankEncoderConfig, RankEncoderModel, exist_ok=True)
AutoModelForTokenClassification.register(RankEncoderConfig, RankEncoderForTokenClassification, exist_ok=True)

__all__ = [
    "RankEncoderConfig",
    "RankEncoderForPointRegression",
    "RankEncoderForTokenClassification",
    "RankEncoderModel",
    "RankEncoderPreTrainedModel",
]
