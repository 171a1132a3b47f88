from transformers import XLNetTokenizer

from ..registration import register_twin
from . import modeling_rank_xlnet
from .configuration_rank_xlnet import RankXLNetConfig as RankXLNetConfig
from .modeling_rank_xlnet import *


register_twin(RankXLNetConfig, modeling_rank_xlnet, XLNetTokenizer)

__all__ = ["RankXLNetConfig"]
__all__ += modeling_rank_xlnet.__all__
