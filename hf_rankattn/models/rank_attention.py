"""What all rank models share: config fields and their checks, attention, construction from stock models.

An export (`copy_source`) puts this file beside the two files of a family, so it imports only files beside it.
"""

import inspect
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from .safe_weights import load_safely


RANK_FIELDS = ("qk_rank", "v_head_dim", "qk_norm", "qk_scale")
WIDTHS = ("qk_rank", "v_head_dim")
WIDEST = 2**20  # beyond any head that can be allocated
FLEX_NARROWEST = 16  # narrower heads have no compiled kernel on accelerators
MOST_LAYERS = 2**12  # four times the deepest published model; more layers take minutes to build
HERE = Path(__file__).parent
FIELDS_DOC = """Configuration of a [`{model}`]: every field of [`~transformers.{config}`], and the geometry of the heads.

Args:
    qk_rank (`int`, *optional*, defaults to `hidden_size / num_attention_heads`):
        Query/key width of each head: the largest rank its bilinear form can have. A list gives one per layer.
    v_head_dim (`int`, *optional*, defaults to `hidden_size / num_attention_heads`):
        Value width of each head. When it is given, the heads need not divide the hidden size.
    qk_norm (`bool`, *optional*, defaults to `False`):
        Unit-norm queries and keys, with one learned log-temperature per head.
    qk_scale (`float`, *optional*, defaults to `qk_rank ** -0.5`):
        Factor on the logits.

If none of the four is given, the model equals stock {family} to the last bit, under the stock parameter names.
"""


class HeadGeometry(NamedTuple):
    """The numbers from which one attention layer is built."""

    num_heads: int
    qk_rank: int
    v_head_dim: int
    qk_norm: bool
    qk_scale: float


def check_rank_field(name: str, value: Any) -> None:
    """Raise a `ValueError` that says what the field `name` may be, unless `value` is allowed."""
    if name == "qk_norm":
        if not isinstance(value, bool):
            raise ValueError(f"`qk_norm` is a switch and must be True or False, got {value!r}.")
    elif value is None:
        return
    elif name == "qk_scale":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ValueError(
                f"`qk_scale` multiplies the logits and must be a positive finite number, got {value!r}. "
                "Leave it out (None) for qk_rank ** -0.5."
            )
    elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= WIDEST:
        raise ValueError(
            f"`{name}` is a width and must be an integer of at least 1 and at most {WIDEST}, got {value!r}. Leave it out "
            "(None) for the stock width hidden_size / num_attention_heads. For values that differ by layer, use "
            f'`per_layer_config={{0: {{"{name}": 8}}}}`, or give the config a list when it is made.'
        )


