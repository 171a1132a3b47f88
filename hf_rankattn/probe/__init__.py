from .ablate import ablate as ablate
from .attention import measure_attention as measure_attention
from .collapse import measure_collapse as measure_collapse
from .weights import measure_weights as measure_weights
