"""RankXLM-RoBERTa: XLM-RoBERTa whose heads have a query-key rank of their own. Only attention differs from transformers' XLM-RoBERTa."""

from transformers.generation import GenerationMixin
from transformers.models.xlm_roberta import modeling_xlm_roberta as stock

from ..bert_attention import RankAttention, RankCrossAttention, RankSelfAttention, RankSelfOutput
from ..rank_attention import RankModelMixin, rebind
from .configuration_rank_xlm_roberta import RankXLMRobertaConfig


class RankXLMRobertaSelfAttention(RankSelfAttention, stock.XLMRobertaSelfAttention): ...


class RankXLMRobertaCrossAttention(RankCrossAttention, stock.XLMRobertaCrossAttention): ...


class RankXLMRobertaSelfOutput(RankSelfOutput, stock.XLMRobertaSelfOutput): ...


class RankXLMRobertaAttention(RankAttention, stock.XLMRobertaAttention):
    parts = (RankXLMRobertaSelfAttention, RankXLMRobertaCrossAttention, RankXLMRobertaSelfOutput)


class RankXLMRobertaLayer(stock.XLMRobertaLayer):
    __init__ = rebind(stock.XLMRobertaLayer.__init__, XLMRobertaAttention=RankXLMRobertaAttention)


class RankXLMRobertaEncoder(stock.XLMRobertaEncoder):
    __init__ = rebind(stock.XLMRobertaEncoder.__init__, XLMRobertaLayer=RankXLMRobertaLayer)


class RankXLMRobertaPreTrainedModel(RankModelMixin, stock.XLMRobertaPreTrainedModel):
    """Base class of the XLM-RoBERTa family on rank attention."""

    config: RankXLMRobertaConfig
    _no_split_modules = ["XLMRobertaEmbeddings", "RankXLMRobertaLayer"]

    def rank_classes(self, config):
        inner = isinstance(self, stock.XLMRobertaModel)
        return {"XLMRobertaEncoder": RankXLMRobertaEncoder} if inner else {"XLMRobertaModel": RankXLMRobertaModel}


class RankXLMRobertaModel(RankXLMRobertaPreTrainedModel, stock.XLMRobertaModel):
    """[`~transformers.XLMRobertaModel`] on rank attention."""


class RankXLMRobertaForCausalLM(RankXLMRobertaPreTrainedModel, stock.XLMRobertaForCausalLM, GenerationMixin):
    """[`~transformers.XLMRobertaForCausalLM`] on rank attention."""


class RankXLMRobertaForMaskedLM(RankXLMRobertaPreTrainedModel, stock.XLMRobertaForMaskedLM):
    """[`~transformers.XLMRobertaForMaskedLM`] on rank attention."""


class RankXLMRobertaForSequenceClassification(
    RankXLMRobertaPreTrainedModel, stock.XLMRobertaForSequenceClassification
):
    """[`~transformers.XLMRobertaForSequenceClassification`] on rank attention."""


class RankXLMRobertaForMultipleChoice(RankXLMRobertaPreTrainedModel, stock.XLMRobertaForMultipleChoice):
    """[`~transformers.XLMRobertaForMultipleChoice`] on rank attention."""


class RankXLMRobertaForTokenClassification(RankXLMRobertaPreTrainedModel, stock.XLMRobertaForTokenClassification):
    """[`~transformers.XLMRobertaForTokenClassification`] on rank attention."""


class RankXLMRobertaForQuestionAnswering(RankXLMRobertaPreTrainedModel, stock.XLMRobertaForQuestionAnswering):
    """[`~transformers.XLMRobertaForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankXLMRobertaForCausalLM",
    "RankXLMRobertaForMaskedLM",
    "RankXLMRobertaForMultipleChoice",
    "RankXLMRobertaForQuestionAnswering",
    "RankXLMRobertaForSequenceClassification",
    "RankXLMRobertaForTokenClassification",
    "RankXLMRobertaModel",
    "RankXLMRobertaPreTrainedModel",
]
