from .configuration_rank_albert import *
from .modeling_rank_albert import *
