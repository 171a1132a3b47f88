"""Rank as a config field. Importing this package registers the models with transformers' Auto classes."""

from . import rank_albert, rank_bert, rank_encoder, rank_xlnet
from .budget import ParameterCounts, equal_budget_grid, parameter_counts
from .rank_albert import *
from .rank_bert import *
from .rank_encoder import *
from .rank_xlnet import *


__all__ = ["ParameterCounts", "equal_budget_grid", "parameter_counts"]
__all__ += rank_albert.__all__
__all__ += rank_bert.__all__
__all__ += rank_encoder.__all__
__all__ += rank_xlnet.__all__
