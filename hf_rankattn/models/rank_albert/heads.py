"""The geometry of heads as config fields: defaults, per-layer values, checks.

The four model folders hold the same copy of this file, since exported source cannot import across folders.
"""

import sys
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Number
from typing import Any, NamedTuple

from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)

from .stock_fields import check_loose_arguments, check_stock_fields


RANK_FIELDS = ("qk_rank", "v_head_dim", "qk_norm", "qk_scale")
LISTED_FIELDS = ("qk_rank", "v_head_dim")
WIDEST = 2**20  # beyond any head that can be allocated
LONGEST_MESSAGE = 1000


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
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ValueError(
                f"`qk_scale` multiplies the logits and must be a positive finite number, got {value!r}. "
                "Leave it out (None) for qk_rank ** -0.5."
            )
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`{name}` is a width and must be an integer of at least 1, got {value!r}. Leave it out (None) for the "
            f'stock width hidden_size / num_attention_heads; use `per_layer_config={{0: {{"{name}": 8}}}}`, or give the '
            "config a list when it is made, for values that differ by layer."
        )
    elif value > WIDEST:
        raise ValueError(f"`{name}` must be at most {WIDEST}, got a number of {len(str(value))} digits.")


def plain(value: Any) -> Any:
    """Numbers of numpy and tuples as the int, float and list that JSON knows."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | complex) or not isinstance(value, Number):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def value_errors(cls):
    """Let a bad argument of a strict config raise a `ValueError` with one readable message."""
    strict_init = cls.__init__

    @wraps(strict_init)
    def __init__(self, *args, **kwargs):
        try:
            for name in RANK_FIELDS:
                if name in kwargs:
                    kwargs[name] = plain(kwargs[name])
                    listed = isinstance(kwargs[name], list) and name in LISTED_FIELDS
                    for value in kwargs[name] if listed else [kwargs[name]]:
                        check_rank_field(name, value)
            check_loose_arguments(kwargs)
            strict_init(self, *args, **kwargs)
        except (StrictDataclassError, ValueError) as error:
            reason = str(error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error)
            if len(reason) > LONGEST_MESSAGE:  # whoever gives a book gets its first words back
                reason = f"{reason[:LONGEST_MESSAGE]} ... ({len(reason)} characters)"
            raise RankConfigError(f"{cls.__name__}: {reason}") from error

    cls.__init__ = __init__
    return cls


class RankConfigMixin:
    """What the four rank fields need beyond being fields: defaults, per-layer values, checks."""

    stock_model_type: str | None = None
    # names that a misspelt argument is compared with; stock configs carry too many old keys to refuse all unknown ones
    own_fields: tuple[str, ...] = RANK_FIELDS

    def __post_init__(self, **kwargs):
        if "head_dim" in kwargs:
            raise ValueError(
                f"`head_dim` is not a field of this family and stock {self.stock_model_type or 'models'} would ignore it. "
                "Set `qk_rank` for the query/key width of a head and `v_head_dim` for its value width."
            )
        # what is read from a file may carry whatever other programs have put there
        for name in () if kwargs.pop("_read_from_file", False) else kwargs:
            if not hasattr(self, name) and (meant := get_close_matches(name, self.own_fields, n=1, cutoff=0.66)):
                raise ValueError(f"`{name}` is not a field. Did you mean `{meant[0]}`?")
        model_type = kwargs.pop("model_type", self.model_type)
        if model_type not in (self.model_type, self.stock_model_type):
            raise ValueError(
                f"got a configuration of model type {model_type!r}, expected {self.model_type!r}"
                + (f" or the stock {self.stock_model_type!r}" if self.stock_model_type else "")
                + ". Load it with the class of its own family."
            )
        per_layer = self._spread_lists(self._checked_layers(kwargs.pop("per_layer_config", None)))
        super().__post_init__(**kwargs)
        if per_layer:
            self.per_layer_config = per_layer

    @staticmethod
    def _checked_layers(per_layer_config: Any) -> dict[int, dict[str, Any]]:
        """`per_layer_config` with integer keys and plain values, or a `ValueError`."""
        example = 'it maps layers to fields, such as {0: {"qk_rank": 8}}'
        if per_layer_config is not None and not isinstance(per_layer_config, Mapping):
            raise ValueError(f"`per_layer_config` must be a dict, got {per_layer_config!r}: {example}.")
        checked: dict[int, dict[str, Any]] = {}
        for layer, given in (per_layer_config or {}).items():
            if isinstance(layer, bool) or not str(layer).isdecimal() or not isinstance(given, Mapping):
                raise ValueError(f"`per_layer_config` got {layer!r}: {given!r}, but {example}.")
            if foreign := sorted(str(name) for name in given if name not in RANK_FIELDS):
                raise ValueError(
                    f"`per_layer_config` may set {', '.join(RANK_FIELDS)}; got {', '.join(foreign)}, "
                    "which the layers of this family would not apply."
                )
            if int(layer) in checked:
                raise ValueError(f"`per_layer_config` names layer {int(layer)} twice.")
            checked[int(layer)] = {name: plain(value) for name, value in given.items()}
            for name, value in checked[int(layer)].items():
                check_rank_field(name, value)
        return checked

    def _layers_of_list_entry(self, num_entries: int) -> list[list[int]]:
        """The layers that each entry of a list such as `qk_rank=[4, 8]` speaks of."""
        if num_entries != self.num_hidden_layers:
            raise ValueError(
                f"a list needs one integer per layer: got {num_entries} for num_hidden_layers={self.num_hidden_layers}."
            )
        return [[layer] for layer in range(num_entries)]

    def _spread_lists(self, per_layer_config: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """`per_layer_config` with the entries of list-valued widths written into it."""
        spread = {layer: dict(given) for layer, given in per_layer_config.items()}
        for name in LISTED_FIELDS:
            values = getattr(self, name)
            if not isinstance(values, list):
                continue
            layers_of_entry = self._layers_of_list_entry(len(values))
            if len(set(values)) == 1 and not any(name in given for given in spread.values()):
                setattr(self, name, values[0])
                continue
            for value, layers in zip(values, layers_of_entry, strict=True):
                for layer in layers:
                    if spread.setdefault(layer, {}).setdefault(name, value) != value:
                        raise ValueError(
                            f"layer {layer} gets two values of `{name}`: give a list or per_layer_config."
                        )
            setattr(self, name, None)
        return spread

    def __setattr__(self, name, value):
        if name in RANK_FIELDS and self.is_heterogeneous and name in self.per_layer_attributes:
            raise ValueError(
                f"`{name}` differs by layer, so the layers would not follow one value. Assign `per_layer_config` (None to "
                "remove it) instead, or make a new config."
            )
        super().__setattr__(name, value)

    def validate_architecture(self):
        """Refuse widths that cannot be built, in every layer."""
        # assigned to a config that was made already, per_layer_config has not passed by `_checked_layers`
        overrides = self._heterogeneity_spec.per_layer_overrides if self.is_heterogeneous else {}
        self._checked_layers(overrides)
        check_stock_fields(self)
        if not overrides:
            resolve_heads(self)
            return
        if gone := [layer for layer in overrides if layer >= self.num_hidden_layers]:
            raise ValueError(f"`per_layer_config` speaks of layers {gone}, the model has {self.num_hidden_layers}.")
        for layer in self.per_layer_config:
            resolve_heads(layer)

    def head_geometry(self, layer_idx: int | None = None) -> HeadGeometry:
        """The widths, norm and scale of the heads of one layer, defaults filled in."""
        if layer_idx is not None and layer_idx not in range(self.num_hidden_layers):
            raise ValueError(f"the model has layers 0 to {self.num_hidden_layers - 1}, got layer {layer_idx!r}.")
        return resolve_heads(self if layer_idx is None else self.per_layer_config[layer_idx])

    def save_pretrained(self, save_directory, **kwargs):
        if self._auto_class is None:
            self.__dict__.pop("auto_map", None)  # names source files that a plain save does not write
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        try:
            config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        except (TypeError, RecursionError) as error:  # JSON, but not an object, or nested without end
            raise ValueError(f"{pretrained_model_name_or_path} has no readable config.json: {error}.") from error
        if not isinstance(config_dict, dict) or not config_dict:
            raise ValueError(f"{pretrained_model_name_or_path} has no config.json, or one that holds no fields.")
        # A stock checkpoint is the case qk_rank=None, not the mistake that transformers would warn of.
        if config_dict.get("model_type") == cls.stock_model_type:
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        check_loose_arguments(kwargs)
        # transformers sets overrides on the finished config, past the checks; fields go in by the front door
        known = {field.name for field in fields(cls)} | {*cls.attribute_map, "per_layer_config", "head_dim"}
        front = {name: kwargs.pop(name) for name in list(kwargs) if name in known and name != "dtype"}
        config_dict = dict(config_dict)
        if "per_layer_config" not in front and (stored := cls._checked_layers(config_dict.get("per_layer_config"))):
            # one value for all layers, or a list, replaces what was stored layer by layer
            kept = {i: {name: v for name, v in given.items() if name not in front} for i, given in stored.items()}
            config_dict["per_layer_config"] = {i: given for i, given in kept.items() if given}
        return super().from_dict({**config_dict, **front, "_read_from_file": True}, **kwargs)


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
                f"width to fall back on: set `{name}` to an integer."
            )
    qk_rank = config.qk_rank or stock_width
    return HeadGeometry(
        num_heads=num_heads,
        qk_rank=qk_rank,
        v_head_dim=config.v_head_dim or stock_width,
        qk_norm=config.qk_norm,
        qk_scale=qk_rank**-0.5 if config.qk_scale is None else float(config.qk_scale),
    )
