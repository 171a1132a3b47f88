"""RankRoBERTa: RoBERTa whose heads have a query-key rank of their own. Only attention differs from transformers' RoBERTa."""

from transformers.generation import GenerationMixin
from transformers.models.roberta import modeling_roberta as stock

from ..bert_attention import RankAttention, RankCrossAttention, RankSelfAttention, RankSelfOutput
from ..rank_attention import RankModelMixin, rebind
from .configuration_rank_roberta import RankRobertaConfig


class RankRobertaSelfAttention(RankSelfAttention, stock.RobertaSelfAttention): ...


class RankRobertaCrossAttention(RankCrossAttention, stock.RobertaCrossAttention): ...


class RankRobertaSelfOutput(RankSelfOutput, stock.RobertaSelfOutput): ...


class RankRobertaAttention(RankAttention, stock.RobertaAttention):
    parts = (RankRobertaSelfAttention, RankRobertaCrossAttention, RankRobertaSelfOutput)


class RankRobertaLayer(stock.RobertaLayer):
    __init__ = rebind(stock.RobertaLayer.__init__, RobertaAttention=RankRobertaAttention)


class RankRobertaEncoder(stock.RobertaEncoder):
    __init__ = rebind(stock.RobertaEncoder.__init__, RobertaLayer=RankRobertaLayer)


class RankRobertaPreTrainedModel(RankModelMixin, stock.RobertaPreTrainedModel):
    """Base class of the RoBERTa family on rank attention."""

    config: RankRobertaConfig
    _no_split_modules = ["RobertaEmbeddings", "RankRobertaLayer"]

    def rank_classes(self, config):
        inner = isinstance(self, stock.RobertaModel)
        return {"RobertaEncoder": RankRobertaEncoder} if inner else {"RobertaModel": RankRobertaModel}


class RankRobertaModel(RankRobertaPreTrainedModel, stock.RobertaModel):
    """[`~transformers.RobertaModel`] on rank attention."""


class RankRobertaForCausalLM(RankRobertaPreTrainedModel, stock.RobertaForCausalLM, GenerationMixin):
    """[`~transformers.RobertaForCausalLM`] on rank attention."""


class RankRobertaForMaskedLM(RankRobertaPreTrainedModel, stock.RobertaForMaskedLM):
    """[`~transformers.RobertaForMaskedLM`] on rank attention."""


class RankRobertaForSequenceClassification(RankRobertaPreTrainedModel, stock.RobertaForSequenceClassification):
    """[`~transformers.RobertaForSequenceClassification`] on rank attention."""


class RankRobertaForMultipleChoice(RankRobertaPreTrainedModel, stock.RobertaForMultipleChoice):
    """[`~transformers.RobertaForMultipleChoice`] on rank attention."""


class RankRobertaForTokenClassification(RankRobertaPreTrainedModel, stock.RobertaForTokenClassification):
    """[`~transformers.RobertaForTokenClassification`] on rank attention."""


class RankRobertaForQuestionAnswering(RankRobertaPreTrainedModel, stock.RobertaForQuestionAnswering):
    """[`~transformers.RobertaForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankRobertaForCausalLM",
    "RankRobertaForMaskedLM",
    "RankRobertaForMultipleChoice",
    "RankRobertaForQuestionAnswering",
    "RankRobertaForSequenceClassification",
    "RankRobertaForTokenClassification",
    "RankRobertaModel",
    "RankRobertaPreTrainedModel",
]
