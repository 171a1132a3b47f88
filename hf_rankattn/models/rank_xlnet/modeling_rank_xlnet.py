"""RankXLNet: XLNet whose heads have a query-key rank of their own. Only attention differs from transformers' XLNet."""

import inspect
import math
from functools import partial
from types import CodeType, FunctionType

import torch
from torch import nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel
from transformers.models.xlnet.modeling_xlnet import (
    XLNetForMultipleChoice,
    XLNetForQuestionAnswering,
    XLNetForQuestionAnsweringSimple,
    XLNetForSequenceClassification,
    XLNetForTokenClassification,
    XLNetLayer,
    XLNetLMHeadModel,
    XLNetModel,
    XLNetPreTrainedModel,
    XLNetRelativeAttention,
)
from transformers.utils import logging

from .configuration_rank_xlnet import RankXLNetConfig


def names_of(code: CodeType) -> set[str]:
    """All global names that a code object uses, those of its comprehensions included."""
    nested = (names_of(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*nested)


def rebind(function, **names):
    """`function` with some of its global names bound to other objects.

    This is how the stock `__init__` builds our classes: its code runs as transformers wrote it, nothing is copied, and
    unlike a patched module nobody else sees the change.
    """
    function = inspect.unwrap(function)  # DeepSpeed and others wrap the constructors of all modules
    if absent := sorted(set(names) - names_of(function.__code__)):
        raise RuntimeError(
            f"{function.__module__}.{function.__qualname__} does not build {', '.join(absent)}: it is not the stock "
            "constructor, or not one of the supported transformers versions. To extend a rank model, derive from it."
        )
    scope = {**function.__globals__, **names}
    bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def set_heads(module: nn.Module, config, layer_idx: int | None) -> None:
    """Write the geometry of the layer on an attention module, as numbers."""
    heads = config.head_geometry(layer_idx)
    module.config = config
    module.num_attention_heads, module.qk_rank, module.v_head_dim = heads.num_heads, heads.qk_rank, heads.v_head_dim
    module.scaling = heads.qk_scale
    if (
        heads.qk_rank == heads.v_head_dim
    ):  # names of stock attention, which have a meaning only where there is one width
        module.attention_head_size = heads.qk_rank
        module.all_head_size = heads.num_heads * heads.qk_rank
    temperature = nn.Parameter(torch.full((heads.num_heads,), math.log(heads.qk_rank))) if heads.qk_norm else None
    module.register_parameter("log_temperature", temperature)


def unit_norm(states: torch.Tensor) -> torch.Tensor:
    """Rows of length one, computed in float32 at least, as half precision has no room for the squares."""
    wide = states if states.dtype == torch.float64 else states.float()
    return nn.functional.normalize(wide, dim=-1).to(states.dtype)


def init_temperature(module: nn.Module) -> None:
    """Start with logits of unit variance for isotropic queries and keys: qk_scale * qk_rank * cos = sqrt(qk_rank) * cos."""
    if getattr(module, "log_temperature", None) is not None:
        init.constant_(module.log_temperature, math.log(module.qk_rank))


def check_config(model: nn.Module, config, expected: type) -> None:
    """Refuse a configuration of another family, or one that was spoilt since it was made, before anything is built."""
    # by model type too: exported source is loaded as modules of its own, in which the same class is another object
    if not isinstance(config, expected) and getattr(config, "model_type", None) != expected.model_type:
        stock = f" Use {expected.__name__}(**config.to_dict())." if hasattr(config, "to_dict") else ""
        raise ValueError(
            f"{type(model).__name__} is built from a {expected.__name__}, got a {type(config).__name__}."
            + (stock if getattr(config, "model_type", "") == expected.stock_model_type else "")
        )
    config.validate_architecture()


class ShapeMismatchError(RuntimeError, ValueError):
    """A `ValueError` that code written for stock `from_pretrained`, which raises a `RuntimeError`, catches as well."""


def load_safely(load, pretrained_model_name_or_path, *model_args, **kwargs):
    """`from_pretrained` that reads safetensors only, and says what to do when shapes do not fit."""
    kwargs.setdefault("use_safetensors", True)  # a pickle can run code when it is read
    try:
        return load(pretrained_model_name_or_path, *model_args, **kwargs)
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        raise OSError(
            f"{error} Only safetensors are read here; for a pickle you trust, pass use_safetensors=False."
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            kwargs.update(ignore_mismatched_sizes=True, output_loading_info=True)
            _, info = load(pretrained_model_name_or_path, *model_args, **kwargs)
        finally:
            logging.set_verbosity(verbosity)
        shapes = [
            f"{key} is {tuple(ours)}, the config asks for {tuple(asked)}"
            for key, ours, asked in info["mismatched_keys"]
        ]
        raise ShapeMismatchError(
            f"{len(shapes)} weights of {pretrained_model_name_or_path} do not fit the configuration: {sorted(shapes)[0]}. "
            "A checkpoint keeps the `qk_rank`, `v_head_dim` and `num_labels` it was saved with: load it without "
            "overriding them, or pass ignore_mismatched_sizes=True to start the misfits from fresh random weights."
        ) from error


class RankXLNetRelativeAttention(XLNetRelativeAttention):
    def __init__(self, config, layer_idx=None):
        nn.Module.__init__(self)  # the parent's own refuses heads that do not divide the hidden size
        set_heads(self, config, layer_idx)
        self.n_head, self.d_model = config.n_head, config.d_model
        if (config if layer_idx is None else config.per_layer_config[layer_idx]).qk_scale is None:
            self.scaling = (
                1 / self.qk_rank**0.5
            )  # stock XLNet's form, which differs from qk_rank ** -0.5 in a last bit
        if self.qk_rank == self.v_head_dim:
            self.d_head = self.qk_rank
        query_shape = (self.n_head, self.qk_rank)
        value_shape = (self.n_head, self.v_head_dim)
        self.q = nn.Parameter(torch.empty(self.d_model, *query_shape))
        self.k = nn.Parameter(torch.empty(self.d_model, *query_shape))
        self.v = nn.Parameter(torch.empty(self.d_model, *value_shape))
        self.o = nn.Parameter(torch.empty(self.d_model, *value_shape))
        self.r = nn.Parameter(torch.empty(self.d_model, *query_shape))
        self.r_r_bias = nn.Parameter(torch.empty(query_shape))
        self.r_s_bias = nn.Parameter(torch.empty(query_shape))
        self.r_w_bias = nn.Parameter(torch.empty(query_shape))
        self.seg_embed = nn.Parameter(torch.empty(2, *query_shape))
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    @property
    def scale(self) -> float | torch.Tensor:
        """The factor that stock `rel_attn_core` puts on the sum of its three terms (batch, heads, n, n)."""
        if self.log_temperature is None:
            return self.scaling
        return self.log_temperature.exp()[:, None, None].to(self.q.dtype) * self.scaling

    def rel_attn_core(self, q_head, k_head_h, v_head_h, k_head_r, **kwargs):
        if self.log_temperature is not None:
            q_head, k_head_h, k_head_r = unit_norm(q_head), unit_norm(k_head_h), unit_norm(k_head_r)
        return super().rel_attn_core(q_head, k_head_h, v_head_h, k_head_r, **kwargs)


class RankXLNetLayer(XLNetLayer):
    def __init__(self, config, layer_idx=None):
        attention = partial(RankXLNetRelativeAttention, layer_idx=layer_idx)
        rebind(XLNetLayer.__init__, XLNetRelativeAttention=attention)(self, config)


class RankXLNetPreTrainedModel(XLNetPreTrainedModel):
    config: RankXLNetConfig
    _no_split_modules = ["RankXLNetLayer"]
    model_tags = ["rank-attention"]

    def __init__(self, config, *args, **kwargs):
        check_config(self, config, RankXLNetConfig)
        # Stock code builds the layers in order and does not number them.
        layers = iter(range(config.n_layer))
        own_layers = {"XLNetLayer": lambda config: RankXLNetLayer(config, layer_idx=next(layers))}
        names = own_layers if isinstance(self, XLNetModel) else {"XLNetModel": RankXLNetModel}
        build = super().__init__.__func__  # that of the stock class, or of PreTrainedModel below a class of the user's
        if inspect.unwrap(build) is not inspect.unwrap(PreTrainedModel.__init__):
            build = rebind(build, **names)
        build(self, config, *args, **kwargs)

    def _init_weights(self, module):
        super()._init_weights(module)
        init_temperature(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        load = super().from_pretrained
        return load_safely(load, pretrained_model_name_or_path, *model_args, **kwargs)


class RankXLNetModel(RankXLNetPreTrainedModel, XLNetModel):
    """[`~transformers.XLNetModel`] on rank attention."""


class RankXLNetLMHeadModel(RankXLNetPreTrainedModel, XLNetLMHeadModel, GenerationMixin):
    """[`~transformers.XLNetLMHeadModel`] on rank attention."""


class RankXLNetForSequenceClassification(RankXLNetPreTrainedModel, XLNetForSequenceClassification):
    """[`~transformers.XLNetForSequenceClassification`] on rank attention."""


class RankXLNetForTokenClassification(RankXLNetPreTrainedModel, XLNetForTokenClassification):
    """[`~transformers.XLNetForTokenClassification`] on rank attention."""


class RankXLNetForMultipleChoice(RankXLNetPreTrainedModel, XLNetForMultipleChoice):
    """[`~transformers.XLNetForMultipleChoice`] on rank attention."""


class RankXLNetForQuestionAnsweringSimple(RankXLNetPreTrainedModel, XLNetForQuestionAnsweringSimple):
    """[`~transformers.XLNetForQuestionAnsweringSimple`] on rank attention."""


class RankXLNetForQuestionAnswering(RankXLNetPreTrainedModel, XLNetForQuestionAnswering):
    """[`~transformers.XLNetForQuestionAnswering`] on rank attention."""


__all__ = [
    "RankXLNetForMultipleChoice",
    "RankXLNetForQuestionAnswering",
    "RankXLNetForQuestionAnsweringSimple",
    "RankXLNetForSequenceClassification",
    "RankXLNetForTokenClassification",
    "RankXLNetLMHeadModel",
    "RankXLNetModel",
    "RankXLNetPreTrainedModel",
]
