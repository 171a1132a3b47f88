"""RankBERT: BERT whose heads have a query-key rank of their own. Only attention differs from transformers' BERT."""

from transformers.generation import GenerationMixin
from transformers.models.bert import modeling_bert as stock

from ..bert_attention import RankAttention, RankCrossAttention, RankSelfAttention, RankSelfOutput
from ..rank_attention import RankModelMixin, rebind
from .configuration_rank_bert import RankBertConfig


class RankBertSelfAttention(RankSelfAttention, stock.BertSelfAttention): ...


class RankBertCrossAttention(RankCrossAttention, stock.BertCrossAttention): ...


class RankBertSelfOutput(RankSelfOutput, stock.BertSelfOutput): ...


class RankBertAttention(RankAttention, stock.BertAttention):
    parts = (RankBertSelfAttention, RankBertCrossAttention, RankBertSelfOutput)


class RankBertLayer(stock.BertLayer):
    """[`~transformers.models.bert.modeling_bert.BertLayer`] on rank attention."""

    __init__ = rebind(stock.BertLayer.__init__, BertAttention=RankBertAttention)


class RankBertEncoder(stock.BertEncoder):
    __init__ = rebind(stock.BertEncoder.__init__, BertLayer=RankBertLayer)


class RankBertPreTrainedModel(RankModelMixin, stock.BertPreTrainedModel):
    """Base class of the BERT family on rank attention."""

    config: RankBertConfig
    _no_split_modules = ["BertEmbeddings", "RankBertLayer"]

    def rank_classes(self, config):
        return {"BertEncoder": RankBertEncoder} if isinstance(self, stock.BertModel) else {"BertModel": RankBertModel}


class RankBertModel(RankBertPreTrainedModel, stock.BertModel):
    """[`~transformers.BertModel`] on rank attention."""


class RankBertForPreTraining(RankBertPreTrainedModel, stock.BertForPreTraining):
    """[`~transformers.BertForPreTraining`] on rank attention."""


class RankBertLMHeadModel(RankBertPreTrainedModel, stock.BertLMHeadModel, GenerationMixin):
    """[`~transformers.BertLMHeadModel`] on rank attention."""


class RankBertForMaskedLM(RankBertPreTrainedModel, stock.BertForMaskedLM):
    """[`~transformers.BertForMaskedLM`] on rank attention."""


class RankBertForNextSentencePrediction(RankBertPreTrainedModel, stock.BertForNextSentencePrediction):
    """[`~transformers.BertForNextSentencePrediction`] on rank attention."""


class RankBertForSequenceClassification(RankBertPreTrainedModel, stock.BertForSequenceClassification):
    """[`~transformers.BertForSequenceClassification`] on rank attention."""


class RankBertForMultipleChoice(RankBertPreTrainedModel, stock.BertForMultipleChoice):
    """[`~transformers.BertForMultipleChoice`] on rank attention."""


class RankBertForTokenClassification(RankBertPreTrainedModel, stock.BertForTokenClassification):
    """[`~transformers.BertForTokenClassification`] on rank attention."""


class RankBertForQuestionAnswering(RankBertPreTrainedModel, stock.BertForQuestionAnswering):
    """[`~transformers.BertForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankBertForMaskedLM",
    "RankBertForMultipleChoice",
    "RankBertForNextSentencePrediction",
    "RankBertForPreTraining",
    "RankBertForQuestionAnswering",
    "RankBertForSequenceClassification",
    "RankBertForTokenClassification",
    "RankBertLMHeadModel",
    "RankBertLayer",
    "RankBertModel",
    "RankBertPreTrainedModel",
]
