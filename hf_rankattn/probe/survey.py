"""The measurements of `rankattn measure`: a checkpoint in, one table out, and the table and its figures in a folder."""

import inspect
import platform
import time
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from ..families.architectures import attending_layers, base_of, family_of, is_causal, layers_of
from ..families.stream import states_of
from ..families.structure import choosing_tower, tower_of, towers_of
from ..files.batches import SOUNDS, Batch, longest, random_batches, text_batches
from ..files.checkpoints import (
    NoTokenizer,
    gguf_options,
    in_one_dtype,
    load_config,
    load_model,
    load_processor,
    load_tokenizer,
    readable,
)
from ..files.media import image_batches, sound_batches
from ..files.running import batches_of, evaluating
from ..files.texts import read_texts
from ..measure.rate import precision_floor
from . import measure_attention, measure_collapse, measure_logits, measure_weights
from .ablate import misfits
from .batches import crosses, first_example, over_processes, real_tokens, run, take_tower
from .collapse import VARIANTS
from .interface import Attended, showing_layers
from .weights import PackedWeightsError


logger = logging.get_logger(__name__)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTH = 128
COLUMNS = ["model", "question", "variant", "layer", "head", "example", "component", "metric", "value"]


def load_checkpoint(
    name: str,
    random_init: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    revision: str | None = None,
    device_map: str | dict | None = None,
    offload_folder: str | None = None,
    tower: str | None = None,
    gguf: str | None = None,
) -> PreTrainedModel:
    """The model below its task head, from safetensors or GGUF only and without remote code; see `rankattn measure --help`.

    Without a `device_map` the model is on the accelerator if there is one. The `tower` is not taken out, see [`take_tower`].
    """
    file = gguf_options(name, gguf)
    config = load_config(name, revision, **file)
    needed = needed_weights(name, config, tower)  # refuses a model that cannot be measured before gigabytes are read
    if random_init:
        torch.manual_seed(seed)
        with readable(name):
            model = in_one_dtype(AutoModel.from_config(config, dtype=DTYPES[dtype]), DTYPES[dtype]).eval()
    else:
        # the pooler is not measured, and if a checkpoint has none, its random weights cannot be offloaded
        known = AutoModel._model_mapping[type(config)]
        classes: tuple[Any, ...] = inspect.getmro(known) if isinstance(known, type) else ()
        options: dict[str, Any] = {"device_map": device_map, "offload_folder": offload_folder, **file}
        if any("add_pooling_layer" in inspect.signature(base.__init__).parameters for base in classes):
            options["add_pooling_layer"] = False
        hint = " To measure random weights, give random_init=True."
        model = load_model(name, config, revision=revision, needed=needed, hint=hint, dtype=DTYPES[dtype], **options)
    if device_map is None and (accelerator := torch.accelerator.current_accelerator()):
        model = model.to(accelerator)
    return model


def needed_weights(name: str, config: Any, tower: str | None) -> Callable[[str], bool]:
    """Which weights a checkpoint must hold: all but those of other towers; a `ValueError` if no tower can be measured."""
    if family_of(config).layers:
        if tower is not None:
            raise ValueError(f"a model of type {config.model_type} has one tower: leave out --tower, got {tower!r}.")
        return lambda key: True
    with readable(name), torch.device("meta"):
        empty = AutoModel.from_config(config)
    with choosing_tower(tower):
        chosen = tower_of(base_of(empty))
    if crosses(chosen):  # it reads the states of another tower
        return lambda key: True
    own = chosen.path.split(".")[0]
    others = {found.path.split(".")[0] for found in towers_of(base_of(empty))} - {own}
    return lambda key: key.split(".")[0] not in others


def impossible_variants(model: PreTrainedModel, batch: Batch) -> dict[str, str]:
    """The variants that cannot be measured, and why, from one run on the first example of a batch."""
    batch = next(batches_of(base_of(model), batch))
    if not (found := misfits(model, batch)):
        return {}
    layer, reason = next(iter(found.items()))
    reason = f"no parts can be removed from layer {layer} of {model.config.model_type}: {reason}"
    return {name: reason for name, switches in VARIANTS.items() if switches}


