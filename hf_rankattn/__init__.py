"""How much rank attention needs, has, and loses.

Importing this package registers the rank models with transformers' Auto classes.
"""

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


# The modelling files stand alone, so that they can be exported; what shares a model with its card joins them here.
for _base in (
    RankAlbertPreTrainedModel,
    RankBertPreTrainedModel,
    RankEncoderPreTrainedModel,
    RankXLNetPreTrainedModel,
):
    _base.push_to_hub = push_to_hub  # type: ignore[method-assign, assignment]
