"""The inputs of every probe: models are unwrapped, padding is read, and batches are shared among processes."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..families.architectures import attending_layers, base_of, family_of, layers_of
from ..families.structure import CROSS, Tower, attention_modules, choosing_tower, tower_of, towers_of
from ..files.batches import longest
from ..measure.norms import full_precision


logger = logging.get_logger(__name__)
Options = ParamSpec("Options")
# inputs that say how the patches of images are packed into one sequence without a batch
PACKED = ("grid_thw",)


def probing(
    measure: Callable[Concatenate[PreTrainedModel, Options], pd.DataFrame],
) -> Callable[Concatenate[PreTrainedModel, Options], pd.DataFrame]:
    """Decorates every probe: the model is unwrapped and checked, and `torch.autocast` is off until the probe returns."""

    @wraps(measure)
    def enter(model: PreTrainedModel, *args: Options.args, **kwargs: Options.kwargs) -> pd.DataFrame:
        with full_precision():
            model = plain(model)
            tower: Any = kwargs.pop("tower", None)
            with choosing_tower(tower):
                if not layers_of(model):  # before anything else
                    raise ValueError(
                        f"the {type(model).__name__} has no layers: give a model with num_hidden_layers > 0."
                    )
                return measure(model, *args, **kwargs)

    return enter


def plain(model: Any) -> PreTrainedModel:
    """The transformers model inside a compiled model (with a warning), a data-parallel one or a `SentenceTransformer`."""
    if hasattr(model, "_orig_mod"):
        logger.warning_once("the model is compiled: the module that was compiled is measured.")
        return plain(model._orig_mod)
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return plain(model.module)
    if isinstance(model, nn.Sequential) and len(model) and hasattr(model[0], "auto_model"):
        return plain(model[0].auto_model)  # a SentenceTransformer; its pooling has no attention
    if not hasattr(model, "base_model_prefix"):
        raise ValueError(
            f"`model` must be a transformers model in PyTorch, got a {type(model).__name__}: load one with "
            "AutoModel.from_pretrained."
        )
    # accelerate puts a hook on the modules whose weights it offloads
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if any(weight.is_meta for weight in model.parameters()) and not offloaded:
        raise ValueError(
            "the weights of the model are on the meta device, where they have no values: load them with from_pretrained."
        )
    return model


def crosses(tower: Tower) -> bool:
    """Whether the layers of a tower have cross-attention."""
    return any(CROSS.search(path) for layer in tower.layers for path, _ in attention_modules(layer))


def take_tower(model: PreTrainedModel, tower: str | None) -> tuple[PreTrainedModel, str | None]:
    """The part of a model that is one tower and runs alone, and the name of the tower if it runs in the whole model alone.

    A decoder with cross-attention runs in the whole model. Any other tower of several is taken out, as it has a config and
    inputs of its own.
    """
    base = base_of(model)
    if family_of(model).layers or (tower is None and len(towers_of(base)) == 1):
        return model, None
    with choosing_tower(tower):
        chosen = tower_of(base)
    if len(towers_of(base)) == 1:
        return model, None
    crossing = crosses(chosen)
    path = chosen.path.split(".*")[0].split(".")  # behind a star are the lists of several stages
    for depth in range(1, 1 if crossing else len(path) + 1):
        part = base.get_submodule(".".join(path[:depth]))
        if isinstance(part, PreTrainedModel) and len(towers_of(part)) == 1:
            return part, None
    return model, chosen.name


def real_tokens(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The mask of a batch, 1 for tokens, or None where nothing is padded; refuses batches with nothing to measure."""
    if "encoder_hidden_states" in batch:
        raise ValueError("cross-attention is not measured: leave out `encoder_hidden_states`.")
    if several := [name for name in PACKED if name in batch and len(batch[name]) > 1]:
        raise ValueError(
            f"`{several[0]}` has {len(batch[several[0]])} rows: patches of several images in one sequence cannot be told apart. "
            "Give one image per batch."
        )
    tokens_name, mask_name = inputs_of_tower(model, batch)
    mask = None if mask_name is None else batch.get(mask_name)
    if mask is None and "input_mask" in batch:  # XLNet's other mask, in which 1 is padding
        mask = 1 - batch["input_mask"].long()
    if mask is not None and mask.ndim != 2:
        raise ValueError(f"`{mask_name}` must be (batch, n), 1 for tokens and 0 for padding, got {tuple(mask.shape)}.")
    if empty := [name for name, value in batch.items() if value.ndim < 1 or len(value) < 1]:
        raise ValueError(f"{', '.join(empty)} must hold at least one example.")
    tokens = None if tokens_name is None else batch[tokens_name]
    if tokens is None and mask is not None:
        if not bool(mask.bool().all()):
            raise ValueError(
                f"`{mask_name}` marks padding of {model.main_input_name}, which has another length than the tokens of the layers. "
                "Give inputs of equal length, or one example per batch."
            )
        return None
    if tokens is not None:
        if tokens.ndim < 2:
            raise ValueError(f"tokens must be (batch, n), got {tuple(tokens.shape)}: add the batch in front.")
        size = tuple(tokens.shape[:2])
        if mask is not None and mask.shape != size:
            raise ValueError(f"the mask is {tuple(mask.shape)}, and the tokens are {size}, examples by tokens.")
        limit = longest(model.config)
        if limit and limit < size[1]:
            raise ValueError(f"the batch has {size[1]} tokens, but the model has {limit} positions: truncate it.")
        if size[1] < 2:
            raise ValueError(
                f"the batch is {size}, examples by tokens: one token has no others to be compared with. Give texts of at "
                "least two tokens."
            )
    if mask is None:
        return None
    lengths = mask.bool().sum(-1)
    if bool((lengths < 2).any()):
        rows = torch.nonzero(lengths < 2).flatten().tolist()
        raise ValueError(f"examples {rows} of the batch have fewer than two tokens that are not padding.")
    if "queries" in batch:  # they follow the points, and are never padding
        mask = nn.functional.pad(mask, (0, batch["queries"].shape[1]), value=1)
    return None if bool(mask.bool().all()) else mask


