from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

from . import modeling_rank_encoder
from .configuration_rank_encoder import RankEncoderConfig as RankEncoderConfig
from .modeling_rank_encoder import *


AutoConfig.register(RankEncoderConfig.model_type, RankEncoderConfig, exist_ok=True)
AutoModel.register(RankEncoderConfig, RankEncoderModel, exist_ok=True)
AutoModelForTokenClassification.register(RankEncoderConfig, RankEncoderForTokenClassification, exist_ok=True)

__all__ = ["RankEncoderConfig"]
__all__ += modeling_rank_encoder.__all__
