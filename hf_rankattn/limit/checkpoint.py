"""The work of `rankattn need`: a checkpoint and texts or images in, the table of [`measure_need`] and the facts of the run out."""

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ..convert.checkpoint import JUDGED
from ..convert.damage import POOLINGS, Classification, MaskedTokens, NextSentence, NextToken, task_of
from ..convert.labelled import labelled_texts
from ..families.architectures import attending_layers
from ..families.structure import choosing_tower
from ..files.batches import (
    Batch,
    Text,
    UnfitTokenizer,
    check_length,
    check_tokens,
    encode,
    longest,
    padded_batches,
    random_batches,
    text_batches,
)
from ..files.checkpoints import NoTokenizer, gguf_options, load_config, load_model, load_tokenizer, named_class
from ..files.companions import checkpoint_folder, pooling_of
from ..files.texts import calibration_text, package_text, read_texts, without_overlap
from ..probe.batches import take_tower
from ..probe.survey import DTYPES, load_checkpoint, media_batches, reads
from .need import Progress, measure_need
from .quality import NO_LABEL


if TYPE_CHECKING:
    import pandas as pd

logger = logging.get_logger(__name__)
LENGTH, EXAMPLES, CALIBRATED = 128, 16, 20
PACKAGE = "package"


def need_of_checkpoint(
    name: str,
    folder: str | Path | None = None,
    *,
    text: Path | None = None,
    calibration: str | None = None,
    dataset: str | None = None,
    split: str = "test",
    column: str | None = None,
    label_column: str | None = None,
    random_inputs: bool = False,
    examples: int = EXAMPLES,
    length: int | None = None,
    batch_size: int = 8,
    widths: Sequence[int] | None = None,
    target_loss: float = 0.01,
    by_layer: bool = True,
    tower: str | None = None,
    gguf: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> tuple["pd.DataFrame", dict[str, Any]]:
    """The table of [`measure_need`] for a checkpoint, and the facts of the run; all arguments are those of `rankattn need`."""
    if random_inputs and any(given is not None for given in (text, dataset, calibration)):
        raise ValueError("random_inputs=True takes no texts: leave `text`, `dataset` and `calibration` out.")
    if text is not None and dataset is not None:
        raise ValueError("give a text file or a dataset, not both.")
    if label_column is not None and dataset is None:
        raise ValueError("`label_column` is a column of a dataset: give `dataset` as well.")
    if not 0 < target_loss < 1:  # before gigabytes are read
        raise ValueError(f"`target_loss` must be between 0 and 1, such as 0.01 for 1 %, got {target_loss}.")
    if examples < 1:
        raise ValueError(f"`examples` must be at least 1, got {examples}.")
    transformers.utils.logging.disable_progress_bar()
    start, cpu = time.perf_counter(), time.process_time()
    model = load(name, dtype, seed, revision, tower, gguf)
    model, inside = take_tower(model, tower)
    length = length or min(LENGTH, longest(model.config) or LENGTH)
    sizes = (length, batch_size)
    if random_inputs:
        batches = random_batches(model.config, 2 * examples, *sizes, seed)
        held, calibrating = halves(batches, examples)
        sources = ("random inputs", "other random inputs")
    elif reads(model) == "input_ids":
        try:
            tokenizer = load_tokenizer(name, revision, **gguf_options(name, gguf))
        except NoTokenizer as error:
            raise ValueError(f"{error} Or give random_inputs=True.") from error
        judged, labels, source = judging_texts(model, text, dataset, split, column, label_column, examples)
        texts, calibrated = calibration_texts(calibration, judged)
        calibrating = text_batches(tokenizer, texts, model.config, *sizes)
        held = held_batches(model, tokenizer, judged, labels, *sizes)
        sources = (source, calibrated)
    else:
        if label_column is not None:
            raise ValueError(
                f"{name} reads {reads(model)}, and labels are read beside texts: leave `label_column` out."
            )
        chosen = (model, name, revision, inside)
        if calibration is not None:
            held = media_batches(*chosen, dataset, (split, column, examples), *sizes)
            calibrating = media_batches(*chosen, calibration, (split, column, CALIBRATED), *sizes)
            sources = (f"inputs of {Path(str(dataset)).name}", f"inputs of {Path(calibration).name}")
        else:
            both = media_batches(*chosen, dataset, (split, column, 2 * examples), *sizes)
            held, calibrating = every_second(both)
            sources = (f"every second input of {Path(str(dataset)).name}", "the other inputs")
    pooling = pooling_of(checkpoint_folder(name, getattr(model.config, "_commit_hash", None))) if not gguf else "mean"
    if pooling not in POOLINGS:
        logger.warning(f"the checkpoint pools by {pooling!r}; embeddings are means over the tokens here.")
        pooling = "mean"
    table = measure_need(
        model,
        held,
        calibration=calibrating,
        widths=widths,
        target_loss=target_loss,
        by_layer=by_layer,
        pooling=pooling,
        tower=inside,
        seed=seed,
        folder=folder,
        overwrite=overwrite,
        progress=progress,
    )
    shown = "/".join(Path(name).resolve().parts[-2:]) if Path(name).exists() else name
    with choosing_tower(inside):
        layers = len(attending_layers(model))
    facts = {
        "name": shown,
        "title": f"{shown}{f', {tower}' if tower else ''}",
        "model_type": model.config.model_type,
        "layers": layers,
        "dtype": dtype,
        "parameters": model.num_parameters(),
        **table.attrs,
        "held_out": f"{count_of(held)} from {sources[0]}",
        "calibration": f"{count_of(calibrating)} from {sources[1]}",
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "versions": {
            package: version(package) for package in ("hf_rankattn", "torch", "transformers", "numpy", "pandas")
        },
    }
    return table, facts


def load(
    name: str, dtype: str, seed: int, revision: str | None, tower: str | None, gguf: str | None
) -> PreTrainedModel:
    """The model with its head where quality is read from the head, otherwise the model below it."""
    file: dict[str, Any] = dict(gguf_options(name, gguf))
    config = load_config(name, revision, **file)
    kind: Any = named_class(config)
    if kind is None and file and type(config) in AutoModelForCausalLM._model_mapping:
        kind = AutoModelForCausalLM  # files in GGUF hold language models, and do not name their class
    judged = kind is AutoModelForCausalLM or (
        kind is not None and issubclass(task_of(kind.__name__), NextToken | MaskedTokens | Classification)
    )
    if tower is not None or not judged or getattr(config, "is_encoder_decoder", False):
        return load_checkpoint(name, False, dtype, seed, revision, None, None, tower, gguf)
    model = load_model(
        name, config, kind, revision=revision, needed=lambda key: "pooler" not in key, dtype=DTYPES[dtype], **file
    )
    accelerator = torch.accelerator.current_accelerator()
    return model if accelerator is None else model.to(accelerator)  # type: ignore[arg-type]


def judging_texts(
    model: PreTrainedModel, text: Path | None, dataset: str | None, split: str, column, label_column, examples: int
) -> tuple[list[Text], list[Any] | None, str]:
    """The texts that quality is measured on, their labels if accuracy is measured, and where they are from."""
    if (
        dataset is not None
        and issubclass(task_of(model), Classification)
        and not issubclass(task_of(model), NextSentence)
    ):
        texts, labels = labelled_texts(model, dataset, split, column, label_column, examples)
        # scores and several labels at once have no accuracy
        usable = label_column is not None or (labels is not None and all(type(label) is int for label in labels))
        return texts, labels if usable else None, f"{Path(dataset).name}, {split}"
    if label_column is not None:
        raise ValueError(f"{type(model).__name__} predicts no label of a text: leave `label_column` out.")
    if text is None and dataset is None:
        return list(package_text()[JUDGED][:examples]), None, "the package's paragraphs"
    read, source = read_texts(text, dataset, split, column, examples)
    return list(read), None, source


def calibration_texts(calibration: str | None, judged: Sequence[Text]) -> tuple[list[str], str]:
    """The texts that limits are fitted to, without those that overlap with a judging text."""
    if calibration in (None, PACKAGE):
        every = calibration_text()
        texts, source = every[:: len(every) // CALIBRATED], "the package, prose, news, documentation, code and terms"
    else:
        texts, source = read_texts(Path(str(calibration)), examples=CALIBRATED)
    parts = [part for entry in judged for part in ([entry] if isinstance(entry, str) else entry)]
    kept = without_overlap(texts, parts)
    if not kept:
        raise ValueError(f"all texts of {source} overlap with the texts that quality is measured on: give others.")
    return kept, source


def held_batches(
    model: PreTrainedModel, tokenizer, texts: Sequence[Text], labels: list[Any] | None, length: int, batch_size: int
) -> list[Batch]:
    """The texts as batches, with `labels` for a classifier that has them and for a model that fills masks."""
    if labels is not None:
        check_length(model.config, length)
        batches = padded_batches(tokenizer, texts, length, batch_size)
        check_tokens(tokenizer, batches, model.config)
        starts = range(0, len(labels), batch_size)
        own = [torch.tensor(labels[start : start + batch_size]) for start in starts]
        return [{**batch, "labels": part} for batch, part in zip(batches, own, strict=True)]
    plain = [text if isinstance(text, str) else " ".join(text) for text in texts]
    batches = text_batches(tokenizer, plain, model.config, length, batch_size)
    if not issubclass(task_of(model), MaskedTokens):
        return batches
    kept = [text for text in plain if len(encode(tokenizer, [text], length, padding=False)["input_ids"][0]) > 1]
    try:
        masked = MaskedTokens(model, tokenizer, kept, length).batches
    except UnfitTokenizer as error:
        logger.warning(f"{error} Embeddings are measured.")
        return batches
    names = set(batches[0])
    return [
        {
            **{name: value for name, value in batch.items() if name in names},
            "labels": torch.full_like(batch["input_ids"], NO_LABEL).scatter(1, batch["places"], batch["truth"]),
        }
        for batch in masked
    ]


def halves(batches: Sequence[Batch], examples: int) -> tuple[list[Batch], list[Batch]]:
    """The first `examples` of some batches, and the others."""
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    size = len(next(iter(batches[0].values())))
    first, rest = (
        {name: value[part] for name, value in joined.items()} for part in (slice(examples), slice(examples, None))
    )
    return [
        [{name: value[start : start + size] for name, value in half.items()} for start in range(0, examples, size)]
        for half in (first, rest)
    ]  # type: ignore[return-value]


def every_second(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """The examples of some batches with even numbers, and those with odd ones: files of one kind often follow each other."""
    single = [
        {name: value[row : row + 1] for name, value in batch.items()}
        for batch in batches
        for row in range(size_of(batch))
    ]
    if len(single) < 2:
        raise ValueError(
            f"there is {len(single)} input, and limits are fitted to other inputs than quality is measured on: give more, or others as "
            "`calibration`."
        )
    return single[::2], single[1::2]


def size_of(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def count_of(batches: Sequence[Batch]) -> str:
    """The number of examples and of real tokens in some batches."""
    examples = sum(map(size_of, batches))
    if "input_ids" not in batches[0]:
        return f"{examples} inputs"
    tokens = sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)
    return f"{examples} texts with {tokens:,} tokens together"
