"""All of `rankattn measure`: load a checkpoint, feed it, measure it, and write one table and its figures."""

import inspect
import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .checkpoints import one_line, readable, refuse_integers
from .measure.rate import precision_floor
from .probe import ablate, measure_attention, measure_collapse, measure_logits, measure_weights
from .probe.architectures import base_of, family_of, layers_of
from .probe.batches import longest, over_processes, real_tokens
from .probe.collapse import VARIANTS
from .probe.weights import PackedWeightsError
from .texts import file_text, package_text


logger = logging.get_logger(__name__)
Batch = dict[str, torch.Tensor]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = ["model", "question", "variant", "layer", "head", "example", "component", "metric", "value"]


def load_checkpoint(
    name: str,
    random_init: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    revision: str | None = None,
    device_map: str | dict | None = None,
    offload_folder: str | None = None,
) -> PreTrainedModel:
    """The model below its task head, from safetensors only and without code of the checkpoint's own.

    Args:
        name: A folder, or a repository on the Hub.
        random_init: Take the configuration only, and draw fresh weights.
        dtype: `"float32"`, `"float64"`, `"bfloat16"` or `"float16"`.
        seed: Seed of the fresh weights.
        revision: Branch, tag or commit on the Hub.
        device_map: As in `from_pretrained`: `"auto"` for models too big for one device. By default, the accelerator if
            there is one.
        offload_folder: Where weights go that fit no device.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` must be at least 0 and below 2**63, got {seed}.")
    options: dict[str, Any] = {"trust_remote_code": False, "revision": revision}
    with readable(name):
        config = AutoConfig.from_pretrained(name, **options)
    family_of(config)  # before gigabytes are read
    if random_init:
        torch.manual_seed(seed)
        with readable(name):
            model = AutoModel.from_config(config, dtype=DTYPES[dtype])
    else:
        # a pooler is not measured, and where a checkpoint has none its random weights cannot be offloaded
        classes = inspect.getmro(AutoModel._model_mapping[type(config)])  # type: ignore[arg-type]
        if any("add_pooling_layer" in inspect.signature(base.__init__).parameters for base in classes):
            options["add_pooling_layer"] = False
        refuse_integers(name, config)
        model = load_weights(
            name, dtype=DTYPES[dtype], device_map=device_map, offload_folder=offload_folder, **options
        )
    if device_map is None and (accelerator := torch.accelerator.current_accelerator()):
        model = model.to(accelerator)
    return model.eval()


def load_weights(name: str, **options) -> PreTrainedModel:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is judged below
    try:
        with readable(name):
            model, info = AutoModel.from_pretrained(name, use_safetensors=True, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{len(missing)} weights of {name} are missing, {missing[0]} for one: they would be random, and so would be "
            "what is measured. For fresh weights throughout, ask for --random-init."
        )
    return model


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, revision=revision)
    except Exception as error:  # tokenizers fail in as many ways as there are formats
        raise ValueError(
            f"no tokenizer can be read from {name} ({one_line(error)}). Put its tokenizer there, or measure on random "
            "inputs with --random-inputs."
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"  # so that absolute positions are those of the text alone
    return tokenizer


def read_texts(
    text: Path | None = None,
    dataset: str | None = None,
    split: str = "test",
    column: str | None = None,
    examples: int = 32,
) -> tuple[list[str], str]:
    """At most `examples` texts that are not empty, and where they come from: a file, a dataset, or the package."""
    if text is not None and dataset is not None:
        raise ValueError("give a text file or a dataset, not both.")
    if examples < 1:
        raise ValueError(f"at least one example is needed, got {examples}.")
    if text is not None:
        parts: Iterable[str] = file_text(text)
        source = Path(text).name
    elif dataset is not None:
        parts, source = dataset_texts(dataset, split, column), f"dataset {dataset}, {split}"
    else:
        parts, source = package_text(), "the package's own text"
    texts: list[str] = []
    for part in parts:
        if joined := " ".join(part.split()):
            texts.append(joined)
        if len(texts) == examples:
            break
    if not texts:
        raise ValueError(f"there is no text in {source}.")
    return texts, source


def dataset_texts(name: str, split: str, column: str | None) -> Iterable[str]:
    from datasets import Value, load_dataset

    try:
        rows = load_dataset(name, split=split, streaming=True)
    except Exception as error:
        raise ValueError(f"dataset {name}, split {split}, cannot be loaded: {one_line(error)}") from error
    features = rows.features or {}
    strings = [key for key, feature in features.items() if isinstance(feature, Value) and "string" in feature.dtype]
    if column is None and len(strings) != 1:
        raise ValueError(
            f"say which column of {name} is the text with --column: there are {', '.join(strings) or features}."
        )
    column = column or strings[0]
    if features and column not in strings:
        raise ValueError(f"{name} has no text column {column!r}; there are {', '.join(strings)}.")
    return (row[column] or "" for row in rows)


def text_batches(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], config, length: int = 128, batch_size: int = 8
) -> list[Batch]:
    """Batches of texts cut to `length` tokens, padded, with their masks; texts of a single token are left out, and said."""
    if length < 2 or batch_size < 1:
        raise ValueError(f"`length` must be at least 2 and `batch_size` at least 1, got {length} and {batch_size}.")
    check_length(config, length)
    kept = [text for text in texts if len(tokenizer(text, truncation=True, max_length=length)["input_ids"]) > 1]
    if len(kept) < len(texts):
        logger.warning(f"{len(texts) - len(kept)} of {len(texts)} texts have a single token and are left out.")
    if not kept:
        raise ValueError("no text has two tokens: there is nothing to measure.")
    options: dict[str, Any] = {"truncation": True, "max_length": length, "return_tensors": "pt"}
    options["padding"] = tokenizer.pad_token is not None
    if tokenizer.pad_token is None:
        batch_size = 1
    starts = range(0, len(kept), batch_size)
    batches = [dict(tokenizer(kept[start : start + batch_size], **options)) for start in starts]
    check_tokens(tokenizer, batches, config)
    return batches


def check_length(config, length: int) -> None:
    limit = longest(config)
    if limit and length > limit:
        raise ValueError(f"--length {length} is more than the {limit} positions that the model has.")


class UnfitTokenizer(ValueError):
    """A tokenizer that is not the model's, or knows no words."""


