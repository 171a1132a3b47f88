"""Weights of rank models are read from safetensors only, because a pickle can run code.

An export puts this file beside `rank_attention.py`, so it imports nothing of this package.
"""

import json
import os
from pathlib import Path, PureWindowsPath

from huggingface_hub import is_offline_mode
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, is_peft_available
from transformers.utils.hub import cached_files, resolve_revision
from transformers.utils.peft_utils import find_adapter_config_file


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def check_weight_name(name, named_by) -> None:
    """Refuse the name of anything but a safetensors file inside the checkpoint."""
    path = PureWindowsPath(name if isinstance(name, str) else "")  # it knows the separators of all systems
    if path.suffix != ".safetensors" or path.drive or path.root or ".." in path.parts:
        raise ValueError(
            f"{named_by} names {name!r} as weights. Only safetensors files inside the checkpoint are read."
        )


def check_shard_names(index) -> list[str]:
    """The files that an index of weights names, sorted; all must be safetensors files inside the checkpoint."""
    try:
        names = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of weights: {error}.") from error
    for name in names:
        check_weight_name(name, index)
    return sorted(names)


def weight_files(name, chosen: str | None = None, variant: str | None = None, **hub) -> list[str]:
    """The weight files that transformers loads from a folder or a Hub repository, all of them safetensors.

    Files of a repository are downloaded. Call this before `from_pretrained(..., use_safetensors=True)`, which unpickles
    what an index names, and asks a conversion service for the weights of a repository that has no safetensors.
    `chosen` is the file that the config names in `transformers_weights`; the rest is as in `from_pretrained`.
    """
    if chosen is not None:
        check_weight_name(str(chosen).removesuffix(".index.json"), f"the config of {name}")
        candidates = [chosen]
    else:
        stems = (SAFE_WEIGHTS_NAME.rsplit(".", 1), SAFE_WEIGHTS_INDEX_NAME.rsplit(".", 1))
        candidates = [".".join(filter(None, (stem, variant, suffix))) for stem, suffix in stems]
    for candidate in candidates:
        found = cached_file(name, candidate, _raise_exceptions_for_missing_entries=False, **hub)
        if found is not None:
            return cached_files(name, check_shard_names(found), **hub) if found.endswith(".json") else [found]
    if shards := list(Path(name, hub.get("subfolder") or "").glob("shard-*-model-*-of-*.safetensors")):
        return [str(shard) for shard in shards]  # each written by one process of several
    offline = " in the cache, and offline mode is on" if is_offline_mode() and not os.path.isdir(name) else ""
    raise OSError(
        f"{name} has no safetensors weights: there is no {' or '.join(candidates)}{offline}. Only safetensors are read "
        "here; for a pickle you trust, pass use_safetensors=False."
    )


def load_safely(load, pretrained_model_name_or_path, *model_args, **kwargs):
    """`from_pretrained` that reads safetensors only, and says what to do when shapes do not fit."""
    kwargs.setdefault("use_safetensors", True)  # a pickle can run code when it is read
    named = str(pretrained_model_name_or_path)
    if kwargs["use_safetensors"] and os.path.isfile(named):
        if not named.endswith(".safetensors"):
            raise OSError(f"{named} is a file, which may be a pickle: give its folder, or a .safetensors file.")
    elif kwargs["use_safetensors"] and pretrained_model_name_or_path is not None and not kwargs.get("gguf_file"):
        if not os.path.isdir(named):  # all files from one commit: what is checked is what is loaded
            where = {key: kwargs[key] for key in ("token", "local_files_only", "cache_dir") if key in kwargs}
            kwargs["revision"] = resolve_revision(named, kwargs.get("revision"), **where)
        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            config = load.__self__.config_class.get_config_dict(named if config is None else config, **hub)[0]
        given = vars(config) if isinstance(config, PreTrainedConfig) else config
        weight_files(named, given.get("transformers_weights"), kwargs.get("variant"), **hub)
        if is_peft_available() and find_adapter_config_file(named, **hub) is not None:
            raise OSError(f"{named} is an adapter, which PEFT may read from a pickle. Merge it into its model first.")
        kwargs.pop("force_download", None)  # the files are fresh now
    try:
        return load(pretrained_model_name_or_path, *model_args, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights of {named} are not safetensors, or are cut short: {error}.") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise RuntimeError(
            f"the weights of {named} do not fit the configuration: {error} A checkpoint keeps the `qk_rank`, `v_head_dim` "
            "and `num_labels` it was saved with: load it without overriding them, or pass ignore_mismatched_sizes=True."
        ) from error
