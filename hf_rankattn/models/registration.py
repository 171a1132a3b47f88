"""Registration of the rank families with transformers' Auto classes."""

import inspect
from types import ModuleType
from typing import Any

import transformers.models.auto.modeling_auto as modeling_auto
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING


_twins: dict[type, type[Any]] = {}


def rank_twin(kind: type) -> type[Any] | None:
    """The rank class of a stock model or config class, which has the same name behind `Rank`; None if there is none."""
    return _twins.get(kind)


def auto_classes(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """Name of an Auto class -> the model class it builds, for every Auto class that knows a config class."""
    autos = {name: auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")}
    mappings = {name: auto._model_mapping for name, auto in autos.items() if hasattr(auto, "_model_mapping")}
    return {name: mapping[config_class] for name, mapping in mappings.items() if config_class in mapping}


def stock_class(kind: type) -> type:
    """The first class of transformers that a class derives from."""
    return next(base for base in inspect.getmro(kind) if base.__module__.startswith("transformers."))


def register_family(family: ModuleType) -> None:
    """Register the config and the models of a family (the package `family`) with the Auto classes.

    A family that derives from a stock one is registered with every Auto class that knows the stock family, and with its
    tokenizer: the class `XForTask` has the twin `RankXForTask`. Any other family is registered by the names of its classes.
    """
    (config_class,) = (found for name, found in vars(family).items() if name.endswith("Config"))
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for name, found in vars(family).items():
        if isinstance(found, type) and (stock := stock_class(found)).__name__ == name.removeprefix("Rank"):
            _twins[stock] = found
    stock_config = stock_class(config_class)
    if stock_config is PreTrainedConfig:
        stem = config_class.__name__.removesuffix("Config")
        models = {
            "AutoModel" + name.removeprefix(stem).removeprefix("Model"): twin for name, twin in vars(family).items()
        }
    else:
        models = {name: getattr(family, f"Rank{stock.__name__}") for name, stock in auto_classes(stock_config).items()}
        AutoTokenizer.register(config_class, TOKENIZER_MAPPING[stock_config], exist_ok=True)
    for name, model in models.items():
        if hasattr(modeling_auto, name):
            getattr(modeling_auto, name).register(config_class, model, exist_ok=True)
