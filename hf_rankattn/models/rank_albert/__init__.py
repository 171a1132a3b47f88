from transformers import (
    AlbertTokenizer,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from .configuration_rank_albert import RankAlbertConfig
from .modeling_rank_albert import (
    RankAlbertForMaskedLM,
    RankAlbertForMultipleChoice,
    RankAlbertForPreTraining,
    RankAlbertForQuestionAnswering,
    RankAlbertForSequenceClassification,
    RankAlbertForTokenClassification,
    RankAlbertModel,
    RankAlbertPreTrainedModel,
)


AutoConfig.register(RankAlbertConfig.model_type, RankAlbertConfig, exist_ok=True)
AutoModel.register(RankAlbertConfig, RankAlbertModel, exist_ok=True)
AutoModelForMaskedLM.register(RankAlbertConfig, RankAlbertForMaskedLM, exist_ok=True)
AutoModelForMultipleChoice.register(RankAlbertConfig, RankAlbertForMultipleChoice, exist_ok=True)
AutoModelForPreTraining.register(RankAlbertConfig, RankAlbertForPreTraining, exist_ok=True)
AutoModelForQuestionAnswering.register(RankAlbertConfig, RankAlbertForQuestionAnswering, exist_ok=True)
AutoModelForSequenceClassification.register(RankAlbertConfig, RankAlbertForSequenceClassification, exist_ok=True)
AutoModelForTextEncoding.register(RankAlbertConfig, RankAlbertModel, exist_ok=True)
AutoModelForTokenClassification.register(RankAlbertConfig, RankAlbertForTokenClassification, exist_ok=True)
AutoTokenizer.register(RankAlbertConfig, AlbertTokenizer, exist_ok=True)

__all__ = [
    "RankAlbertConfig",
    "RankAlbertForMaskedLM",
    "RankAlbertForMultipleChoice",
    "RankAlbertForPreTraining",
    "RankAlbertForQuestionAnswering",
    "RankAlbertForSequenceClassification",
    "RankAlbertForTokenClassification",
    "RankAlbertModel",
    "RankAlbertPreTrainedModel",
]
