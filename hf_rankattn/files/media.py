"""Batches of images and sounds, from the files of a folder or from a column of a dataset."""

import io
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from .batches import BATCH, Batch, sound_size
from .checkpoints import one_line
from .texts import dataset_errors, stream_rows


logger = logging.get_logger(__name__)
# suffixes and formats of images; PIL would run a program for others, such as EPS
IMAGES = {".png": "PNG", ".bmp": "BMP", ".webp": "WEBP"}
IMAGES |= {".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF", ".tiff": "TIFF"}
WAVES = {".wav": "WAV"}
TABLES = (".parquet", ".arrow")
Entry = tuple[str, Path | io.BytesIO]  # a name for errors, and what to read


def image_batches(
    processor, source: str, split: str, column: str | None, examples: int, batch_size: int = BATCH
) -> list[Batch]:
    """Batches of the first images of a folder, in the order of their paths, or of a dataset."""
    images = [read_image(*entry) for entry in first_entries(source, IMAGES, "Image", split, column, examples)]
    starts = range(0, len(images), check_size(batch_size))
    return [
        {"pixel_values": processor(images=images[start : start + batch_size], return_tensors="pt")["pixel_values"]}
        for start in starts
    ]


def read_image(name: str, file: Path | io.BytesIO) -> Any:
    from PIL import Image

    try:
        with Image.open(file, formats=list(dict.fromkeys(IMAGES.values()))) as image:
            return image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read as an image: {one_line(error)}") from error


def sound_batches(
    extractor, config, source: str, split: str, column: str | None, examples: int, length: int, batch_size: int = BATCH
) -> list[Batch]:
    """Batches of the first sounds of a folder or a dataset, at the rate of the feature extractor.

    Waveforms are cut to `length` tokens where the config tells their length. Every sound is prepared alone, and sounds of one
    length share a batch, so nothing is padded up to another sound.
    """
    rate, rates, prepared = extractor.sampling_rate, set(), []
    name = extractor.model_input_names[0]
    waveforms = name == "input_values" and getattr(config, "conv_kernel", None)
    longest, shortest = (sound_size(config, name, tokens)[0] if waveforms else None for tokens in (length, 2))
    check_size(batch_size)
    for label, file in first_entries(source, WAVES, "Audio", split, column, examples):
        own_rate, sound = read_wave(label, file)
        rates.add(own_rate)
        sound = resampled(sound, own_rate, rate)[:longest]
        if len(sound) < (shortest or 1):
            raise ValueError(f"{label} is too short: it has {len(sound)} samples at {rate} Hz. Leave it out.")
        prepared.append(dict(extractor(sound, sampling_rate=rate, return_tensors="pt")))
    if others := sorted(rates - {rate}):
        logger.warning(f"sounds of {', '.join(map(str, others))} Hz are resampled to the {rate} Hz of the checkpoint.")
    batches: list[list[Batch]] = []
    for entry in prepared:
        if batches and len(batches[-1]) < batch_size and batches[-1][0][name].shape == entry[name].shape:
            batches[-1].append(entry)
        else:
            batches.append([entry])
    return [{key: torch.cat([entry[key] for entry in batch]) for key in batch[0]} for batch in batches]


def read_wave(name: str, file: Path | io.BytesIO) -> tuple[int, np.ndarray]:
    """The sampling rate and the samples of a WAV file, one channel of floats from -1 to 1."""
    from scipy.io import wavfile

    try:
        rate, samples = wavfile.read(file)
    except Exception as error:  # a file that is cut short raises errors of struct and numpy
        raise ValueError(f"{name} cannot be read as a WAV file: {one_line(error)}") from error
    if samples.dtype == np.uint8:
        samples = (samples.astype(np.float32) - 128) / 128
    elif samples.dtype.kind == "i":
        samples = samples / np.float32(np.iinfo(samples.dtype).max + 1)
    samples = samples.astype(np.float32).reshape(len(samples), -1).mean(1)
    if rate < 1 or not np.isfinite(samples).all():
        raise ValueError(f"{name} cannot be read as a WAV file: it holds NaN or Inf, or has no sampling rate.")
    return rate, samples


def resampled(sound: np.ndarray, old: int, new: int) -> np.ndarray:
    from scipy.signal import resample_poly

    common = math.gcd(old, new)
    return sound if old == new else resample_poly(sound, new // common, old // common).astype(np.float32)


def check_size(batch_size: int) -> int:
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    return batch_size


def first_entries(
    source: str, suffixes: dict[str, str], kind: str, split: str, column: str | None, examples: int
) -> list[Entry]:
    if examples < 1:
        raise ValueError(f"`examples` must be at least 1, got {examples}.")
    what = {"Image": "images", "Audio": "sounds"}[kind]
    folder = Path(source) if Path(source).is_dir() else None
    inside = sorted(path for path in folder.rglob("*") if path.is_file()) if folder else []
    inside = [path for path in inside if not path.name.startswith("._")]  # macOS stores more about a file in these
    if files := [path for path in inside if path.suffix.lower() in suffixes]:
        return [(str(file), file) for file in files[:examples]]
    entries = []
    if folder is None or any(path.suffix in TABLES for path in inside):
        entries = list(islice(column_entries(source, folder, what, kind, split, column), examples))
    if not entries:
        raise ValueError(
            f"{source} has no {what}: give a folder with files that end in {', '.join(suffixes)}, or a dataset with a column "
            f"of {what}."
        )
    return entries


def column_entries(
    source: str, folder: Path | None, what: str, kind: str, split: str, column: str | None
) -> Iterator[Entry]:
    """The files in a column of images or sounds, as they are stored in the tables of a dataset."""
    rows = stream_rows(source, split)
    columns = [name for name, feature in (rows.features or {}).items() if type(feature).__name__ == kind]
    if columns and (column not in columns if column else len(columns) > 1):
        given = f", got {column!r}" if column else ""
        raise ValueError(f"give `column`, the column of {what} of {source} to read, of {', '.join(columns)}{given}.")
    if not columns:
        return
    with dataset_errors(source, split):
        for number, row in enumerate(rows):
            entry, label = row[column or columns[0]] or {}, f"row {number} of {source}"
            if entry.get("bytes") is not None:
                yield label, io.BytesIO(entry["bytes"])
                continue
            path = Path(folder or "", entry.get("path") or "").resolve()
            if folder is None or not path.is_relative_to(folder.resolve()) or not path.is_file():
                raise ValueError(f"the data of {label} are not in the dataset, and files elsewhere are not read.")
            yield label, path