def check_depth(layers: int) -> None:
    if not 0 <= layers <= MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must not be negative, and at most {MOST_LAYERS}, got {layers}.")


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy, and tuples, as the int, float and list that JSON can store."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def checked_layers(per_layer_config: Any) -> dict[int, dict[str, Any]]:
    """`per_layer_config` with integer keys and plain values, or a `ValueError`."""
    example = 'it maps layers to fields, such as {0: {"qk_rank": 8}}'
    if not isinstance(per_layer_config, Mapping | None):
        raise ValueError(f"`per_layer_config` must be a dict, got {per_layer_config!r}: {example}.")
    checked: dict[int, dict[str, Any]] = {}
    for layer, given in (per_layer_config or {}).items():
        if isinstance(layer, bool) or not str(layer).isdecimal() or not isinstance(given, Mapping):
            raise ValueError(f"`per_layer_config` got {layer!r}: {given!r}, but {example}.")
        if foreign := [str(name) for name in given if name not in RANK_FIELDS]:
            raise ValueError(
                f"`per_layer_config` may set {', '.join(RANK_FIELDS)}; got {', '.join(foreign)}, "
                "which the layers of this family would not apply."
            )
        checked[int(layer)] = {name: plain(value) for name, value in given.items()}
        for name, value in checked[int(layer)].items():
            check_rank_field(name, value)
    return checked


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class RankConfigMixin:
    """The four rank fields, with their defaults, per-layer values and checks."""

    # The types are strings because `@strict` then leaves the checks to `check_rank_field`: its own error is no ValueError.
    qk_rank: "int | list[int] | None" = None
    v_head_dim: "int | list[int] | None" = None
    qk_norm: "bool" = False
    qk_scale: "float | int | None" = None

    keys_to_ignore_at_inference = ["past_key_values", "hidden_states", "attentions", "cross_attentions"]

    def __init_subclass__(cls, **kwargs):
        notes = cls.__doc__ if "__doc__" in cls.__dict__ else ""
        super().__init_subclass__(**kwargs)  # gives a class without a docstring its signature as one
        if "stock_model_type" in cls.__dict__:
            stem = cls.__name__.removesuffix("Config")
            names = {"model": f"{stem}Model", "config": f"{stem[4:]}Config", "family": stem[4:]}
            cls.__doc__ = "\n".join(filter(None, (FIELDS_DOC.format(**names), inspect.cleandoc(notes or ""))))

    def __post_init__(self, **kwargs):
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))  # before lists are spread over the layers
        stock = getattr(self, "stock_model_type", None)
        if "head_dim" in kwargs:
            raise ValueError(
                f"`head_dim` is not a field of this family and stock {stock or 'models'} would ignore it. "
                "Set `qk_rank` for the query/key width of a head and `v_head_dim` for its value width."
            )
        # stock configs carry too many old keys to refuse all unknown ones; transformers writes auto_map
        # a saved config also holds attributes that a user has set
        known = RANK_FIELDS if "model_type" in kwargs else self.own_fields()
        for name in kwargs.keys() - {"auto_map"}:
            if not hasattr(self, name) and (meant := get_close_matches(name, known, n=1, cutoff=0.66)):
                raise ValueError(f"`{name}` is not a field. Did you mean `{meant[0]}`?")
        model_type = kwargs.pop("model_type", self.model_type)
        if model_type not in (self.model_type, stock):
            raise ValueError(
                f"got a configuration of model type {model_type!r}, expected {self.model_type!r}"
                + (f" or the stock {stock!r}" if stock else "")
                + ". Load it with the class of its own family."
            )
        for name in RANK_FIELDS:
            setattr(self, name, plain(getattr(self, name)))
        per_layer = self._spread_lists(checked_layers(kwargs.pop("per_layer_config", None)))
        super().__post_init__(**kwargs)
        if per_layer:
            self.per_layer_config = per_layer
        self.validate_architecture()  # `@strict` calls it again, and would wrap its ValueError in an error of its own

    def own_fields(self) -> tuple[str, ...]:
        """The names that an unknown argument is compared with, to find a misspelt one."""
        return RANK_FIELDS

    def _layers_of_list_entry(self, num_entries: int) -> list[list[int]]:
        """The layers that each entry of a list such as `qk_rank=[4, 8]` applies to."""
        if num_entries != self.num_hidden_layers:
            raise ValueError(
                f"a list needs one integer per layer: got {num_entries} for num_hidden_layers={self.num_hidden_layers}."
            )
        return [[layer] for layer in range(num_entries)]

    def _spread_lists(self, per_layer: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """`per_layer` with the entries of list-valued widths written into it."""
        for name in WIDTHS:
            values = getattr(self, name)
            if not isinstance(values, list):
                continue
            for value in values:
                check_rank_field(name, value)
            layers_of_entry = self._layers_of_list_entry(len(values))
            if len(set(values)) == 1 and not any(name in given for given in per_layer.values()):
                setattr(self, name, values[0])
                continue
            for value, layers in zip(values, layers_of_entry, strict=True):
                for layer in layers:
                    if per_layer.setdefault(layer, {}).setdefault(name, value) != value:
                        raise ValueError(f"layer {layer} has two values of `{name}`: give a list or per_layer_config.")
            setattr(self, name, None)
        return per_layer

    def validate_architecture(self):
        """Refuse heads that cannot be built, in every layer; also after the config was changed."""
        check_depth(self.num_hidden_layers)
        if not self.is_heterogeneous:
            resolve_heads(self)
            return
        checked_layers(self._heterogeneity_spec.per_layer_overrides)
        for layer in self.per_layer_config:
            resolve_heads(layer)

    def head_geometry(self, layer_idx: int | None = None) -> HeadGeometry:
        """The widths, norm and scale of the heads of one layer, defaults filled in."""
        if layer_idx is not None and layer_idx not in range(self.num_hidden_layers):
            raise ValueError(f"the model has layers 0 to {self.num_hidden_layers - 1}, got layer {layer_idx!r}.")
        return resolve_heads(self if layer_idx is None else self.per_layer_config[layer_idx])

    def save_pretrained(self, save_directory, **kwargs):
        if self._auto_class is None:
            self.__dict__.pop("auto_map", None)  # it names source files, which a plain save does not write
        save = rebind(PreTrainedConfig.save_pretrained, custom_object_save=save_source)
        save(self, save_directory, **kwargs)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config_dict:
            raise ValueError(f"{pretrained_model_name_or_path} has no config.json, or one that holds no fields.")
        # A stock checkpoint is the case qk_rank=None, not a mistake that transformers should warn about.
        if config_dict.get("model_type") == getattr(cls, "stock_model_type", ""):
            config_dict = {**config_dict, "model_type": cls.model_type}
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # transformers sets overrides on the finished config, where nothing checks them; here they are arguments
        known = {field.name for field in fields(cls)} | {*cls.attribute_map, "per_layer_config", "head_dim"}
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in known and name != "dtype"}
        config_dict = dict(config_dict)
        if "per_layer_config" not in overrides and (stored := checked_layers(config_dict.get("per_layer_config"))):
            # one value for all layers, or a list, replaces what was stored layer by layer
            kept = {i: {name: v for name, v in given.items() if name not in overrides} for i, given in stored.items()}
            config_dict["per_layer_config"] = {i: given for i, given in kept.items() if given}
        return super().from_dict({**config_dict, **overrides}, **kwargs)


