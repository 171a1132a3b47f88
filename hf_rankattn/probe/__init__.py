from .ablate import ablate as ablate
from .attention import measure_attention as measure_attention
from .callback import RankCallback as RankCallback
from .collapse import measure_collapse as measure_collapse
from .logits import measure_logits as measure_logits
from .weights import measure_weights as measure_weights
