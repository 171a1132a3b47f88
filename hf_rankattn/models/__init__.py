from .budget import ParameterCounts as ParameterCounts
from .budget import equal_budget_grid as equal_budget_grid
from .budget import parameter_counts as parameter_counts
from .rank_albert import *  # noqa: F403
from .rank_bert import *  # noqa: F403
from .rank_encoder import *  # noqa: F403
from .rank_xlnet import *  # noqa: F403
