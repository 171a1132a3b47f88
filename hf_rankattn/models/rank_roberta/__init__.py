from .configuration_rank_roberta import *
from .modeling_rank_roberta import *
