from .configuration_rank_distilbert import *
from .modeling_rank_distilbert import *
