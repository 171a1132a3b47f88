"""How much rank attention needs, has, and loses.

Importing this package registers the rank models with transformers' Auto classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import models
from .hub.cards import model_card
from .hub.sharing import export_model, push_to_hub
from .measure import (
    cheap_metrics,
    collapse_rate,
    composite_norm,
    relative_residual,
    residual,
    spectral_metrics,
    token_cosine,
)
from .models import *
from .version import __version__


if TYPE_CHECKING:
    from . import theory
    from .convert import Conversion, convert_rank
    from .files.texts import package_text
    from .limit import RankCache, RankLimit, limit_rank, measure_need
    from .papers import reproduce
    from .probe import (
        RankCallback,
        ablate,
        isolated_paths,
        layer_bounds,
        measure_attention,
        measure_collapse,
        measure_logits,
        measure_weights,
        path_lengths,
        path_products,
        path_terms,
    )
    from .tasks import load_task

__all__ = [
    "Conversion",
    "RankCache",
    "RankCallback",
    "RankLimit",
    "__version__",
    "ablate",
    "cheap_metrics",
    "collapse_rate",
    "composite_norm",
    "convert_rank",
    "export_model",
    "isolated_paths",
    "layer_bounds",
    "limit_rank",
    "load_task",
    "measure_attention",
    "measure_collapse",
    "measure_logits",
    "measure_need",
    "measure_weights",
    "model_card",
    "package_text",
    "path_lengths",
    "path_products",
    "path_terms",
    "push_to_hub",
    "relative_residual",
    "reproduce",
    "residual",
    "spectral_metrics",
    "theory",
    "token_cosine",
]
__all__ += models.__all__

# These are imported on first use: pandas, datasets and matplotlib are slow to import, and not needed to load a model.
_LAZY = {
    "Conversion": ".convert",
    "convert_rank": ".convert",
    "load_task": ".tasks",
    **dict.fromkeys(("RankCache", "RankLimit", "limit_rank", "measure_need"), ".limit"),
    "package_text": ".files.texts",
    "reproduce": ".papers",
    **dict.fromkeys(("RankCallback", "ablate", "isolated_paths", "layer_bounds"), ".probe"),
    **dict.fromkeys(("measure_attention", "measure_collapse", "measure_logits", "measure_weights"), ".probe"),
    **dict.fromkeys(("path_lengths", "path_products", "path_terms"), ".probe"),
}


def __getattr__(name: str):
    if name == "theory":
        return import_module(".theory", __name__)
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
