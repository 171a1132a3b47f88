from transformers import BertTokenizer

from ..registration import register_twin
from . import modeling_rank_bert
from .configuration_rank_bert import RankBertConfig as RankBertConfig
from .modeling_rank_bert import *


register_twin(RankBertConfig, modeling_rank_bert, BertTokenizer)

__all__ = ["RankBertConfig"]
__all__ += modeling_rank_bert.__all__