def check_tokens(tokenizer: PreTrainedTokenizerBase, batches: Sequence[Batch], config) -> None:
    """Refuse the tokenizer of another model, and the empty one that transformers makes where a checkpoint has none."""
    ids = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in batches])
    if int(ids.max()) >= config.vocab_size:
        raise UnfitTokenizer(
            f"the tokenizer is not that of the model: it gives the id {int(ids.max())}, and the model has ids up to "
            f"{config.vocab_size - 1}."
        )
    unknown = float(torch.isin(ids, torch.tensor(tokenizer.all_special_ids)).float().mean())
    if unknown > 0.5 and len(ids) > 16 * len(batches):
        raise UnfitTokenizer(
            f"the tokenizer knows next to nothing of the text ({unknown:.0%} unknown): either the checkpoint has no "
            "tokenizer, or the text is in another script. Put its tokenizer there, or use --random-inputs."
        )


def random_batches(config, examples: int, length: int, batch_size: int, seed: int) -> list[Batch]:
    """Batches of uniformly random ids, of random images, or of random unit points, whichever the model reads."""
    if examples < 1 or batch_size < 1 or length < 2:
        raise ValueError(f"got {examples} examples of {length} tokens: give at least 1 of at least 2.")
    check_length(config, length)
    random = np.random.default_rng(np.random.SeedSequence([seed, 1]))
    if getattr(config, "image_size", None):
        images = random.standard_normal((examples, config.num_channels, config.image_size, config.image_size))
        everything = {"pixel_values": torch.from_numpy(images).float()}
    elif getattr(config, "input_dim", None):
        points = torch.from_numpy(random.standard_normal((examples, length, config.input_dim))).float()
        everything = {"points": torch.nn.functional.normalize(points, dim=-1)}
    else:
        everything = {"input_ids": torch.from_numpy(random.integers(0, config.vocab_size, (examples, length)))}
    return [
        {name: value[start : start + batch_size] for name, value in everything.items()}
        for start in range(0, examples, batch_size)
    ]


def possible_variants(model: PreTrainedModel) -> tuple[str, ...]:
    """The variants whose ablations the family of a model allows."""
    allowed = family_of(model).edits
    return tuple(name for name, switches in VARIANTS.items() if all(switch in allowed for switch in switches))


def survey(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    variants: Sequence[str] | None = None,
    metrics: Literal["cheap", "full"] = "full",
    progress: Callable[[], object] = lambda: None,
) -> pd.DataFrame:
    """One long table of residuals, attention maps, logits and weights; `progress` is called [`survey_steps`] times.

    Under `torchrun` every process measures its share of the batches and returns the whole table, which is the same for
    any number of processes.
    """
    variants = possible_variants(model) if variants is None else tuple(dict.fromkeys(variants))
    for variant in variants:  # what cannot be is said before anything is measured
        with ablate(model, **VARIANTS[variant]):  # type: ignore[arg-type]
            pass
    spectra = over_processes(lambda batch: measure_logits(model, batch, spectra=True), batches, progress)
    shares = spectra[spectra.metric == "energy_share"]
    shares = shares.groupby(["model", "layer", "head", "component", "metric"], as_index=False).value.mean()
    tokens = [count for batch in batches for count in token_counts(model, batch)]
    parts = {
        "inputs": pd.DataFrame({"example": range(len(tokens)), "metric": "tokens", "value": tokens}),
        "collapse": pd.concat(
            [
                over_processes(
                    lambda batch, variant=variant: measure_collapse(model, batch, [variant]), batches, progress
                )
                for variant in variants
            ]
        ),
        "attention": over_processes(lambda batch: measure_attention(model, batch, metrics), batches, progress),
        "logits": pd.concat([spectra[spectra.metric != "energy_share"], shares]),
    }
    try:
        parts["weights"] = measure_weights(model, spectra=True)
    except PackedWeightsError as error:
        logger.warning(f"no spectra of weights: {error}")
    progress()
    table = pd.concat([part.assign(question=question) for question, part in parts.items()], ignore_index=True)
    table["model"] = model.config.model_type
    table = table.reindex(columns=COLUMNS)
    whole = ("layer", "head", "example", "component")
    return table.astype({**dict.fromkeys(whole, "Int32"), **dict.fromkeys(("question", "variant", "metric"), "str")})