def resolve_heads(config) -> HeadGeometry:
    """Fill in the defaults of a config that holds for one layer; `ValueError` if no heads can be built from it."""
    for name in RANK_FIELDS:
        check_rank_field(name, getattr(config, name))
    hidden_size, num_heads = config.hidden_size, config.num_attention_heads
    if num_heads < 1 or hidden_size < 1:
        raise ValueError(f"hidden_size={hidden_size} and num_attention_heads={num_heads} must both be at least 1.")
    stock_width, remainder = divmod(hidden_size, num_heads)
    for name in WIDTHS:
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


def set_heads(module: nn.Module, config, layer_idx: int | None) -> None:
    """Write the geometry of the layer on an attention module, as numbers."""
    heads = config.head_geometry(layer_idx)
    module.config = config
    module.num_attention_heads, module.qk_rank, module.v_head_dim = heads.num_heads, heads.qk_rank, heads.v_head_dim
    module.scaling = heads.qk_scale
    if heads.qk_rank == heads.v_head_dim:  # the names of stock attention have a meaning only where widths are equal
        module.attention_head_size = heads.qk_rank
        module.all_head_size = heads.num_heads * heads.qk_rank
    temperature = nn.Parameter(torch.full((heads.num_heads,), math.log(heads.qk_rank))) if heads.qk_norm else None
    module.register_parameter("log_temperature", temperature)


def init_temperature(module: nn.Module) -> None:
    """Start with logits of unit variance for isotropic queries and keys: qk_scale * qk_rank * cos = sqrt(qk_rank) * cos."""
    if getattr(module, "log_temperature", None) is not None:
        init.constant_(module.log_temperature, math.log(module.qk_rank))


def set_projections(module: nn.Module, hidden_size: int, bias: bool = True) -> None:
    """Add query, key and value layers of the widths that [`set_heads`] wrote on the module."""
    module.query = nn.Linear(hidden_size, module.num_attention_heads * module.qk_rank, bias=bias)
    module.key = nn.Linear(hidden_size, module.num_attention_heads * module.qk_rank, bias=bias)
    module.value = nn.Linear(hidden_size, module.num_attention_heads * module.v_head_dim, bias=bias)


def split_heads(module: Any, states: torch.Tensor, width: int) -> torch.Tensor:
    """Projected states (batch, n, heads * width) as (batch, heads, n, width)."""
    # the number of heads is never left to be inferred: a narrower query would silently become fewer heads
    return states.view(*states.shape[:-1], module.num_attention_heads, width).transpose(1, 2)


def project(module: nn.Module, name: str, states: torch.Tensor) -> torch.Tensor:
    """Query, key or value (by `name`) of states (batch, n, hidden): (batch, heads, n, width)."""
    return split_heads(module, getattr(module, name)(states), module.v_head_dim if name == "value" else module.qk_rank)


def unit_norm(states: torch.Tensor) -> torch.Tensor:
    """Rows of length one, computed in float32 at least, because half precision overflows on the squares."""
    wide = states if states.dtype == torch.float64 else states.float()
    return nn.functional.normalize(wide, dim=-1).to(states.dtype)


def apply_qk_norm(module, query, key):
    """Unit-norm queries and keys (batch, heads, n, qk_rank), with the temperature of each head on its queries."""
    if module.log_temperature is None:
        return query, key
    temperature = module.log_temperature.exp()[:, None, None].to(query.dtype)
    return unit_norm(query) * temperature, unit_norm(key)


def check_flex(qk_rank: int, v_head_dim: int, dropout: float) -> None:
    """Refuse what flex attention, which transformers always compiles, cannot run on an accelerator."""
    if min(qk_rank, v_head_dim) < FLEX_NARROWEST:
        raise ValueError(
            f"flex attention is compiled, and compiled it needs heads of width {FLEX_NARROWEST} or more, got "
            f"qk_rank={qk_rank} and v_head_dim={v_head_dim}. Use another kernel: model.set_attn_implementation('sdpa')."
        )
    if dropout > 0:
        raise ValueError(
            f"flex attention has no dropout, got attention dropout {dropout} in training. Set "
            "attention_probs_dropout_prob=0, or use another kernel: model.set_attn_implementation('sdpa')."
        )


