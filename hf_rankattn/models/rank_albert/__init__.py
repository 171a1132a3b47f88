from transformers import AlbertTokenizer

from ..registration import register_twin
from . import modeling_rank_albert
from .configuration_rank_albert import RankAlbertConfig as RankAlbertConfig
from .modeling_rank_albert import *


register_twin(RankAlbertConfig, modeling_rank_albert, AlbertTokenizer)

__all__ = ["RankAlbertConfig"]
__all__ += modeling_rank_albert.__all__
