"""Weights-only conversion of a checkpoint that can be larger than memory: one layer at a time is read and written."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils import logging

from .. import models
from ..families.row import Family
from ..families.slots import entries_of, family_of_type, weight_names
from ..files.atomic import is_own_file
from ..files.checkpoints import check_shard_names
from .building import narrowed_config
from .choosing import asked_widths, logit_spectrum, old_widths, ranks_from_spectra, value_spectrum
from .conversion import LayerReport, refuse_qk_norm, reports, say_widening
from .heads import Tensors, heads_of
from .part import Part, Widths
from .ranks import check_request


logger = logging.get_logger(__name__)
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES = FLOATS | INTEGERS | {"BOOL": torch.bool}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LAYER = re.compile(r"(?:.*?\.)?\w*layer\w*\.(\d+)\.")


@dataclass(frozen=True)
class Stored:
    """The place of one tensor: its file, and its entry in the header of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own: safetensors' reader for torch would map the whole file, writable."""
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.file} holds {self.name} as {self.dtype}; {', '.join(DTYPES)} can be converted.")
        data = bytearray(self.size)
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            found = stream.readinto(data)
        if found < self.size:
            raise ValueError(f"{self.file} ends within {self.name}: the file became shorter while it was read.")
        if not data:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).view(self.shape)


def read_header(file: Path) -> list[Stored]:
    """The tensors of a safetensors file."""
    try:
        with safe_open(file, framework="np"):  # checks the header
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file, or is cut short: {error}.") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    stored = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        stored.append(Stored(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin))
    return stored


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds no NaN and no Inf; without a temporary tensor of its size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


class Checkpoint:
    """The tensors of a folder, and the names of those of each attention block."""

    def __init__(self, folder: Path, family: Family, config):
        self.family, self.config, self.heads = family, config, heads_of(family)
        pattern = weight_names(family)
        self.tensors = {stored.name: stored for file in shard_files(folder) for stored in read_header(file)}
        self.modules: dict[str, dict[str, str]] = {}
        self.entries: dict[str, int] = {}
        for name in self.tensors:
            match = pattern.fullmatch(name)
            if match and match["tensor"] in self.heads.names:
                self.modules.setdefault(match["module"], {})[match["tensor"]] = name
                self.entries[match["module"]] = int(match["layer"])
        expected = len(entries_of(config, family))
        if sorted(set(self.entries.values())) != list(range(expected)) or any(
            len(names) != len(self.heads.names) for names in self.modules.values()
        ):
            raise ValueError(
                f"{folder} does not hold the attention weights of all {expected} layers under the names of a "
                f"{family.name} checkpoint: is it one?"
            )
        self.modules = dict(sorted(self.modules.items(), key=lambda item: self.entries[item[0]]))

    def part(self, module: str) -> Part:
        """The heads of a block."""
        entry, num_heads = self.entries[module], self.config.num_attention_heads
        stored = {name: self.tensors[self.modules[module][name]].read() for name in self.heads.names}
        part = Part(self.heads, stored, num_heads, 1.0, entry, module)
        part.scale = self.family.default_scale(part.old.rank)
        if hasattr(self.config, "head_geometry"):
            layer = sum(entries_of(self.config, self.family)[:entry])
            if self.config.per_layer_config[layer].qk_scale is not None:
                part.scale = self.config.head_geometry(layer).qk_scale
        return part

    def layers(self) -> list[list[str]]:
        """The names of all tensors, layer by layer; the first list holds those of no layer."""
        found: dict[int, list[str]] = {}
        for name in self.tensors:
            match = LAYER.match(name)
            found.setdefault(int(match[1]) if match else -1, []).append(name)
        return [names for _, names in sorted(found.items())]

    def narrowed(
        self, names: list[str], widths: list[Widths], seed: int
    ) -> tuple[Tensors, dict[str, tuple[float, float]], dict[str, int]]:
        """The new tensors of one layer, and the shares of energy and the size of each of its attention blocks."""
        tensors, shares, sizes = {}, {}, {}
        for module, own in self.modules.items():
            if set(own.values()) <= set(names):
                part = self.part(module)
                rank, value = widths[part.entry]
                narrow, logits = part.narrow_logits(rank, seed)
                narrow, values = part.narrow_values(narrow, value, seed)
                new = part.stored(narrow)
                shares[module], sizes[module] = (logits, values), sum(tensor.numel() for tensor in new.values())
                tensors.update({own[name]: tensor for name, tensor in new.items()})
        for name in names:
            made = name in tensors
            if not made:
                tensors[name] = self.tensors[name].read()
            if not all_finite(tensors[name]):
                where = "the converted model" if made else self.tensors[name].file
                raise ValueError(f"{name} of {where} holds NaN or Inf: the model is not converted.")
        return tensors, shares, sizes


