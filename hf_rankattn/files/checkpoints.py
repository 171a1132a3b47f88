"""Loading checkpoints and datasets of others: safetensors only, no remote code, and one-line errors."""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import DatasetCard
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, cached_file, is_gguf_available, logging
from transformers.utils.hub import resolve_revision
from transformers.utils.import_utils import GGUF_MIN_VERSION

from ..models.rank_attention import check_depth
from ..models.safe_weights import check_shard_names as check_shard_names
from ..models.safe_weights import weight_files
from .atomic import finish_replacement


logger = logging.get_logger(__name__)
LONGEST = 400
URL = re.compile(r"\b(?!(?:file|zip|tar|gzip|bz2|lz4|xz|zstd):)[a-z][a-z0-9+.-]*://[^\s\"]*")


def one_line(error: BaseException) -> str:
    """The message of an error in one line; long messages are truncated."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


@contextmanager
def readable(name: str | Path, also_writes: bool = False) -> Iterator[None]:
    """Turn every error that a checkpoint causes inside transformers into a `ValueError` that names the checkpoint.

    A block that `also_writes` can raise an `OSError` or a `ValueError` of its own; these are not changed.
    """
    path = Path(name)
    if path.is_file():  # transformers would unpickle it
        raise ValueError(f"{name} cannot be read as a checkpoint: it is a file. Give its folder.")
    if not path.exists():
        finish_replacement(path.resolve())
    # a name on the Hub is NAME or OWNER/NAME
    if not path.exists() and (path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1):
        raise ValueError(
            f"{name} cannot be read as a checkpoint: there is no such folder. Give an existing folder, or a Hub name such "
            "as owner/name."
        )
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are not safetensors, or are cut short: {error}") from error
    except RecursionError as error:
        raise ValueError(
            f"{name} cannot be read as a checkpoint: one of its files has too many nested brackets."
        ) from error
    except OSError as error:
        if also_writes:
            raise
        if "has no safetensors weights" not in str(error):
            absent = "" if path.exists() else f"there is no folder {name}, and as a Hub name: "
            raise ValueError(f"{name} cannot be read as a checkpoint: {absent}{one_line(error)}") from error
        raise ValueError(
            f"{name} has no safetensors, and a pickle, which can run code when it is read, is not opened. If you trust "
            "it, convert it: load it with transformers and save_pretrained it to another folder."
        ) from error
    except Exception as error:
        if also_writes and isinstance(error, ValueError):
            raise
        what = "it needs code of its own, which is not run."
        if "trust_remote_code" not in str(error):
            what = ("" if isinstance(error, ValueError) else f"{type(error).__name__}: ") + one_line(error)
        raise ValueError(f"{name} cannot be read as a checkpoint: {what}") from error


def refuse_adapter(name: str | Path, revision: str | None = None) -> None:
    """Refuse a checkpoint with a PEFT adapter. A folder with only an adapter has no config: call this first."""
    with readable(name):
        found = cached_file(name, ADAPTER_CONFIG_NAME, revision=revision, _raise_exceptions_for_missing_entries=False)
    if found is not None:
        raise ValueError(
            f"{name} holds a PEFT adapter: merge it into its base model with merge_and_unload(), save_pretrained the "
            "result to another folder, and use that."
        )


def gguf_options(name: str | Path, file: str | None = None) -> dict[str, str]:
    """The option of `from_pretrained` for weights in GGUF: the file that is named, or the only weights of a folder.

    GGUF files hold tensors and plain values, no code. transformers reads them with the package `gguf`.
    """
    folder = Path(name)
    if file is None:
        found = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.gguf"))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ValueError(f"{name} has {len(found)} GGUF files: name one with --gguf, of {names}.")
        if not found:
            return {}
        file = found[0].name
    if folder.is_dir() and not (folder / file).is_file():
        raise ValueError(f"there is no GGUF file {file} in {name}.")
    if not file.endswith(".gguf"):
        raise ValueError(f"--gguf must name a file that ends in .gguf, got {file}.")
    if not is_gguf_available():
        raise ValueError(f"{file} needs the package gguf: pip install 'gguf>={GGUF_MIN_VERSION}'.")
    # a path, because transformers would prefer a file of this name in the working directory
    return {"gguf_file": str((folder / file).resolve()) if folder.is_dir() else file}


def load_config(name: str | Path, revision: str | None = None, **options) -> Any:
    """The config of a checkpoint, without remote code; `options` as in `from_pretrained`."""
    refuse_adapter(name, revision)
    with readable(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, revision=revision, **options)
        layers = getattr(config, "num_hidden_layers", None)
        check_depth(layers or 0)
        if layers == 0:
            raise ValueError("num_hidden_layers is 0, so it has no attention.")
    return config


def check_weights(name: str | Path, config, revision: str | None = None) -> str | None:
    """Check that the weights are floats, in safetensors inside the checkpoint; call it before a stock `from_pretrained`.

    Returns the commit of the Hub to load, so that the files that are loaded are the files that were checked. Integer
    weights are refused, as transformers would cast them to floats, unless the model is quantised. Buffers can be
    integers: old checkpoints of GPT-2 store their causal mask under the name of a bias. Adapters are refused:
    transformers ignores them without PEFT, and can load them from pickles with PEFT.
    """
    revision = resolve_revision(name, revision)
    integers: dict[str, str] = {}
    refuse_adapter(name, revision)
    with readable(name):
        files = weight_files(name, getattr(config, "transformers_weights", None), revision=revision)
        if getattr(config, "quantization_config", None) is not None:
            return revision
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    dtype = tensors.get_slice(key).get_dtype()
                    if not dtype.startswith(("F", "BF")):
                        integers[key] = dtype
        if not integers:
            return revision
        with torch.device("meta"):
            weights = [parameter for parameter, _ in AutoModel.from_config(config).named_parameters()]
    for key, dtype in integers.items():
        if any(f".{key}".endswith(f".{weight}") for weight in weights):
            raise ValueError(f"{name} holds {key} as {dtype}: weights are floats, unless a model is quantised.")
    return revision


def named_class(config: Any) -> type[PreTrainedModel] | None:
    """The model class that a config names, if it stands beside the class of this config."""
    family = sys.modules.get(type(config).__module__.rpartition(".")[0])
    found = getattr(family, str(config.architectures[0]), None) if config.architectures else None
    fits = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config)
    return found if fits else None


def load_model(
    name: str | Path,
    config,
    model_class: Any = AutoModel,
    *,
    revision: str | None = None,
    needed: Callable[[str], bool] = lambda key: True,
    hint: str = "",
    say_unused: bool = False,
    **options,
) -> PreTrainedModel:
    """A model in evaluation mode, from safetensors only and without remote code.

    `needed` tells by their names which weights the checkpoint must hold; `hint` ends the error about missing ones.
    `say_unused` warns about weights that the class does not have, and about random weights.
    """
    if not options.get("gguf_file"):
        revision = check_weights(name, config, revision)
    safe = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True, "revision": revision}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # missing weights are an error below
    try:
        with readable(name):
            model, info = model_class.from_pretrained(name, **safe, **options)
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(filter(needed, info["missing_keys"])):
        raise ValueError(
            f"{len(missing)} weights of {name} are missing, for example {missing[0]}: they would be random.{hint}"
        )
    if say_unused and info["missing_keys"]:
        logger.warning(f"{name} does not hold {shown(info['missing_keys'])}: random weights take their place.")
    if say_unused and info["unexpected_keys"]:
        logger.warning(
            f"{shown(info['unexpected_keys'])} of {name} are no weights of {type(model).__name__}, and are left out."
        )
    return in_one_dtype(model, options.get("dtype") or model.config.dtype).eval()


def shown(names: Collection[str]) -> str:
    """The first names of some, and how many more there are."""
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def in_one_dtype(model, dtype: torch.dtype):
    """Cast stock XLNet: transformers always builds its attention in float32, and a model of two dtypes cannot run."""
    return model.to(dtype) if model.config.model_type == "xlnet" else model


class NoTokenizer(ValueError):
    """A checkpoint has no tokenizer, or one that cannot be read."""


def load_processor(name: str | Path, sounds: bool = False, revision: str | None = None) -> Any:
    """The image processor of a checkpoint, or its feature extractor for sounds; raises [`NoTokenizer`]."""
    loader, what = (AutoFeatureExtractor, "feature extractor") if sounds else (AutoImageProcessor, "image processor")
    try:
        return loader.from_pretrained(name, trust_remote_code=False, revision=revision)
    except Exception as error:
        raise NoTokenizer(
            f"no {what} can be read from {name} ({one_line(error)}). Add its preprocessor_config.json to the checkpoint."
        ) from error


def load_tokenizer(
    name: str | Path, revision: str | None = None, padding_side: str | None = "right", **options
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, with a padding token where it has any token for it; raises [`NoTokenizer`].

    Padding on the right keeps absolute positions independent of the other texts in a batch; None keeps the side that
    the tokenizer was saved with. `options` are those of `from_pretrained`.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, revision=revision, **options)
    except Exception as error:  # every tokenizer format has its own errors
        raise NoTokenizer(
            f"no tokenizer can be read from {name} ({one_line(error)}). Add its tokenizer files to the checkpoint."
        ) from error
    names = tokenizer.vocab_files_names.values()
    files = [Path(name, file) for file in ("tokenizer.json", *names)]
    # transformers makes an empty tokenizer for a folder without tokenizer files
    if names and not options and Path(name).is_dir() and not any(file.is_file() for file in files):
        raise NoTokenizer(f"{name} has no tokenizer. Add its tokenizer files to the checkpoint.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if padding_side is not None:
        tokenizer.padding_side = padding_side
    return tokenizer


def data_source(name: str) -> str:
    """The argument of `load_dataset` for a Hub name or a folder.

    A folder gets its full path: `load_dataset("csv")` would ignore a folder named csv and read every file of the working
    directory. In offline mode a folder is refused if its card names files by URL, which `load_dataset` would request.
    """
    from datasets import config

    if Path(name).is_file():
        raise ValueError(f"{name} is a file: give its folder as the dataset.")
    if not Path(name).exists():
        finish_replacement(Path(name).resolve())
    if not Path(name).is_dir():
        return name
    for path in (Path(name, "README.md"), Path(name, ".huggingface.yaml")) if config.HF_HUB_OFFLINE else ():
        if path.is_file():
            # parsed as datasets parses them, so that both find the same fields
            fields = DatasetCard.load(path).data if path.suffix == ".md" else yaml.safe_load(path.read_text("utf-8"))
            if found := URL.search(json.dumps((fields or {}).get("configs"), default=str)):
                raise ValueError(f"{path} names {found[0]} as data, and offline mode (HF_HUB_OFFLINE) is on.")
    return str(Path(name).resolve())