def survey_steps(batches: Sequence[Batch], variants: int) -> int:
    return len(batches) * (variants + 2) + 1


def token_counts(model: PreTrainedModel, batch: Batch) -> list[float]:
    """How many real tokens each example has; for images, patches and the special tokens before them."""
    mask = real_tokens(model, batch)
    if mask is not None:
        return mask.sum(-1).double().tolist()
    first = next(iter(batch.values()))
    if "pixel_values" in batch:
        with torch.no_grad():
            count = base_of(model).get_submodule("embeddings")(first[:1].to(model.device, model.dtype)).shape[1]
    else:
        count = first.shape[1] + (batch["queries"].shape[1] if "queries" in batch else 0)
    return [float(count)] * len(first)


def facts_of(model: PreTrainedModel, name: str, random_init: bool, **more) -> dict[str, Any]:
    """What a reader of the table needs to know of the run; saved in the metadata of the Parquet file."""
    family = family_of(model)
    names = ("hf_rankattn", "torch", "transformers", "numpy", "pandas")
    shown = "/".join(Path(name).resolve().parts[-2:]) if Path(name).exists() else name
    return {
        "name": shown,
        "title": f"{shown}{', random weights' if random_init else ''}",
        "family": family.name,
        "model_type": model.config.model_type,
        "layers": len(layers_of(model)),
        "heads": model.config.num_attention_heads,
        "causal": bool(family.causal(model.config)),
        "random_init": random_init,
        "dtype": str(model.dtype).removeprefix("torch."),
        "precision_floor": precision_floor(model.dtype),
        "parameters": model.num_parameters(),
        "versions": {**{name: version(name) for name in names}, "python": platform.python_version()},
        **more,
    }


def write_survey(table: pd.DataFrame, facts: dict[str, Any], folder: Path) -> list[str]:
    """Write `table.parquet` and the figures to a folder; returns the names of the files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from .report.plots import FIGURES

    arrow = pa.Table.from_pandas(table, preserve_index=False)
    metadata = {**(arrow.schema.metadata or {}), b"hf_rankattn": json.dumps(facts).encode()}
    pq.write_table(arrow.replace_schema_metadata(metadata), folder / "table.parquet")
    for name, draw in FIGURES.items():
        draw(table, facts).savefig(folder / f"{name}.png")
    return sorted(path.name for path in folder.iterdir())


def measure_checkpoint(
    name: str,
    *,
    text: Path | None = None,
    dataset: str | None = None,
    split: str = "test",
    column: str | None = None,
    random_inputs: bool = False,
    examples: int = 32,
    length: int = 128,
    batch_size: int = 8,
    variants: Sequence[str] | None = None,
    metrics: Literal["cheap", "full"] = "full",
    random_init: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    revision: str | None = None,
    device_map: str | None = None,
    offload_folder: str | None = None,
    start_progress: Callable[[int], Callable[[], object]] = lambda total: lambda: None,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of [`survey`] for a checkpoint, and the facts of the run; all arguments are those of `rankattn measure`."""
    if random_inputs and (text is not None or dataset is not None):
        raise ValueError("give a text, a dataset, or random inputs, not several.")
    if metrics not in ("cheap", "full"):
        raise ValueError(f"`metrics` must be 'cheap' or 'full', got {metrics!r}.")
    if unknown := sorted(set(variants or ()) - set(VARIANTS)):
        raise ValueError(f"unknown variants {unknown}; there are {', '.join(VARIANTS)}.")
    transformers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    texts, source = [""], "random inputs"
    if not random_inputs:
        texts, source = read_texts(text, dataset, split, column, examples)
    model = load_checkpoint(name, random_init, dtype, seed, revision, device_map, offload_folder)
    if random_inputs:
        batches = random_batches(model.config, examples, length, batch_size, seed)
    elif getattr(model.config, "vocab_size", None) is None:
        raise ValueError(
            f"{name} reads {model.main_input_name}, not text: use --random-inputs, or measure on your own inputs from Python."
        )
    else:
        batches = text_batches(load_tokenizer(name, revision), texts, model.config, length, batch_size)
    variants = possible_variants(model) if variants is None else tuple(dict.fromkeys(variants))
    table = survey(model, batches, variants, metrics, start_progress(survey_steps(batches, len(variants))))
    facts = facts_of(
        model, name, random_init, source=source, examples=sum(len(next(iter(batch.values()))) for batch in batches),
        metrics=metrics, variants=variants, seed=seed, seconds=round(time.perf_counter() - start, 1),
    )  # fmt: skip
    return table, facts
