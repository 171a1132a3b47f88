from .configuration_rank_camembert import *
from .modeling_rank_camembert import *
