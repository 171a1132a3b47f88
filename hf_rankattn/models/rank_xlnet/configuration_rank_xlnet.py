"""RankXLNet configuration: XLNet with the query-key rank of a head as a field of its own."""

import math
from functools import wraps
from typing import Any, NamedTuple

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from transformers import XLNetConfig


RANK_FIELDS = ("qk_rank", "v_head_dim", "qk_norm", "qk_scale")


class RankConfigError(StrictDataclassFieldValidationError, StrictDataclassClassValidationError, ValueError):
    """A `ValueError` that code written for transformers' strict configs catches as well."""

    def __init__(self, message: str):
        Exception.__init__(self, message)


class HeadGeometry(NamedTuple):
    """The numbers from which one attention layer is built."""

    num_heads: int
    qk_rank: int
    v_head_dim: int
    qk_norm: bool
    qk_scale: float


def check_rank_field(name: str, value: Any) -> None:
    """Raise a `ValueError` that says what `name` may be, unless `value` is it."""
    if value is None and name != "qk_norm":
        return
    if name == "qk_norm":
        if not isinstance(value, bool):
            raise ValueError(f"`qk_norm` is a switch and must be True or False, got {value!r}.")
    elif name == "qk_scale":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"`qk_scale` multiplies the logits and must be a positive finite number, got {value!r}. "
                "Leave it out (None) for qk_rank ** -0.5."
            )
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`{name}` is a width and must be an integer of at least 1, got {value!r}. Leave it out (None) for the "
            f'stock width hidden_size / num_attention_heads; use `per_layer_config={{0: {{"{name}": 8}}}}`, or a list '
            "with one integer per layer, for values that differ by layer."
        )


def value_errors(cls):
    """Let a bad argument of a strict config raise a `ValueError` with one readable message."""
    strict_init = cls.__init__

    @wraps(strict_init)
    def __init__(self, *args, **kwargs):
        try:
            for name in RANK_FIELDS:
                if name in kwargs and not isinstance(kwargs[name], list):
                    check_rank_field(name, kwargs[name])
            strict_init(self, *args, **kwargs)
        except (StrictDataclassError, ValueError) as error:
            raise RankConfigError(f"{cls.__name__}: {error.__cause__ or error}") from error

    cls.__init__ = __init__
    return cls


class RankConfigMixin:
    """What the four rank fields need beyond being fields: defaults, per-layer values, checks."""

    stock_model_type: str | None = None

    def __post_init__(self, **kwargs):
        if "head_dim" in kwargs:
            raise ValueError(
                f"`head_dim` is not a field of this family and stock {self.stock_model_type or 'models'} would ignore it. "
                "Set `qk_rank` for the query/key width of a head and `v_head_dim` for its value width."
            )
        model_type = kwargs.pop("model_type", self.model_type)
        if model_type not in (self.model_type, self.stock_model_type):
            raise ValueError(
                f"got a configuration of model type {model_type!r}, expected {self.model_type!r}"
                + (f" or the stock {self.stock_model_type!r}" if self.stock_model_type else "")
                + ". Load it with the class of its own family."
            )
        per_layer = self._spread_lists(kwargs.pop("per_layer_config", None))
        super().__post_init__(**kwargs)
        if per_layer is not None:
            self.per_layer_config = per_layer

    def _layers_of_list_entry(self, num_entries: int) -> list[list[int]]:
        """The layers that each entry of a list such as `qk_rank=[4, 8]` speaks of."""
        if num_entries != self.num_hidden_layers:
            raise ValueError(
                f"a list needs one integer per layer: got {num_entries} for num_hidden_layers={self.num_hidden_layers}."
            )
        return [[layer] for layer in range(num_entries)]

    def _spread_lists(self, per_layer_config: dict | None) -> dict[int, dict[str, Any]] | None:
        """`per_layer_config` with the entries of list-valued widths written into it."""
        lists = {name: getattr(self, name) for name in ("qk_rank", "v_head_dim")}
        lists = {name: values for name, values in lists.items() if isinstance(values, list)}
        if not lists:
            return per_layer_config
        spread: dict[int, dict[str, Any]] = {int(i): dict(given) for i, given in (per_layer_config or {}).items()}
        for name, values in lists.items():
            for value, layers in zip(values, self._layers_of_list_entry(len(values)), strict=True):
                check_rank_field(name, value)
                for layer in layers:
                    if spread.setdefault(layer, {}).setdefault(name, value) != value:
                        raise ValueError(
                            f"layer {layer} gets two values of `{name}`: give a list or per_layer_config."
                        )
            setattr(self, name, None)
        return spread

    def validate_architecture(self):
        """Refuse widths that cannot be built, in every layer."""
        if not self.is_heterogeneous:
            resolve_heads(self)
            return
        foreign = sorted(set(self.per_layer_attributes) - set(RANK_FIELDS))
        if foreign or any(layer.skip for layer in self.per_layer_config):
            raise ValueError(
                f"`per_layer_config` may set {', '.join(RANK_FIELDS)}; got {', '.join(foreign) or 'skip'}, "
                "which the layers of this family would not apply."
            )
        for layer in self.per_layer_config:
            for name in RANK_FIELDS:
                check_rank_field(name, getattr(layer, name))
            resolve_heads(layer)

    def head_geometry(self, layer_idx: int | None = None) -> HeadGeometry:
        """The widths, norm and scale of the heads of one layer, defaults filled in."""
        return resolve_heads(self if layer_idx is None else self.per_layer_config[layer_idx])

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        # A stock checkpoint is the case qk_rank=None, not the mistake that transformers would warn of.
        if config_dict.get("model_type") == cls.stock_model_type:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # transformers sets overrides on the finished config, past the checks; these go in by the front door.
        front = {name: kwargs.pop(name) for name in (*RANK_FIELDS, "per_layer_config", "head_dim") if name in kwargs}
        return super().from_dict({**config_dict, **front}, **kwargs)


