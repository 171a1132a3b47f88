"""RankCamemBERT: CamemBERT whose heads have a query-key rank of their own. Only attention differs from transformers' CamemBERT."""

from transformers.generation import GenerationMixin
from transformers.models.camembert import modeling_camembert as stock

from ..bert_attention import RankAttention, RankCrossAttention, RankSelfAttention, RankSelfOutput
from ..rank_attention import RankModelMixin, rebind
from .configuration_rank_camembert import RankCamembertConfig


class RankCamembertSelfAttention(RankSelfAttention, stock.CamembertSelfAttention): ...


class RankCamembertCrossAttention(RankCrossAttention, stock.CamembertCrossAttention): ...


class RankCamembertSelfOutput(RankSelfOutput, stock.CamembertSelfOutput): ...


class RankCamembertAttention(RankAttention, stock.CamembertAttention):
    parts = (RankCamembertSelfAttention, RankCamembertCrossAttention, RankCamembertSelfOutput)


class RankCamembertLayer(stock.CamembertLayer):
    __init__ = rebind(stock.CamembertLayer.__init__, CamembertAttention=RankCamembertAttention)


class RankCamembertEncoder(stock.CamembertEncoder):
    __init__ = rebind(stock.CamembertEncoder.__init__, CamembertLayer=RankCamembertLayer)


class RankCamembertPreTrainedModel(RankModelMixin, stock.CamembertPreTrainedModel):
    """Base class of the CamemBERT family on rank attention."""

    config: RankCamembertConfig
    _no_split_modules = ["CamembertEmbeddings", "RankCamembertLayer"]

    def rank_classes(self, config):
        inner = isinstance(self, stock.CamembertModel)
        return {"CamembertEncoder": RankCamembertEncoder} if inner else {"CamembertModel": RankCamembertModel}


class RankCamembertModel(RankCamembertPreTrainedModel, stock.CamembertModel):
    """[`~transformers.CamembertModel`] on rank attention."""


class RankCamembertForCausalLM(RankCamembertPreTrainedModel, stock.CamembertForCausalLM, GenerationMixin):
    """[`~transformers.CamembertForCausalLM`] on rank attention."""


class RankCamembertForMaskedLM(RankCamembertPreTrainedModel, stock.CamembertForMaskedLM):
    """[`~transformers.CamembertForMaskedLM`] on rank attention."""


class RankCamembertForSequenceClassification(RankCamembertPreTrainedModel, stock.CamembertForSequenceClassification):
    """[`~transformers.CamembertForSequenceClassification`] on rank attention."""


class RankCamembertForMultipleChoice(RankCamembertPreTrainedModel, stock.CamembertForMultipleChoice):
    """[`~transformers.CamembertForMultipleChoice`] on rank attention."""


class RankCamembertForTokenClassification(RankCamembertPreTrainedModel, stock.CamembertForTokenClassification):
    """[`~transformers.CamembertForTokenClassification`] on rank attention."""


class RankCamembertForQuestionAnswering(RankCamembertPreTrainedModel, stock.CamembertForQuestionAnswering):
    """[`~transformers.CamembertForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankCamembertForCausalLM",
    "RankCamembertForMaskedLM",
    "RankCamembertForMultipleChoice",
    "RankCamembertForQuestionAnswering",
    "RankCamembertForSequenceClassification",
    "RankCamembertForTokenClassification",
    "RankCamembertModel",
    "RankCamembertPreTrainedModel",
]
