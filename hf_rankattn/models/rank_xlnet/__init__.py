from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    XLNetTokenizer,
)

from .configuration_rank_xlnet import RankXLNetConfig
from .modeling_rank_xlnet import (
    RankXLNetForMultipleChoice,
    RankXLNetForQuestionAnswering,
    RankXLNetForQuestionAnsweringSimple,
    RankXLNetForSequenceClassification,
    RankXLNetForTokenClassification,
    RankXLNetLMHeadModel,
    RankXLNetModel,
    RankXLNetPreTrainedModel,
)


AutoConfig.register(RankXLNetConfig.model_type, RankXLNetConfig, exist_ok=True)
AutoModel.register(RankXLNetConfig, RankXLNetModel, exist_ok=True)
AutoModelForCausalLM.register(RankXLNetConfig, RankXLNetLMHeadModel, exist_ok=True)
AutoModelForMultipleChoice.register(RankXLNetConfig, RankXLNetForMultipleChoice, exist_ok=True)
AutoModelForPreTraining.register(RankXLNetConfig, RankXLNetLMHeadModel, exist_ok=True)
AutoModelForQuestionAnswering.register(RankXLNetConfig, RankXLNetForQuestionAnsweringSimple, exist_ok=True)
AutoModelForSequenceClassification.register(RankXLNetConfig, RankXLNetForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(RankXLNetConfig, RankXLNetForTokenClassification, exist_ok=True)
AutoTokenizer.register(RankXLNetConfig, XLNetTokenizer, exist_ok=True)

__all__ = [
    "RankXLNetConfig",
    "RankXLNetForMultipleChoice",
    "RankXLNetForQuestionAnswering",
    "RankXLNetForQuestionAnsweringSimple",
    "RankXLNetForSequenceClassification",
    "RankXLNetForTokenClassification",
    "RankXLNetLMHeadModel",
    "RankXLNetModel",
    "RankXLNetPreTrainedModel",
]
