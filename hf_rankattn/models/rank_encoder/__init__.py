from .configuration_rank_encoder import *
from .modeling_rank_encoder import *
