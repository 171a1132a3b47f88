"""The files beside the weights of a checkpoint: those that a converted model keeps, and their contents."""

import glob
import json
import os
import shutil
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from transformers.utils import cached_file, logging

from .atomic import is_own_file
from .checkpoints import one_line


logger = logging.get_logger(__name__)

WEIGHTS = (
    *("*.safetensors", "*.bin", "*.index.json", "*.pt", "*.pth", "*.ckpt*", "*.pkl", "*.pickle", "*.h5", "*.msgpack"),
    *("*.ot", "*.onnx*", "openvino*", "*.gguf", "*.ggml", "*.tflite", "*.pb", "*.mlmodel"),
)
# records of the training and evaluation of the old weights
RECORDS = (
    *("optimizer*", "scheduler*", "rng_state*", "trainer_state.json", "training_args*", "*tfevents*", "*_results.*"),
)
CODE = ("*.py", "*.pyc")
# files that are written anew
REWRITTEN = ("config.json", "README.md", "adapter_config.json")


def matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(PurePosixPath(name).name.lower(), pattern) for pattern in patterns)


def companions(names: Collection[str], modules: Collection[str] = ()) -> list[str]:
    """The names, relative to a checkpoint's folder, of the files that do not describe its old weights.

    Weights of any format, records of training, code, hidden files, and subfolders with weights (other models) are left
    out. `modules` are the subfolders of further modules of a sentence-transformers model; their weights are kept.

    >>> companions(["vocab.txt", "model.onnx", "onnx/config.json", "onnx/model.onnx", "2_Dense/model.safetensors"], ["2_Dense"])
    ['vocab.txt', '2_Dense/model.safetensors']
    """
    others = {str(PurePosixPath(name).parent) for name in names if matches(name, WEIGHTS)} - {".", *modules}
    kept = []
    for name in names:
        path = PurePosixPath(name)
        folders = {str(folder) for folder in path.parents}
        old_weights = matches(name, WEIGHTS) and not folders & set(modules)
        hidden = any(part.startswith(".") for part in path.parts)
        if hidden or old_weights or folders & others or name in REWRITTEN or matches(name, RECORDS + CODE):
            continue
        kept.append(name)
    return kept


def read_json(file: Path) -> Any:
    """The contents of a JSON file beside the weights."""
    try:
        if not file.is_file():  # opening a named pipe would wait for ever
            raise ValueError("it is not a regular file.")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {one_line(error)}") from error


def module_list(folder: Path) -> list[dict[str, Any]]:
    """The modules of a sentence-transformers model in their order, or none."""
    if not (folder / "modules.json").exists():
        return []
    found = read_json(folder / "modules.json")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f"{folder / 'modules.json'} is not the list of modules of a sentence-transformers model.")
    return found


def module_folders(folder: Path) -> list[str]:
    """The subfolders of the modules of a sentence-transformers model, the transformer excepted."""
    return [
        str(entry["path"])
        for entry in module_list(folder)
        if entry.get("path") and not str(entry.get("type")).endswith("Transformer")
    ]


def files_of(folder: Path) -> Iterator[str]:
    """The files below a folder that are its own (`is_own_file`)."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if is_own_file(path, folder):
                yield path.relative_to(folder).as_posix()


def copy_companions(source: str | Path, target: str | Path) -> list[str]:
    """Copy the [`companions`] of the checkpoint in the folder `source` to `target`, byte for byte; returns their names."""
    source, target = Path(source).resolve(), Path(target)
    names = list(files_of(source))
    kept = companions(names, module_folders(source))
    for name in kept:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    if code := [name for name in names if matches(name, CODE[:1])]:
        logger.warning(f"Python files of the source are not copied: {', '.join(code)}.")
    return kept


def checkpoint_folder(name: str, commit: str | None = None) -> Path:
    """The folder of a checkpoint. For a name on the Hub this is its folder in the cache, with all companions in it."""
    if Path(name).is_dir():
        return Path(name).resolve()
    folder = Path(str(cached_file(name, "config.json", revision=commit))).parent
    try:
        names = HfApi().list_repo_files(name, revision=commit)
        if "modules.json" in names:
            hf_hub_download(name, "modules.json", revision=commit)
        wanted = companions(names, module_folders(folder))
        snapshot_download(name, revision=commit, allow_patterns=[glob.escape(file) for file in wanted])
    except Exception as error:  # of the network or of offline mode, in many types
        logger.warning(f"only the files of {name} that are in the cache are kept: {one_line(error)}")
    return folder


def repository_of(name: str) -> str | None:
    """The Hub repository of a checkpoint: its name, or that of a folder in the Hub's cache; None for other folders."""
    if not Path(name).exists():
        return name
    folder = Path(name).resolve()
    owner = folder.parent.parent.name
    if folder.parent.name == "snapshots" and owner.startswith("models--"):
        return owner.removeprefix("models--").replace("--", "/")
    return None


def pooling_of(folder: Path) -> str:
    """How a sentence-transformers model pools its token states: `cls`, `mean`, `max` and so on; `mean` for other models."""
    for entry in module_list(folder):
        if not str(entry.get("type")).endswith(".Pooling"):
            continue
        file = folder / str(entry.get("path")) / "config.json"
        if file.exists() and not is_own_file(file, folder.resolve()) and file.is_file():
            raise ValueError(f"{file} is outside of {folder}: only files of the checkpoint are read.")
        fields = read_json(file)
        if not isinstance(fields, dict):
            raise ValueError(f"{file} is not the config of a pooling module.")
        old_names = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
        old_names |= {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_weightedmean_tokens": "weightedmean"}
        old_style = next((old_names[key] for key in old_names if fields.get(key)), "mean")
        found = fields.get("pooling_mode") or old_style
        return found if isinstance(found, str) else "mean"
    return "mean"
