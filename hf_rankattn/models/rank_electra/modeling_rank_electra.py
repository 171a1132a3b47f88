"""RankELECTRA: ELECTRA whose heads have a query-key rank of their own. Only attention differs from transformers' ELECTRA."""

from transformers.generation import GenerationMixin
from transformers.models.electra import modeling_electra as stock

from ..bert_attention import RankAttention, RankCrossAttention, RankSelfAttention, RankSelfOutput
from ..rank_attention import RankModelMixin, rebind
from .configuration_rank_electra import RankElectraConfig


class RankElectraSelfAttention(RankSelfAttention, stock.ElectraSelfAttention): ...


class RankElectraCrossAttention(RankCrossAttention, stock.ElectraCrossAttention): ...


class RankElectraSelfOutput(RankSelfOutput, stock.ElectraSelfOutput): ...


class RankElectraAttention(RankAttention, stock.ElectraAttention):
    parts = (RankElectraSelfAttention, RankElectraCrossAttention, RankElectraSelfOutput)


class RankElectraLayer(stock.ElectraLayer):
    __init__ = rebind(stock.ElectraLayer.__init__, ElectraAttention=RankElectraAttention)


class RankElectraEncoder(stock.ElectraEncoder):
    __init__ = rebind(stock.ElectraEncoder.__init__, ElectraLayer=RankElectraLayer)


class RankElectraPreTrainedModel(RankModelMixin, stock.ElectraPreTrainedModel):
    """Base class of the ELECTRA family on rank attention."""

    config: RankElectraConfig
    _no_split_modules = ["ElectraEmbeddings", "RankElectraLayer"]

    def rank_classes(self, config):
        inner = isinstance(self, stock.ElectraModel)
        return {"ElectraEncoder": RankElectraEncoder} if inner else {"ElectraModel": RankElectraModel}


class RankElectraModel(RankElectraPreTrainedModel, stock.ElectraModel):
    """[`~transformers.ElectraModel`] on rank attention."""


class RankElectraForPreTraining(RankElectraPreTrainedModel, stock.ElectraForPreTraining):
    """[`~transformers.ElectraForPreTraining`] on rank attention."""


class RankElectraForCausalLM(RankElectraPreTrainedModel, stock.ElectraForCausalLM, GenerationMixin):
    """[`~transformers.ElectraForCausalLM`] on rank attention."""


class RankElectraForMaskedLM(RankElectraPreTrainedModel, stock.ElectraForMaskedLM):
    """[`~transformers.ElectraForMaskedLM`] on rank attention."""


class RankElectraForSequenceClassification(RankElectraPreTrainedModel, stock.ElectraForSequenceClassification):
    """[`~transformers.ElectraForSequenceClassification`] on rank attention."""


class RankElectraForMultipleChoice(RankElectraPreTrainedModel, stock.ElectraForMultipleChoice):
    """[`~transformers.ElectraForMultipleChoice`] on rank attention."""


class RankElectraForTokenClassification(RankElectraPreTrainedModel, stock.ElectraForTokenClassification):
    """[`~transformers.ElectraForTokenClassification`] on rank attention."""


class RankElectraForQuestionAnswering(RankElectraPreTrainedModel, stock.ElectraForQuestionAnswering):
    """[`~transformers.ElectraForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankElectraForCausalLM",
    "RankElectraForMaskedLM",
    "RankElectraForMultipleChoice",
    "RankElectraForPreTraining",
    "RankElectraForQuestionAnswering",
    "RankElectraForSequenceClassification",
    "RankElectraForTokenClassification",
    "RankElectraModel",
    "RankElectraPreTrainedModel",
]
