from .configuration_rank_bert import *
from .modeling_rank_bert import *
