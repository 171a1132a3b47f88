"""Registration of the rank families with transformers' Auto classes."""

import inspect
from types import ModuleType

import transformers.models.auto.modeling_auto as modeling_auto
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel


def auto_classes(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """Name of an Auto class -> the model class it builds, for every Auto class that knows a config class."""
    autos = {name: auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")}
    mappings = {name: auto._model_mapping for name, auto in autos.items() if hasattr(auto, "_model_mapping")}
    return {name: mapping[config_class] for name, mapping in mappings.items() if config_class in mapping}


def register_twin(config_class: type[PreTrainedConfig], modeling: ModuleType, tokenizer_class: type) -> None:
    """Register the family of `config_class` with every Auto class that knows the stock family it derives from.

    The class `XForTask` of the stock family has the twin `RankXForTask` in the module `modeling`.
    """
    stock_config = next(base for base in inspect.getmro(config_class) if base.__module__.startswith("transformers."))
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for name, stock in auto_classes(stock_config).items():
        twin = getattr(modeling, f"Rank{stock.__name__}")
        getattr(modeling_auto, name).register(config_class, twin, exist_ok=True)
    AutoTokenizer.register(config_class, tokenizer_class, exist_ok=True)
