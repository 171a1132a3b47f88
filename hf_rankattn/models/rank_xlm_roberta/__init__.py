from .configuration_rank_xlm_roberta import *
from .modeling_rank_xlm_roberta import *
