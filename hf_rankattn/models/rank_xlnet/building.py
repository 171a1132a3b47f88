"""How rank attention is built into stock models, computed and loaded.

The model folders hold the same copy of this file, since exported source cannot import across folders.
"""

import inspect
import json
import math
import os
from pathlib import Path
from types import CodeType, FunctionType

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging


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


def split_heads(states: torch.Tensor, num_heads: int, width: int) -> torch.Tensor:
    """(batch, n, num_heads * width) -> (batch, num_heads, n, width). The count of heads is never left to be inferred."""
    return states.view(*states.shape[:-1], num_heads, width).transpose(1, 2)


def unit_norm(states: torch.Tensor) -> torch.Tensor:
    """Rows of length one, computed in float32 at least, as half precision has no room for the squares."""
    wide = states if states.dtype == torch.float64 else states.float()
    return nn.functional.normalize(wide, dim=-1).to(states.dtype)


def apply_qk_norm(module, query, key):
    """Unit-norm queries and keys (batch, heads, n, qk_rank), with the temperature of each head on its queries."""
    if module.log_temperature is None:
        return query, key
    temperature = module.log_temperature.exp()[:, None, None].to(query.dtype)
    return unit_norm(query) * temperature, unit_norm(key)


def rank_attention(module, query, key, value, attention_mask, dropout, eager, **kwargs):
    """Attention through transformers' interface, with query/key and value widths free of each other.

    `eager` is the family's own eager attention. Takes queries and keys (batch, heads, n, qk_rank) and values (batch, heads, n, v_head_dim); returns the joined heads
    (batch, n, heads * v_head_dim), and the maps (batch, heads, n, n) where the implementation gives them.
    """
    implementation = module.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    v_width = value.shape[-1]
    # torch's CPU kernel is fast for equal widths and without dropout only; zeros change neither logits nor values.
    if query.shape[-1] != v_width and implementation == "sdpa" and query.device.type == "cpu" and dropout == 0.0:
        width = max(query.shape[-1], v_width)
        query, key, value = (nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    joined, maps = attend(module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs)
    return joined[..., :v_width].flatten(2).contiguous(), maps


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


def refuse_pickled_shards(folder, subfolder: str = "") -> None:
    """Refuse local indices of safetensors that name other files: transformers would unpickle them (with `weights_only`).

    A config may name an index of its own, and a variant has another, so all of them are looked at.
    """
    for path in sorted(Path(str(folder), subfolder or "").glob("*.safetensors.index*.json")):
        try:
            names = list(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not an index of weights: {error}.") from error
        if strange := [name for name in names if not str(name).endswith(".safetensors")]:
            raise ValueError(f"{path} names {strange[0]!r} as weights. Only safetensors are read here.")


def load_safely(load, pretrained_model_name_or_path, *model_args, **kwargs):
    """`from_pretrained` that reads safetensors only, and says what to do when shapes do not fit."""
    kwargs.setdefault("use_safetensors", True)  # a pickle can run code when it is read
    named = str(pretrained_model_name_or_path)
    if kwargs["use_safetensors"] and os.path.isfile(named) and not named.endswith(".safetensors"):
        raise OSError(
            f"{named} is a file, which transformers would unpickle: give its folder, or a .safetensors file."
        )
    if kwargs["use_safetensors"]:
        refuse_pickled_shards(named, kwargs.get("subfolder") or "")
    try:
        return load(pretrained_model_name_or_path, *model_args, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights of {named} are not safetensors, or are cut short: {error}.") from error
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