def rank_attention(module, query, key, value, attention_mask, dropout, eager, **kwargs):
    """Attention through transformers' interface, with independent query/key and value widths.

    `eager` is the family's own eager attention. Takes queries and keys (batch, heads, n, qk_rank) and values
    (batch, heads, n, v_head_dim); returns the joined heads (batch, n, heads * v_head_dim), and the maps
    (batch, heads, n, n) where the implementation returns them.
    """
    query, key = apply_qk_norm(module, query, key)
    implementation = module.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    v_width = value.shape[-1]
    if implementation == "flex_attention":
        check_flex(query.shape[-1], v_width, dropout)
    # Zeros change neither logits nor values. torch's CPU kernel is fast for equal widths and without dropout only, and
    # transformers' flash attention would crop values that are wider than the queries.
    fast_if_equal = implementation == "sdpa" and query.device.type == "cpu" and dropout == 0.0
    if query.shape[-1] != v_width and (fast_if_equal or is_flash_attention_requested(module.config)):
        width = max(query.shape[-1], v_width)
        query, key, value = (nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    joined, maps = attend(module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs)
    return joined[..., :v_width].flatten(2).contiguous(), maps


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
            f"{function.__module__}.{function.__qualname__} does not use {', '.join(absent)}: it is not the stock "
            "function, or not one of the supported transformers versions. To extend a rank model, derive from it."
        )
    scope = {**function.__globals__, **names}
    bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def copy_source(family: Path, folder: Path) -> None:
    """Copy the source of a family's folder to one flat folder, from which transformers can load it."""
    files = sorted(family.glob("[!_]*.py"))
    for path in files:  # it grows by what its files import
        text = path.read_text(encoding="utf-8")
        shared = [HERE / f"{name}.py" for name in re.findall(r"^from \.+(\w+) import", text, re.MULTILINE)]
        files += [file for file in shared if file.exists() and file not in files]
        flat = re.sub(r"^from \.\.(\w+) import", r"from .\1 import", text, flags=re.MULTILINE)
        (folder / path.name).write_text(flat, encoding="utf-8")


def save_source(instance, folder, config) -> None:
    """Replaces transformers' `custom_object_save`, which cannot copy what a family imports from its parent folder."""
    source = Path(inspect.getfile(type(instance)))
    if source.parent.parent != HERE:  # a user's class, or source that was exported before
        custom_object_save(instance, folder, config)
        return
    names = getattr(config, "auto_map", None) or {}
    config.auto_map = {**names, instance._auto_class: f"{source.stem}.{type(instance).__name__}"}
    copy_source(source.parent, Path(folder))


class RankModelMixin:
    """Construction, checks, loading and sharing of the rank models. It stands before the stock base class."""

    model_tags = ["rank-attention"]

    def __init__(self, config, *args, **kwargs):
        expected = type(self).config_class
        # by model type too: exported source is loaded as modules of its own, in which the same class is another object
        if not isinstance(config, expected) and getattr(config, "model_type", None) != expected.model_type:
            stock = getattr(config, "model_type", "") == getattr(expected, "stock_model_type", None)
            raise ValueError(
                f"{type(self).__name__} is built from a {expected.__name__}, got a {type(config).__name__}."
                + (f" Use {expected.__name__}(**config.to_dict())." if stock else "")
            )
        config.validate_architecture()
        # the constructor of the stock class, or of PreTrainedModel if the class below is the user's own
        build = super().__init__.__func__
        if inspect.unwrap(build) is not inspect.unwrap(PreTrainedModel.__init__):
            build = rebind(build, **self.rank_classes(config))
        build(self, config, *args, **kwargs)

    def rank_classes(self, config) -> dict[str, Any]:
        """Name of a class that the stock constructor builds -> what is built instead."""
        raise NotImplementedError

    def _get_static_cache_init_shape(self):
        return None  # generation assumes one width for keys and values; without a shape the cache adapts to both

    def _initialize_weights(self, module, is_custom_code=False):
        # for classes outside of transformers, it skips modules without own parameters, at which GPT-2 scales `c_proj`
        has_own = next(module.parameters(recurse=False), None) is not None
        super()._initialize_weights(module, is_custom_code and has_own)

    def _init_weights(self, module):
        super()._init_weights(module)
        init_temperature(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in transformers, but weights are read from safetensors only, unless `use_safetensors=False` is given."""
        return load_safely(super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers; if source files are saved too (`register_for_auto_class`), they are flattened."""
        return rebind(PreTrainedModel.save_pretrained, custom_object_save=save_source)(self, save_directory, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs):
        """Upload the model with a card, in one commit: [`hf_rankattn.push_to_hub`], which documents the arguments."""
        try:
            from hf_rankattn.hub.sharing import push_to_hub
        except ImportError:  # exported source on a machine without the package
            return super().push_to_hub(repo_id, **kwargs)
        return push_to_hub(self, repo_id, **kwargs)