def shard_files(folder: Path) -> list[Path]:
    """The weight files of a folder: regular files inside it, or links of the Hub's cache."""
    folder = folder.resolve()
    sharded = (folder / INDEX).is_file() and not (folder / SINGLE).is_file()  # transformers prefers the single file
    names = check_shard_names(folder / INDEX) if sharded else [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no file {name}: only local safetensors checkpoints can be streamed.")
        if not is_own_file(folder / name, folder):
            raise ValueError(
                f"{folder / name} is a link that leads out of the folder: only files inside it are streamed. Copy the file, or "
                "convert without streaming."
            )
    return [folder / name for name in names]


def rank_architectures(config, new) -> list[str] | None:
    """The rank classes of the classes that a config names; a name that is no class for this config is left out."""
    found = []
    for name in config.architectures or []:
        rank_name = f"Rank{str(name).removeprefix('Rank')}"
        if getattr(getattr(models, rank_name, None), "config_class", None) is type(new):
            found.append(rank_name)
        else:
            logger.warning(f"{str(name)[:80]!r} is no class of transformers for {config.model_type}: it is left out.")
    return found or None


def convert_shards(
    source: Path,
    target: Path,
    qk_rank=None,
    v_head_dim=None,
    *,
    energy: float | None = None,
    mean_rank: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> tuple[Any, list[LayerReport]]:
    """Convert the weights of the checkpoint in `source` to the folder `target`, weights only, in bounded memory.

    Writes one shard per layer, their index and the config; returns the config and the reports. The tensors are those that
    [`convert_rank`] without calibration gives.
    """
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    family = family_of_type(config.model_type, str(source))
    refuse_qk_norm(config)
    if chosen := getattr(config, "transformers_weights", None):
        raise ValueError(
            f"the config of {source} names {chosen!r} as its weights (`transformers_weights`), and only {SINGLE} or its shards "
            "are streamed: convert without streaming."
        )
    check_request(qk_rank, v_head_dim, energy, mean_rank)
    if not family.rank_types:
        raise ValueError(
            f"{family.name} has no rank twin, and only families with one are streamed: convert without streaming."
        )
    if v_head_dim == "auto" and mean_rank is not None:
        raise ValueError(
            "`mean_rank` for values compares errors on texts, and a streamed conversion runs no model: use `energy`."
        )
    checkpoint = Checkpoint(source, family, config)
    widths, light = planned(checkpoint, (qk_rank, v_head_dim), energy, mean_rank)
    say_widening(light, widths)
    layers, total, weight_map = checkpoint.layers(), 0, {}
    shares: dict[str, tuple[float, float]] = {}
    sizes: dict[str, int] = {}
    for number, names in enumerate(layers, start=1):
        tensors, kept, changed = checkpoint.narrowed(names, widths, seed)
        sizes.update(changed)
        file = f"model-{number:05d}-of-{len(layers):05d}.safetensors"
        save_file(tensors, target / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next layer is read
        weight_map.update(dict.fromkeys(names, file))
        for module, share in kept.items():
            shares[module] = share
            progress(len(shares), len(checkpoint.modules))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    new = narrowed_config(config, family, light, widths)
    new.architectures = rank_architectures(config, new)
    new.save_pretrained(target)
    modules = checkpoint.modules
    return new, reports(light, widths, [shares[module] for module in modules], [sizes[module] for module in modules])


def planned(checkpoint: Checkpoint, given: tuple, energy, mean_rank) -> tuple[list[Widths], list[Part]]:
    """The widths of every layer, and all parts without their weights."""
    light, logits, values = [], [], []
    for module in checkpoint.modules:
        part = checkpoint.part(module)
        if given[0] == "auto":
            logits.append(logit_spectrum(part, part.weights_alone()))
        if given[1] == "auto":
            values.append(value_spectrum(part, None))
        part.tensors = {}
        light.append(part)
    columns = asked_widths(given, old_widths(light))
    if logits:
        columns[0] = ranks_from_spectra(logits, columns[0], energy, mean_rank)
    if values:
        columns[1] = ranks_from_spectra(values, columns[1], energy, None)
    return [Widths(*pair) for pair in zip(*columns, strict=True)], light
