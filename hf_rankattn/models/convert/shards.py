"""Weights-only conversion of a checkpoint that may be larger than memory.

Tensors pass from file to file in small pieces; only the queries and keys of one attention module are ever held. The
safetensors format is read and written here, as the library's writer wants all tensors of a file at once.
"""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import AutoConfig

from .conversion import (
    LayerReport,
    Part,
    narrowed_config,
    ranks_from_spectra,
    refuse_qk_norm,
    reports,
    say_widening,
    scales_of,
    spread_ranks,
)
from .factors import best_factors
from .families import Family, entries_of, family_of_type
from .heads import Tensors
from .ranks import check_request


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PIECE = 2**20
LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: its file, and the entry that the header of the file has for it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata."""
    whole = file.stat().st_size
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0] if whole >= 8 else whole
        if not 0 < length <= min(whole - 8, LONGEST_HEADER):
            raise ValueError(f"{file} is not a safetensors file: its header would have {length} bytes.")
        try:
            header = json.loads(stream.read(length))
            metadata = header.pop("__metadata__", {})
            stored = {
                name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
                for name, entry in header.items()
                for begin, end in [entry["data_offsets"]]
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} has a header that cannot be read: {error}.") from error
    for name, entry in stored.items():
        if entry.begin < 8 + length or entry.size < 0 or entry.begin + entry.size > whole:
            raise ValueError(f"{file} ends before {name} does: it is damaged or was cut short.")
    return dict(sorted(stored.items(), key=lambda item: item[1].begin)), metadata


def read_tensor(entry: Stored) -> torch.Tensor:
    if entry.dtype not in DTYPES or entry.size != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
        raise ValueError(
            f"{entry.file} holds queries or keys as {entry.dtype} in {entry.size} bytes; {', '.join(DTYPES)} can be converted."
        )
    with entry.file.open("rb") as stream:
        stream.seek(entry.begin)
        return torch.frombuffer(bytearray(stream.read(entry.size)), dtype=DTYPES[entry.dtype]).view(entry.shape)


def copy_bytes(entry: Stored, target: BinaryIO) -> None:
    with entry.file.open("rb") as stream:
        stream.seek(entry.begin)
        left = entry.size
        while left:
            piece = stream.read(min(PIECE, left))
            target.write(piece)
            left -= len(piece)


class Checkpoint:
    """The shards of a folder: which tensors they hold, and which of them are the queries and keys of a module."""

    def __init__(self, folder: Path, family: Family, config):
        self.family, self.config = family, config
        self.files = {file: read_header(file) for file in shard_files(folder)}
        self.tensors = {name: entry for entries, _ in self.files.values() for name, entry in entries.items()}
        self.modules: dict[str, dict[str, str]] = {}
        self.entries: dict[str, int] = {}
        for name in self.tensors:
            match = family.keys.fullmatch(name)
            if match and match["tensor"] in family.heads.names:
                self.modules.setdefault(match["module"], {})[match["tensor"]] = name
                self.entries[match["module"]] = int(match["layer"])
        expected = len(entries_of(config, family))
        if sorted(set(self.entries.values())) != list(range(expected)) or any(
            len(names) != len(family.heads.names) for names in self.modules.values()
        ):
            raise ValueError(
                f"{folder} does not hold the queries and keys of all {expected} layers under the names of a "
                f"{family.name} checkpoint: is it one?"
            )
        self.modules = dict(sorted(self.modules.items(), key=lambda item: self.entries[item[0]]))

    def part(self, module: str) -> Part:
        """The queries and keys of a module, read from wherever they are."""
        entry, num_heads = self.entries[module], self.config.num_attention_heads
        tensors = {name: read_tensor(self.tensors[self.modules[module][name]]) for name in self.family.heads.names}
        width = self.family.heads.rank_of(tensors, num_heads)
        scale = 1 / width**0.5 if self.family.name == "XLNet" else width**-0.5
        if hasattr(self.config, "head_geometry"):
            layer = sum(entries_of(self.config, self.family)[:entry])
            if self.config.per_layer_config[layer].qk_scale is not None:
                scale = self.config.head_geometry(layer).qk_scale
        return Part(self.family.heads, tensors, num_heads, scale, entry, module)


def shard_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        names = [SINGLE]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder} has no file {name}: only local safetensors checkpoints can be streamed.")
    return [folder / name for name in names]


def convert_shards(
    source: Path,
    target: Path,
    qk_rank,
    *,
    energy: float | None = None,
    mean_rank: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> tuple[Any, list[LayerReport]]:
    """Convert the weights of the checkpoint in `source` to the folder `target`, weights only, in bounded memory.

    Writes the shards under the names they have, their index and the config; returns the config and the reports. What is
    written equals what [`convert_rank`] without calibration would save, tensor for tensor.
    """
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    family = family_of_type(config.model_type, str(source))
    refuse_qk_norm(config)
    check_request(qk_rank, energy, mean_rank)
    checkpoint = Checkpoint(source, family, config)
    ranks, light = planned(checkpoint, qk_rank, energy, mean_rank)
    say_widening(light, ranks)
    folded = Folding(checkpoint, ranks, seed, progress)
    for file, (entries, metadata) in checkpoint.files.items():
        write_shard(target / file.name, entries, metadata, folded)
    if (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text())
        index.setdefault("metadata", {})["total_size"] = folded.bytes
        index["metadata"].pop("total_parameters", None)
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    new = narrowed_config(config, family, scales_of(light), ranks)
    new.architectures = [
        name if name.startswith("Rank") else f"Rank{name}" for name in config.architectures or []
    ] or None
    new.save_pretrained(target)
    shares = [folded.shares[module] for module in checkpoint.modules]
    return new, reports(light, ranks, shares)


def planned(checkpoint: Checkpoint, qk_rank, energy, mean_rank) -> tuple[list[int], list[Part]]:
    """The rank of every layer, and all parts without their weights, which are let go as soon as they have been looked at."""
    light, spectra = [], []
    for module in checkpoint.modules:
        part = checkpoint.part(module)
        if qk_rank == "auto":
            spectra.append((part.entry, best_factors(*part.weights_alone(), 1).singular * part.scale))
        part.tensors = {}
        light.append(part)
    count = len(entries_of(checkpoint.config, checkpoint.family))
    if qk_rank == "auto":
        return ranks_from_spectra(spectra, [part.old_rank for part in light], energy, mean_rank), light
    return spread_ranks(qk_rank, count), light


class Folding:
    """The narrowed tensors of one module at a time; the next one takes the place of the last."""

    def __init__(self, checkpoint: Checkpoint, ranks: list[int], seed: int, progress):
        self.checkpoint, self.ranks, self.seed, self.progress = checkpoint, ranks, seed, progress
        self.owner = {
            name: (module, tensor) for module, names in checkpoint.modules.items() for tensor, name in names.items()
        }
        self.held: tuple[str | None, Tensors] = (None, {})
        self.shares: dict[str, float] = {}
        self.bytes = 0

    def shape(self, name: str, entry: Stored) -> tuple[int, ...]:
        if name not in self.owner:
            return entry.shape
        module, tensor = self.owner[name]
        rank, heads = self.ranks[self.checkpoint.entries[module]], self.checkpoint.config.num_attention_heads
        if self.checkpoint.family.name == "XLNet":
            return (*entry.shape[:-1], rank)
        return (heads * rank, *entry.shape[1:])

    def tensor(self, name: str) -> torch.Tensor:
        module, tensor = self.owner[name]
        if self.held[0] != module:
            self.held = (None, {})
            part = self.checkpoint.part(module)
            tensors, share = part.narrow(self.ranks[part.entry], part.weights_alone(), self.seed)
            self.held = (module, tensors)
            self.shares[module] = share
            self.progress(len(self.shares), len(self.checkpoint.modules))
        return self.held[1][tensor]


def write_shard(file: Path, entries: dict[str, Stored], metadata: dict[str, str], folded: Folding) -> None:
    """Write one file: a header from the shapes that are known in advance, then tensor by tensor."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, entry in entries.items():
        shape = folded.shape(name, entry)
        size = entry.size if shape == entry.shape else math.prod(shape) * DTYPES[entry.dtype].itemsize
        header[name] = {"dtype": entry.dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    folded.bytes += end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data start at a multiple of eight bytes, as readers that map the file expect
    with file.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        for name, entry in entries.items():
            if name in folded.owner:
                target.write(folded.tensor(name).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                copy_bytes(entry, target)
