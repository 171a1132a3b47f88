from .budget import ParameterCounts, equal_budget_grid, parameter_counts
from .rank_albert import *  # noqa: F403
from .rank_bert import *  # noqa: F403
from .rank_encoder import *  # noqa: F403
from .rank_xlnet import *  # noqa: F403
