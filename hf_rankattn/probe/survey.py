"""The measurements of `rankattn measure`: a checkpoint in, one table out, and the table and its figures in a folder."""

import inspect
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from ..families.architectures import base_of, family_of, layers_of
from ..files.batches import Batch, random_batches, text_batches
from ..files.checkpoints import NoTokenizer, in_one_dtype, load_config, load_model, load_tokenizer, readable
from ..files.running import batches_of
from ..files.texts import read_texts
from ..measure.rate import precision_floor
from . import measure_attention, measure_collapse, measure_logits, measure_weights
from .ablate import misfits
from .batches import over_processes, real_tokens
from .collapse import VARIANTS
from .weights import PackedWeightsError


logger = logging.get_logger(__name__)
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
    """The model below its task head, from safetensors only and without remote code; see `rankattn measure --help`.

    Without a `device_map` the model is on the accelerator if there is one.
    """
    config = load_config(name, revision)
    family_of(config)  # refuse an unknown family before gigabytes are read
    if random_init:
        torch.manual_seed(seed)
        with readable(name):
            model = in_one_dtype(AutoModel.from_config(config, dtype=DTYPES[dtype]), DTYPES[dtype]).eval()
    else:
        # the pooler is not measured, and if a checkpoint has none, its random weights cannot be offloaded
        classes = inspect.getmro(AutoModel._model_mapping[type(config)])  # type: ignore[arg-type]
        options: dict[str, Any] = {"device_map": device_map, "offload_folder": offload_folder}
        if any("add_pooling_layer" in inspect.signature(base.__init__).parameters for base in classes):
            options["add_pooling_layer"] = False
        hint = " To measure random weights, give random_init=True."
        model = load_model(name, config, revision=revision, hint=hint, dtype=DTYPES[dtype], **options)
    if device_map is None and (accelerator := torch.accelerator.current_accelerator()):
        model = model.to(accelerator)
    return model


def impossible_variants(model: PreTrainedModel, batch: Batch) -> dict[str, str]:
    """The variants that cannot be measured, and why, from one run on the first example of a batch."""
    batch = next(batches_of(base_of(model), batch))
    if not (found := misfits(model, batch)):
        return {}
    layer, reason = next(iter(found.items()))
    reason = f"no parts can be removed from layer {layer} of {model.config.model_type}: {reason}"
    return {name: reason for name, switches in VARIANTS.items() if switches}


def possible_variants(model: PreTrainedModel, batch: Batch) -> tuple[str, ...]:
    impossible = impossible_variants(model, batch)
    return tuple(name for name in VARIANTS if name not in impossible)


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
    variants = possible_variants(model, batches[0]) if variants is None else tuple(dict.fromkeys(variants))

    def collapse(variant: str) -> pd.DataFrame:
        return over_processes(lambda batch: measure_collapse(model, batch, [variant]), batches, progress)

    spectra = over_processes(lambda batch: measure_logits(model, batch, spectra=True), batches, progress)
    shares = spectra[spectra.metric == "energy_share"]
    shares = shares.groupby(["model", "layer", "head", "component", "metric"], as_index=False).value.mean()
    tokens = [count for batch in batches for count in token_counts(model, batch)]
    parts = {
        "inputs": pd.DataFrame({"example": range(len(tokens)), "metric": "tokens", "value": tokens}),
        "collapse": pd.concat([collapse(variant) for variant in variants]),
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
    """The number of real tokens of each example; for images, the number of patches and special tokens."""
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
    """Facts about the run, which are saved in the metadata of the Parquet file."""
    family = family_of(model)
    names = ("hf_rankattn", "torch", "transformers", "numpy", "pandas")
    shown = "/".join(Path(name).resolve().parts[-2:]) if Path(name).exists() else name
    return {
        "name": shown,
        "title": f"{shown}{', random weights' if random_init else ''}",
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
        raise ValueError(f"{name} reads {model.main_input_name}, not text: give random_inputs=True.")
    else:
        try:
            tokenizer = load_tokenizer(name, revision)
        except NoTokenizer as error:
            raise ValueError(f"{error} Or give random_inputs=True.") from error
        batches = text_batches(tokenizer, texts, model.config, length, batch_size)
    not_measured = impossible_variants(model, batches[0]) if variants is None else {}
    variants = tuple(dict.fromkeys(variants or (name for name in VARIANTS if name not in not_measured)))
    table = survey(model, batches, variants, metrics, start_progress(survey_steps(batches, len(variants))))
    facts = facts_of(
        model,
        name,
        random_init,
        source=source,
        examples=sum(len(next(iter(batch.values()))) for batch in batches),
        metrics=metrics,
        variants=variants,
        not_measured=not_measured,
        seed=seed,
        seconds=round(time.perf_counter() - start, 1),
    )
    return table, facts