def impossible_questions(model: PreTrainedModel, batch: Batch, tower: str | None = None) -> dict[str, str]:
    """The questions that a model without a row in the table of architectures cannot answer, and why."""
    if family_of(model).layers:
        return {}
    one = first_example({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
    where: dict[str, Any] = {"tower": tower}
    trials: dict[str, Callable[[], object]] = {
        "attention": lambda: measure_attention(model, one, **where),
        "logits": lambda: measure_logits(model, one, **where),
        "weights": lambda: measure_weights(model, inputs=one, **where),
    }
    reasons = {}
    for question, trial in trials.items():
        try:
            trial()
        except ValueError as error:
            if "NaN or Inf" in str(error):
                raise
            reasons[question] = str(error).rstrip(".")
    return reasons


def looks_back_only(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether no token of the first example attends to a later one: models make masks that attention modules do not know."""
    found: list[bool] = []

    def look(layer: int, seen: Attended) -> None:
        found.append(seen.maps is not None and not bool(seen.maps.triu(1).any()))

    with evaluating(base_of(model)), showing_layers(model, look, "eager"):
        run(model, first_example(next(batches_of(base_of(model), batch))))
    return bool(found) and all(found)


def possible_variants(model: PreTrainedModel, batch: Batch) -> tuple[str, ...]:
    impossible = impossible_variants(model, batch)
    return tuple(name for name in VARIANTS if name not in impossible)


def survey(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    variants: Sequence[str] | None = None,
    metrics: Literal["cheap", "full"] = "full",
    progress: Callable[[], object] = lambda: None,
    tower: str | None = None,
    without: Collection[str] = (),
) -> pd.DataFrame:
    """One long table of residuals, attention maps, logits and weights; `progress` is called [`survey_steps`] times.

    `tower` is as in [`measure_collapse`], and `without` names the questions to leave out. Under `torchrun` every process
    measures its share of the batches and returns the whole table, which is the same for any number of processes.
    """
    with choosing_tower(tower):
        variants = possible_variants(model, batches[0]) if variants is None else tuple(dict.fromkeys(variants))
        tokens = [count for batch in batches for count in token_counts(model, batch)]
    where: dict[str, Any] = {} if tower is None else {"tower": tower}

    def collapse(variant: str) -> pd.DataFrame:
        return over_processes(lambda batch: measure_collapse(model, batch, [variant], **where), batches, progress)

    parts = {"inputs": pd.DataFrame({"example": range(len(tokens)), "metric": "tokens", "value": tokens})}
    if "logits" not in without:
        spectra = over_processes(lambda batch: measure_logits(model, batch, spectra=True, **where), batches, progress)
        shares = spectra[spectra.metric == "energy_share"]
        shares = shares.groupby(["model", "layer", "head", "component", "metric"], as_index=False).value.mean()
    parts["collapse"] = pd.concat([collapse(variant) for variant in variants])
    if "attention" not in without:
        parts["attention"] = over_processes(
            lambda batch: measure_attention(model, batch, metrics, **where), batches, progress
        )
    if "logits" not in without:
        parts["logits"] = pd.concat([spectra[spectra.metric != "energy_share"], shares])
    try:
        if "weights" not in without:
            parts["weights"] = measure_weights(model, spectra=True, inputs=batches[0], **where)
    except PackedWeightsError as error:
        logger.warning(f"no spectra of weights: {error}")
    progress()
    table = pd.concat([part.assign(question=question) for question, part in parts.items()], ignore_index=True)
    table["model"] = model.config.model_type
    table = table.reindex(columns=COLUMNS)
    whole = ("layer", "head", "example", "component")
    return table.astype({**dict.fromkeys(whole, "Int32"), **dict.fromkeys(("question", "variant", "metric"), "str")})


def survey_steps(batches: Sequence[Batch], variants: int, without: Collection[str] = ()) -> int:
    return len(batches) * (variants + 2 - len({"attention", "logits"} & set(without))) + 1


def token_counts(model: PreTrainedModel, batch: Batch) -> list[float]:
    """The number of real tokens of each example; for images and sounds, the number of states that the layers get."""
    mask = real_tokens(model, batch)
    if mask is not None:
        return mask.sum(-1).double().tolist()
    first = next(iter(batch.values()))
    if names := {"input_ids", "points"} & set(batch):
        name = names.pop()
        count = batch[name].shape[1] + (batch["queries"].shape[1] if "queries" in batch else 0)
    else:
        states = states_of_first_layer(model, batch)
        count = states.shape[:-1].numel() // (1 if states.ndim == 2 else len(states))
    return [float(count)] * len(first)


def states_of_first_layer(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    found: list[torch.Tensor] = []
    hook = layers_of(model)[0].register_forward_pre_hook(
        lambda module, args, kwargs: found.append(states_of(args, kwargs)), with_kwargs=True
    )
    with hook, evaluating(base_of(model)):
        run(model, first_example(next(batches_of(base_of(model), batch))))
    return found[0]


def facts_of(
    model: PreTrainedModel,
    name: str,
    random_init: bool,
    table: pd.DataFrame | None = None,
    tower: str | None = None,
    **more,
) -> dict[str, Any]:
    """Facts about the run, which are saved in the metadata of the Parquet file."""
    names = ("hf_rankattn", "torch", "transformers", "numpy", "pandas")
    shown = "/".join(Path(name).resolve().parts[-2:]) if Path(name).exists() else name
    heads = pd.NA if table is None else table["head"].max()
    layers = len(layers_of(model))
    without_attention = sorted(set(range(layers)) - set(attending_layers(model)))
    kind = f", {tower}" if tower else ""
    return {
        "name": shown,
        "title": f"{shown}{kind}{', random weights' if random_init else ''}",
        "model_type": model.config.model_type,
        "layers": layers,
        "heads": getattr(model.config, "num_attention_heads", 0) if pd.isna(heads) else int(heads) + 1,
        "causal": is_causal(model),
        "random_init": random_init,
        "dtype": str(model.dtype).removeprefix("torch."),
        "precision_floor": precision_floor(model.dtype),
        "parameters": model.num_parameters(),
        "versions": {**{name: version(name) for name in names}, "python": platform.python_version()},
        **({"tower": tower} if tower else {}),
        **({"without_attention": without_attention} if without_attention else {}),
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
    length: int | None = None,
    batch_size: int = 8,
    variants: Sequence[str] | None = None,
    metrics: Literal["cheap", "full"] = "full",
    random_init: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    revision: str | None = None,
    device_map: str | None = None,
    offload_folder: str | None = None,
    tower: str | None = None,
    gguf: str | None = None,
    start_progress: Callable[[int], Callable[[], object]] = lambda total: lambda: None,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of [`survey`] for a checkpoint, and the facts of the run; all arguments are those of `rankattn measure`."""
    if random_inputs and (text is not None or dataset is not None):
        raise ValueError("give a text, a dataset, or random inputs, not several.")
    if text is not None and dataset is not None:
        raise ValueError("give a text file or a dataset, not both.")
    if unknown := sorted(set(variants or ()) - set(VARIANTS)):
        raise ValueError(f"unknown variants {unknown}; there are {', '.join(VARIANTS)}.")
    transformers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    model = load_checkpoint(name, random_init, dtype, seed, revision, device_map, offload_folder, tower, gguf)
    model, inside = take_tower(model, tower)
    if length is None:
        length = min(LENGTH, longest(model.config) or LENGTH)
    if random_inputs:
        batches, source = random_batches(model.config, examples, length, batch_size, seed), "random inputs"
    elif reads(model) == "input_ids":
        texts, source = read_texts(text, dataset, split, column, examples)
        try:
            tokenizer = load_tokenizer(name, revision, **gguf_options(name, gguf))
        except NoTokenizer as error:
            raise ValueError(f"{error} Or give random_inputs=True.") from error
        batches = text_batches(tokenizer, texts, model.config, length, batch_size)
    else:
        batches = media_batches(model, name, revision, inside, dataset, (split, column, examples), length, batch_size)
        source = f"{'sounds' if reads(model) in SOUNDS else 'images'} in {Path(str(dataset)).name}"
    with choosing_tower(inside):
        not_measured = impossible_variants(model, batches[0]) if variants is None else {}
        not_measured |= impossible_questions(model, batches[0], inside)
        variants = tuple(dict.fromkeys(variants or (name for name in VARIANTS if name not in not_measured)))
        progress = start_progress(survey_steps(batches, len(variants), not_measured))
        table = survey(model, batches, variants, metrics, progress, inside, not_measured)
        unlisted = not family_of(model).layers and "attention" not in not_measured
        facts = facts_of(
            model,
            name,
            random_init,
            table,
            tower,
            causal=is_causal(model) or (unlisted and looks_back_only(model, batches[0])),
            source=source,
            examples=sum(len(next(iter(batch.values()))) for batch in batches),
            metrics=metrics,
            variants=variants,
            not_measured=not_measured,
            seed=seed,
            seconds=round(time.perf_counter() - start, 1),
        )
    return table, facts


def media_batches(
    model: PreTrainedModel,
    name: str,
    revision: str | None,
    inside: str | None,
    dataset: str | None,
    chosen: tuple[str, str | None, int],  # split, column, examples
    length: int,
    batch_size: int,
) -> list[Batch]:
    """Batches of images or sounds for a model that does not read text."""
    sounds = reads(model) in SOUNDS
    if dataset is None or not (sounds or reads(model) == "pixel_values"):
        what = "sounds (.wav)" if sounds else "images"
        folder = f", or a folder of {what} as `dataset`" if sounds or reads(model) == "pixel_values" else ""
        raise ValueError(f"{name} reads {reads(model)}, not text: give random_inputs=True{folder}.")
    if inside is not None:
        raise ValueError(f"the {inside} of {name} reads words besides {reads(model)}: give random_inputs=True.")
    try:
        processor = load_processor(name, sounds, revision)
    except NoTokenizer as error:
        raise ValueError(f"{error} Or give random_inputs=True.") from error
    if sounds:
        return sound_batches(processor, model.config, dataset, *chosen, length, batch_size)
    return image_batches(processor, dataset, *chosen, batch_size)


def reads(model: PreTrainedModel) -> str:
    """The input of a model that the others follow from: ids, points, pixels or a sound."""
    if getattr(model.config, "input_dim", None):
        return "points"
    return model.main_input_name


def measure_checkpoints(names: Sequence[str], **options) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """[`measure_checkpoint`] for each of several, as one table whose first column names the checkpoint."""
    if len(set(names)) < len(names):
        raise ValueError(f"each checkpoint must be given once, got {', '.join(names)}.")
    for name in names:  # refuse the last checkpoint before the first one is measured
        file = gguf_options(name, options.get("gguf"))
        needed_weights(name, load_config(name, options.get("revision"), **file), options.get("tower"))
    measured = [measure_checkpoint(name, **options) for name in names]
    shown = [facts["name"].split("/")[-1] for _, facts in measured]
    for entries in (shown, [facts["name"] for _, facts in measured], list(names)):
        if len(set(entries)) == len(entries):
            shown = entries
            break
    for label, (table, facts) in zip(shown, measured, strict=True):
        table.insert(0, "checkpoint", label)
        facts["checkpoint"] = label
    return pd.concat([table for table, _ in measured], ignore_index=True), [facts for _, facts in measured]