def inputs_of_tower(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> tuple[str | None, str | None]:
    """The names of the tokens that the measured layers read, and of their mask; None where a batch has no such entry."""
    tokens = next((name for name in ("input_ids", "points", "inputs_embeds") if name in batch), None)
    if family_of(model).layers:
        return tokens, "attention_mask"
    tower = tower_of(base_of(model))
    if tower.kind == "vision":
        if not any(value.is_floating_point() for value in batch.values()):
            raise ValueError(
                f"the tower {tower.name!r} reads images, and the batch has only {', '.join(batch)}: add `pixel_values`."
            )
        return None, None
    if "decoder" in tower.path and "decoder_input_ids" in batch:
        return "decoder_input_ids", "decoder_attention_mask"
    return tokens, "attention_mask"


def run(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> None:
    """One forward pass of the base model for its hooks; a model sharded by FSDP runs whole, which gathers its weights."""
    module = model if is_sharded(model) else base_of(model)
    module(**batch, **plain_output(module))


def first_example(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if any(name in batch for name in PACKED):
        return dict(batch)
    count = max(len(value) for value in batch.values())
    return {name: value[:1] if len(value) == count else value for name, value in batch.items()}


def plain_output(model: PreTrainedModel) -> dict[str, bool]:
    """Arguments that make a model return a dict without maps, states and keys of its layers, regardless of its config."""
    wanted = {"return_dict": True, "output_attentions": False, "output_hidden_states": False, "use_cache": False}
    parameters = inspect.signature(model.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "input_ids" not in parameters:  # the parts of codecs pass their own value on, and refuse a second one
        wanted = {name: value for name, value in wanted.items() if name != "use_cache" or name in parameters}
    return {name: value for name, value in wanted.items() if anything or name in parameters}


def check_depth(model: PreTrainedModel, seen: int, what: str) -> None:
    if seen < 1:
        raise ValueError(
            f"no layer of {type(model).__name__} ran on this batch: a list of layers needs its own inputs, such as `pixel_values` "
            "for images."
        )
    if seen != (depth := len(layers_of(model))):
        raise ValueError(f"the {what} were found in {seen} of the {depth} layers of {type(model).__name__} only.")


def check_attending(model: PreTrainedModel, seen: int, what: str) -> list[int]:
    """The numbers of the layers with attention; a `ValueError` unless all of them showed `what`."""
    numbers = attending_layers(model)
    if len(numbers) != seen:
        raise ValueError(
            f"the {what} were found in {seen} of the {len(numbers)} layers with attention of {type(model).__name__} only."
        )
    return numbers


def is_sharded(model: nn.Module) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(model, FSDPModule | FullyShardedDataParallel)


def over_processes(
    measure: Callable[[Mapping[str, torch.Tensor]], pd.DataFrame],
    batches: Iterable[Mapping[str, torch.Tensor]],
    done: Callable[[], object] = lambda: None,
) -> pd.DataFrame:
    """The table of all batches, each measured by one of the running processes; every process gets the whole table.

    Args:
        measure: From a batch to a table with a column `example` that counts from 0.
        batches: The same batches, in the same order, in every process.
        done: Called after every batch that this process has measured or skipped.

    The processes take turns. The result of a batch does not depend on the process, so the table is the same for any number
    of processes, to the last bit.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    world = torch.distributed.get_world_size() if distributed else 1
    offset, own = 0, []
    for number, batch in enumerate(batches):
        if number % world == rank:
            own.append((number, measure(batch).assign(example=lambda table, offset=offset: table.example + offset)))
        offset += len(next(iter(batch.values())))
        done()
    gathered: list[list[tuple[int, pd.DataFrame]]] = [own] * world
    if distributed:
        torch.distributed.all_gather_object(gathered, own)
    tables = sorted((entry for entries in gathered for entry in entries), key=lambda entry: entry[0])
    if not tables:
        raise ValueError("there is no batch to measure.")
    return pd.concat([table for _, table in tables], ignore_index=True)