def resolve_heads(config) -> HeadGeometry:
    """Fill in the defaults of a config that holds for one layer; `ValueError` if no heads can be built from it."""
    for name in RANK_FIELDS:
        check_rank_field(name, getattr(config, name))
    hidden_size, num_heads = config.hidden_size, config.num_attention_heads
    if num_heads < 1 or hidden_size < 1:
        raise ValueError(f"hidden_size={hidden_size} and num_attention_heads={num_heads} must both be at least 1.")
    stock_width, remainder = divmod(hidden_size, num_heads)
    for name in ("qk_rank", "v_head_dim"):
        if getattr(config, name) is None and remainder:
            raise ValueError(
                f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}, so there is no stock head "
                f"width to fall back on: set `{name}` (and the other of `qk_rank`, `v_head_dim`) to an integer."
            )
    qk_rank = config.qk_rank or stock_width
    return HeadGeometry(
        num_heads=num_heads,
        qk_rank=qk_rank,
        v_head_dim=config.v_head_dim or stock_width,
        qk_norm=config.qk_norm,
        qk_scale=qk_rank**-0.5 if config.qk_scale is None else float(config.qk_scale),
    )


@value_errors
@strict
class RankXLNetConfig(RankConfigMixin, XLNetConfig):
    r"""
    Configuration of a [`RankXLNetModel`]: every field of [`~transformers.XLNetConfig`], and the geometry of the heads.

    Args:
        qk_rank (`int`, *optional*, defaults to `d_model / n_head`):
            Query/key width of each head: the largest rank its bilinear form can have. A list gives one per layer. The
            position keys, the segment embedding and the three biases meet the same query, so they shrink with it.
        v_head_dim (`int`, *optional*, defaults to `d_model / n_head`):
            Value width of each head. When it is given, the heads need not divide the hidden size.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Unit-norm queries, content keys and position keys, with one learned log-temperature per head. The biases,
            which are added to the query, and the segment embedding stay free.
        qk_scale (`float`, *optional*, defaults to `qk_rank ** -0.5`):
            Factor on the logits.

    With all four left alone, the model is stock XLNet to the last bit, under the stock parameter names.

    Example:

    ```python
    >>> from hf_rankattn import RankXLNetConfig, RankXLNetModel

    >>> model = RankXLNetModel(RankXLNetConfig(qk_rank=16, n_layer=2))
    >>> model.layer[0].rel_attn.r.shape
    torch.Size([1024, 16, 16])
    ```"""

    model_type = "rank_xlnet"
    stock_model_type = "xlnet"
    keys_to_ignore_at_inference = ["mems", "hidden_states", "attentions"]

    qk_rank: int | list[int] | None = None
    v_head_dim: int | list[int] | None = None
    qk_norm: bool = False
    qk_scale: float | int | None = None

    def __post_init__(self, **kwargs):
        if self.n_head < 1:
            raise ValueError(f"`n_head` must be at least 1, got {self.n_head}.")
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        super().validate_architecture()
        if self.d_head != self.d_model // self.n_head:
            raise ValueError(
                f"`d_head`={self.d_head} would be ignored: leave it out, and set `qk_rank` for the query/key width of a "
                "head and `v_head_dim` for its value width."
            )


__all__ = ["RankXLNetConfig"]
