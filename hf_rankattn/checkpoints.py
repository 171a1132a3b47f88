"""Reading checkpoints that others wrote: errors of one line, and nothing of theirs is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .models.rank_bert.building import refuse_pickled_shards


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


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
            raise ValueError(f"{name} cannot be read as a checkpoint: {first_line(error)}") from error
        raise ValueError(
            f"{name} has no safetensors, and a pickle, which can run code when it is read, is not opened. If you trust "
            "it, convert it: load it with transformers and save_pretrained it to another folder."
        ) from error
    except Exception as error:
        if also_writes and isinstance(error, ValueError):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{name} cannot be read as a checkpoint: {kind}{first_line(error)}") from error


def refuse_integers(name: str | Path, config) -> None:
    """Refuse whole numbers in the place of weights, which transformers would take for floats; quantised models say so."""
    if getattr(config, "quantization_config", None) is not None:
        return
    for file in sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else ():
        with readable(name), safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                dtype = tensors.get_slice(key).get_dtype()
                if key.endswith((".weight", ".bias")) and not dtype.startswith(("F", "BF")):
                    raise ValueError(
                        f"{name} holds {key} as {dtype}: weights are floats, unless a model is quantised."
                    )
