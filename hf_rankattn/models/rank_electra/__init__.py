from .configuration_rank_electra import *
from .modeling_rank_electra import *
