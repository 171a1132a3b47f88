from .ablate import ablate as ablate
from .collapse import measure_collapse as measure_collapse
