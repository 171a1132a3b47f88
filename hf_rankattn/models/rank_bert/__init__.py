from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertTokenizer,
)

from .configuration_rank_bert import RankBertConfig
from .modeling_rank_bert import (
    RankBertForMaskedLM,
    RankBertForMultipleChoice,
    RankBertForNextSentencePrediction,
    RankBertForPreTraining,
    RankBertForQuestionAnswering,
    RankBertForSequenceClassification,
    RankBertForTokenClassification,
    RankBertLayer,
    RankBertLMHeadModel,
    RankBertModel,
    RankBertPreTrainedModel,
)


AutoConfig.register(RankBertConfig.model_type, RankBertConfig, exist_ok=True)
AutoModel.register(RankBertConfig, RankBertModel, exist_ok=True)
AutoModelForCausalLM.register(RankBertConfig, RankBertLMHeadModel, exist_ok=True)
AutoModelForMaskedLM.register(RankBertConfig, RankBertForMaskedLM, exist_ok=True)
AutoModelForMultipleChoice.register(RankBertConfig, RankBertForMultipleChoice, exist_ok=True)
AutoModelForNextSentencePrediction.register(RankBertConfig, RankBertForNextSentencePrediction, exist_ok=True)
AutoModelForPreTraining.register(RankBertConfig, RankBertForPreTraining, exist_ok=True)
AutoModelForQuestionAnswering.register(RankBertConfig, RankBertForQuestionAnswering, exist_ok=True)
AutoModelForSequenceClassification.register(RankBertConfig, RankBertForSequenceClassification, exist_ok=True)
AutoModelForTextEncoding.register(RankBertConfig, RankBertModel, exist_ok=True)
AutoModelForTokenClassification.register(RankBertConfig, RankBertForTokenClassification, exist_ok=True)
AutoTokenizer.register(RankBertConfig, BertTokenizer, exist_ok=True)

__all__ = [
    "RankBertConfig",
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
