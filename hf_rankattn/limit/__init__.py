from .cache import RankCache as RankCache
from .limiting import RankLimit as RankLimit
from .limiting import limit_rank as limit_rank
from .need import measure_need as measure_need
