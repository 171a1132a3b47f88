"""How much rank attention needs, has, and loses.

Importing this package registers the rank models with transformers' Auto classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .measure import collapse_rate as collapse_rate
from .measure import composite_norm as composite_norm
from .measure import relative_residual as relative_residual
from .measure import residual as residual
from .measure import spectral_metrics as spectral_metrics
from .models import *  # noqa: F403
from .models import (
    RankAlbertPreTrainedModel,
    RankBertPreTrainedModel,
    RankEncoderPreTrainedModel,
    RankXLNetPreTrainedModel,
)
from .report.cards import model_card as model_card
from .sharing import export_model as export_model
from .sharing import push_to_hub as push_to_hub
from .version import __version__ as __version__


if TYPE_CHECKING:
    from . import theory as theory
    from .models.convert import convert_rank as convert_rank
    from .probe import RankCallback as RankCallback
    from .probe import ablate as ablate
    from .probe import isolated_paths as isolated_paths
    from .probe import layer_bounds as layer_bounds
    from .probe import measure_attention as measure_attention
    from .probe import measure_collapse as measure_collapse
    from .probe import measure_logits as measure_logits
    from .probe import measure_weights as measure_weights
    from .probe import path_lengths as path_lengths
    from .probe import path_products as path_products
    from .probe import path_terms as path_terms
    from .tasks import HullVertexF1 as HullVertexF1
    from .tasks import InvertedPairs as InvertedPairs
    from .tasks import NeighborAccuracy as NeighborAccuracy
    from .tasks import NeighborError as NeighborError
    from .tasks import SequenceAccuracy as SequenceAccuracy
    from .tasks import TokenAccuracy as TokenAccuracy
    from .tasks import load_task as load_task
    from .texts import package_text as package_text

# The modelling files stand alone, so that they can be exported; what shares a model with its card joins them here.
for _base in (
    RankAlbertPreTrainedModel,
    RankBertPreTrainedModel,
    RankEncoderPreTrainedModel,
    RankXLNetPreTrainedModel,
):
    _base.push_to_hub = push_to_hub  # type: ignore[method-assign, assignment]

# Their tables need pandas, and tasks need datasets, which are slow to import and not needed to load a model.
_LAZY = {
    **dict.fromkeys(("RankCallback", "ablate", "measure_attention", "measure_collapse"), ".probe"),
    **dict.fromkeys(("measure_logits", "measure_weights"), ".probe"),
    **dict.fromkeys(("isolated_paths", "layer_bounds", "path_lengths", "path_products", "path_terms"), ".probe"),
    **dict.fromkeys(("HullVertexF1", "InvertedPairs", "NeighborAccuracy", "NeighborError"), ".tasks"),
    **dict.fromkeys(("SequenceAccuracy", "TokenAccuracy", "load_task"), ".tasks"),
    "convert_rank": ".models.convert",
    "package_text": ".texts",
}


def __getattr__(name: str):
    if name == "theory":
        return import_module(".theory", __name__)
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, "theory"])
