"""Reading checkpoints that others wrote: errors of one line, and nothing of theirs is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModel

from .models.rank_bert.building import refuse_pickled_shards


LONGEST = 400


def one_line(error: BaseException) -> str:
    """What an error says, in one line that is not too long; errors of strict configs have their reason in the second."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


@contextmanager
def readable(name: str | Path, also_writes: bool = False) -> Iterator[None]:
    """Let whatever a checkpoint breaks inside transformers be a `ValueError` that names the checkpoint.

    The constructors and loaders of stock models fail in as many ways as a config has fields. Where the block `also_writes`,
    errors of files may be those of its own, as are its `ValueError`s, and both are left as they are.
    """
    if Path(name).is_file():  # transformers would unpickle it
        raise ValueError(f"{name} cannot be read as a checkpoint: it is a file. Give the folder in which it lies.")
    refuse_pickled_shards(name)
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} are not safetensors, or are cut short: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{name} cannot be read as a checkpoint: a file of it is nested without end.") from error
    except OSError as error:
        if also_writes:
            raise
        if "safetensors" not in str(error):
            raise ValueError(f"{name} cannot be read as a checkpoint: {one_line(error)}") from error
        raise ValueError(
            f"{name} has no safetensors, and a pickle, which can run code when it is read, is not opened. If you trust "
            "it, convert it: load it with transformers and save_pretrained it to another folder."
        ) from error
    except Exception as error:
        if also_writes and isinstance(error, ValueError):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{name} cannot be read as a checkpoint: {kind}{one_line(error)}") from error


def refuse_integers(name: str | Path, config) -> None:
    """Refuse whole numbers in the place of weights, which transformers would take for floats; quantised models say so.

    Buffers may be whole: old checkpoints of GPT-2 keep their causal mask under the name of a bias.
    """
    if getattr(config, "quantization_config", None) is not None or not Path(name).is_dir():
        return
    whole: dict[str, str] = {}
    with readable(name):
        for file in sorted(Path(name).glob("model*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    dtype = tensors.get_slice(key).get_dtype()
                    if not dtype.startswith(("F", "BF")):
                        whole[key] = dtype
        if not whole:
            return
        with torch.device("meta"):
            weights = [parameter for parameter, _ in AutoModel.from_config(config).named_parameters()]
    for key, dtype in whole.items():
        if any(f".{key}".endswith(f".{weight}") for weight in weights):
            raise ValueError(f"{name} holds {key} as {dtype}: weights are floats, unless a model is quantised.")
