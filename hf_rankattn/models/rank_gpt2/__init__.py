from .configuration_rank_gpt2 import *
from .modeling_rank_gpt2 import *
