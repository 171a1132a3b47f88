from .configuration_rank_xlnet import *
from .modeling_rank_xlnet import *
