"""The work of `rankattn convert`: from a checkpoint to a folder, or to a curve of quality against rank."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from ..families.slots import entries_of, family_of_type
from ..files.atomic import fresh_folder
from ..files.batches import BATCH, EndlessBatches, UnfitTokenizer, check_tokens, longest, main_input, random_batches
from ..files.batches import padded_batches as text_batches
from ..files.checkpoints import (
    NoTokenizer,
    load_config,
    load_model,
    load_processor,
    load_tokenizer,
    named_class,
    one_line,
    readable,
    refuse_adapter,
    weight_files,
)
from ..files.companions import checkpoint_folder, copy_companions, module_list, pooling_of, repository_of
from ..files.media import image_batches, sound_batches
from ..files.texts import calibration_text, file_text, package_text, without_overlap
from ..hub.cards import model_card, pipeline_of
from ..hub.sharing import MODEL_FOLDER, add_source, card_of, check_exportable
from ..models.rank_attention import HeadGeometry
from . import convert_model, convert_shards
from .calibration import with_decoder_texts
from .damage import POOLINGS, Judge, latency
from .labelled import labelled_texts
from .outcome import Judged, Outcome, results_of, story
from .shards import FLOATS, read_header, shard_files


logger = logging.get_logger(__name__)
Progress = Callable[[int, int], Any]
PACKAGE, NONE = "package", "none"
JUDGED = slice(40, 80)
LONGEST_TEXT = 256
LONGEST_DISTILLED = 128
MOST_DISTILLED = 50_000
NARROW_HEADS = 32
MOST_CALIBRATED = 64
JUDGING_TEXT = "40 paragraphs of the text in hf_rankattn"


def read_texts(file: str | Path) -> list[str]:
    """The paragraphs of a UTF-8 file, or its lines if no line is empty; `"package"` is the package's own text."""
    if str(file) == PACKAGE:
        return calibration_text()
    texts = file_text(file)
    if not texts:
        raise ValueError(f"{file} holds no text: calibration needs paragraphs with an empty line between them.")
    return texts


def distilled_texts(file: str | Path, judged: Sequence[Any]) -> list[str]:
    """The texts of a file for distillation: at most `MOST_DISTILLED`, without those that overlap with a judging text.

    What lies behind the tokens that are read is dropped, to bound memory.
    """
    texts = [text[: 16 * LONGEST_DISTILLED] for text in read_texts(file)]
    if len(texts) > MOST_DISTILLED:
        logger.warning(f"distillation reads the first {MOST_DISTILLED:,} of the {len(texts):,} texts of {file}.")
    parts = [part for text in judged for part in ([text] if isinstance(text, str) else text)]
    kept = without_overlap(texts[:MOST_DISTILLED], parts)
    if not kept:
        raise ValueError(f"all texts of {file} overlap with the texts that judge the model: give others.")
    return kept


def batches_to_distil(tokenizer, model: PreTrainedModel, texts: Sequence[str], seed: int) -> EndlessBatches:
    limit = token_limit(model, LONGEST_DISTILLED)
    return EndlessBatches(tokenizer, texts, limit, seed, BATCH, partial(with_decoder_texts, model))


def load(name: str) -> PreTrainedModel:
    """The model with the class that its config names, or AutoModel. Only the weights of a pooler may be missing."""
    config = load_config(name)
    family_of_type(config.model_type, name)
    return load_model(
        name, config, named_class(config) or AutoModel, needed=lambda key: "pooler" not in key, say_unused=True
    )


def token_limit(model: PreTrainedModel, most: int = LONGEST_TEXT) -> int:
    """The number of tokens of a text that are read: `most`, or the number of positions of the model."""
    return min(most, longest(model.config) or most)


def own_ranks(config) -> list[int]:
    """The query-key rank that the heads of each layer (ALBERT: of each group) have."""
    family = family_of_type(config.model_type, type(config).__name__)
    if family.stock_width is not None:
        return [getattr(config, family.stock_width, None) or config.hidden_size // config.num_attention_heads]
    layers = entries_of(config, family)
    if not hasattr(config, "head_geometry"):
        return [config.hidden_size // config.num_attention_heads] * len(layers)
    return [config.head_geometry(sum(layers[:entry])).qk_rank for entry in range(len(layers))]


def default_objective(config, calibrated: bool = True) -> str:
    """`"attention"`, which loses less, for heads of at most 32 dimensions without position terms in the logits; else `"logits"`.

    The cost of `"attention"` grows with the fourth power of the width: minutes for heads of 64 dimensions.
    """
    family = family_of_type(config.model_type, type(config).__name__)
    narrow = max(own_ranks(config)) <= NARROW_HEADS
    return "attention" if calibrated and narrow and family.positions is None else "logits"


def calibration_batches(tokenizer, model: PreTrainedModel, source: str, calibration: str):
    """Batches of the calibration texts or images; an error says how to convert without them."""
    if main_input(model.config) != "input_ids":
        return media_batches(model, source, calibration, "train", None, MOST_CALIBRATED)
    try:
        batches = text_batches(tokenizer, read_texts(calibration), token_limit(model))
        check_tokens(tokenizer, batches, model.config)
    except UnfitTokenizer as error:
        raise ValueError(
            f"{source} cannot be calibrated on {calibration}: {error} Or convert from the weights alone with "
            f"calibration='{NONE}'."
        ) from error
    return [with_decoder_texts(model, batch) for batch in batches]


def media_batches(
    model: PreTrainedModel, source: str, data: str, split: str, column: str | None, most: int
) -> list[dict[str, torch.Tensor]]:
    """Batches of the first images or sounds of a folder or a dataset, as the processor of the checkpoint prepares them."""
    if data == PACKAGE:
        kind = "images" if main_input(model.config) == "pixel_values" else "sounds"
        raise ValueError(
            f"{source} reads {kind}, and the package has texts only: give a folder of {kind} as `calibration`, or convert from "
            f"the weights alone with calibration='{NONE}'."
        )
    chosen = (data, split, column, most)
    if main_input(model.config) == "pixel_values":
        return image_batches(load_processor(source), *chosen)
    return sound_batches(load_processor(source, sounds=True), model.config, *chosen, token_limit(model))


@contextmanager
def writing(out: str | Path) -> Iterator[None]:
    """Turn a failure to write weights, for example on a full disk, into an `OSError`, as for other files."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{out} cannot be written: {one_line(error)}") from error


def convert_checkpoint(
    source: str,
    out: str | Path | None,
    *,
    qk_rank=None,
    v_head_dim=None,
    calibration: str | None = None,
    energy: float | None = None,
    mean_rank: float | None = None,
    ranks: str = "spectra",
    objective: str | None = None,
    distil_steps: int = 0,
    distil_text: str | None = None,
    stream: bool = False,
    base_model: str | None = None,
    remote_code: bool = False,
    dataset: str | None = None,
    split: str = "test",
    column: str | None = None,
    label_column: str | None = None,
    examples: int = 200,
    overwrite: bool = False,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Outcome:
    """Convert the checkpoint `source` and write it to `out` with a card and the files beside its weights, atomically.

    `calibration` is a file of texts, `"package"` (the default) for texts that come with the package, or `"none"`
    for the weights alone. `distil_text` is a file of texts for distillation, which otherwise trains on those of calibration.
    `objective` is chosen by [`default_objective`] if it is None. The damage is measured on 40 other paragraphs, or on `dataset`,
    with its labels if it has some. For a model of images, `calibration` and `dataset` are folders of images.
    With `stream`, the weights alone are converted layer by layer, and no model is run.
    """
    if out is None:
        raise ValueError("give `out`, the folder to write to.")
    if qk_rank is None and v_head_dim is None:
        raise ValueError("no width is given: give `qk_rank`, `v_head_dim` or both, or 'auto' for one width per layer.")
    if Path(out).resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise ValueError(f"`out` is {out}, which holds the source {source}: choose another folder.")
    base_model = base_model or repository_of(source)
    transformers.utils.logging.disable_progress_bar()
    request = {"energy": energy, "mean_rank": mean_rank, "seed": seed, "progress": progress}
    if stream:
        needs_model = (objective, distil_text, distil_steps or None, dataset, remote_code or None)
        if calibration not in (None, NONE) or ranks != "spectra" or any(option is not None for option in needs_model):
            raise ValueError(
                "stream=True converts the weights alone and runs no model: leave `calibration`, `ranks`, `objective`, "
                "`distil_steps`, `distil_text`, `dataset` and `remote_code` out."
            )
        widths = {"qk_rank": qk_rank, "v_head_dim": v_head_dim}
        return convert_streamed(Path(source), Path(out), base_model, overwrite, {**widths, **request})
    calibration = calibration or PACKAGE
    check_distil_text(distil_text, distil_steps)
    if calibration == NONE and (objective == "attention" or distil_steps):
        raise ValueError(f"objective='attention' and `distil_steps` need texts: leave calibration='{NONE}' out.")
    # the folder is made before the work, so that an output that cannot be written is refused at once
    with fresh_folder(out, overwrite, **MODEL_FOLDER) as staging:
        texts = read_texts(calibration) if calibration != NONE and not Path(calibration).is_dir() else []
        model = load(source)
        with readable(source):
            folder = checkpoint_folder(source, getattr(model.config, "_commit_hash", None))
        bytes_before = stored_bytes(folder, getattr(model.config, "transformers_weights", None))
        tokenizer, of_texts = None, main_input(model.config) == "input_ids"
        try:
            tokenizer = load_tokenizer(folder, padding_side=None) if of_texts else None
        except NoTokenizer as error:
            if texts:
                hint = f"Or convert from the weights alone with calibration='{NONE}'."
                raise ValueError(f"{error} {hint}") from error
            if dataset is not None:
                raise
        if distil_text is not None and not of_texts:
            raise ValueError(
                f"{source} reads no texts: leave `distil_text` out, to distil on the inputs of `calibration`."
            )
        if of_texts and calibration != NONE and not texts:
            raise ValueError(f"{source} reads texts, and {calibration} is a folder: give a file of paragraphs.")
        if calibration != NONE:
            calibrating = calibration_batches(tokenizer, model, source, calibration)
            request["calibration"] = calibrating
        judged = read_judged(model, source, dataset, split, column, label_column, examples)
        objective = objective or default_objective(model.config, calibration != NONE)
        fit: dict[str, Any] = {"objective": objective, "distil_steps": distil_steps, "ranks": ranks, **request}
        if distil_text is not None:
            trained = distilled_texts(distil_text, judged.texts)
            fit["distil_batches"] = batches_to_distil(tokenizer, model, trained, seed)
        # before the conversion, so that texts or labels that cannot be used are refused at once
        judge = (
            make_judge(model, tokenizer, judged, pooling_of(folder)) if tokenizer is not None or judged.media else None
        )
        converted, layers = convert_model(model, qk_rank, v_head_dim, **fit)
        stock = not hasattr(converted.config, "head_geometry")
        if stock and remote_code:
            raise ValueError(
                f"the result is a stock {type(converted).__name__}, which needs no source: leave `remote_code` out."
            )
        if not stock:
            check_exportable(converted, remote_code)
        with writing(out):
            copy_companions(folder, staging)
            converted.save_pretrained(staging, max_shard_size="50GB")
        drop_auto_map(staging)
        if remote_code:
            add_source(converted, staging)
        outcome = Outcome(
            layers=layers,
            objective=objective,
            parameters_before=model.num_parameters(),
            parameters_after=converted.num_parameters(),
            weight_bytes_before=bytes_before,
            weight_bytes_after=stored_bytes(staging),
            latency=latency(model, converted, random_batch(model) if judge is None else judge.task.batches[0]),
            base_model=base_model,
            load=how_to_load(folder, remote_code, stock),
            folder=str(Path(out).resolve()),
            can_weigh=family_of_type(model.config.model_type, source).positions is None,
            not_judged="no tokenizer of the checkpoint can read texts"
            if of_texts
            else "give inputs to judge on with --dataset FOLDER",
        )
        if calibration != NONE:
            name = "the package" if calibration == PACKAGE else Path(calibration).name
            count = len(texts) or sum(len(next(iter(batch.values()))) for batch in calibrating)
            outcome.calibrated_on = f"{count} {'texts' if texts else 'inputs'} of {name}"
        if distil_steps:
            few = outcome.calibrated_on
            outcome.distilled_on = f"{len(trained):,} texts of {Path(distil_text).name}" if distil_text else few
        if judge is not None:
            outcome.damage = judge.damage(converted)
            outcome.judged_on = f"{judged.source}, {judged.split}"
            parts = (part for text in judged.texts for part in ([text] if isinstance(text, str) else text))
            outcome.judged_texts_seen = len({" ".join(part.split()) for part in parts} & set(texts))
            if judged.media and calibration == dataset:
                outcome.judged_texts_seen = min(
                    MOST_CALIBRATED, sum(len(next(iter(b.values()))) for b in judged.media)
                )
        card = card_of(
            converted,
            Path(out).resolve().name,
            base_model=base_model,
            how=story(outcome, source, distil_steps, seed),
            results=results_of(outcome, hub_task(folder, type(converted).__name__), judged),
            remote_code=remote_code,
            sentence_transformers=bool(module_list(folder)),
            stock_heads=stock_heads(converted, layers[0].rank) if stock else None,
        )
        card.save(staging / "README.md")
    return outcome


def stock_heads(model: PreTrainedModel, width: int) -> HeadGeometry:
    """The heads of a stock model that was cut, for its card."""
    scale = family_of_type(model.config.model_type, type(model).__name__).default_scale(width)
    return HeadGeometry(model.config.num_attention_heads, width, width, False, scale)


def check_distil_text(distil_text: str | None, distil_steps: int) -> None:
    if distil_text is not None and not distil_steps:
        raise ValueError("`distil_text` is read by distillation: give `distil_steps` as well.")


def read_judged(model, source: str, dataset: str | None, split: str, column, label_column, examples: int) -> Judged:
    if dataset is None:
        if column is not None or label_column is not None:
            raise ValueError("`column` and `label_column` are columns of a dataset: give `dataset` as well.")
        return Judged(package_text()[JUDGED], None, JUDGING_TEXT, "hf_rankattn-text", "not used in calibration")
    local = Path(dataset).exists()
    name = Path(dataset).resolve().name if local else dataset
    if (wanted := main_input(model.config)) != "input_ids":
        batches = media_batches(model, source, dataset, split, column, examples)
        count, kind = sum(len(batch[wanted]) for batch in batches), "images" if wanted == "pixel_values" else "sounds"
        return Judged([], None, f"{count} {kind} of {name}", "local" if local else dataset, split, batches)
    texts, labels = labelled_texts(model, dataset, split, column, label_column, examples)
    return Judged(texts, labels, f"{len(texts)} rows of {name}", "local" if local else dataset, split)


def make_judge(model: PreTrainedModel, tokenizer, judged: Judged, pooling: str) -> Judge | None:
    if pooling not in POOLINGS:
        logger.warning(f"the checkpoint pools by {pooling!r}; the damage is measured with the mean of the tokens.")
    try:
        return Judge(model, tokenizer, judged.media or judged.texts, token_limit(model), judged.labels, pooling)
    except UnfitTokenizer as error:
        logger.warning(f"the damage was not measured: {error}")
        return None


def random_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Random inputs, for the latency of a model that is not judged."""
    if type(model).__name__.endswith("ForMultipleChoice"):
        ids = random_batches(model.config, 8, token_limit(model, 128), 8, 0)[0]["input_ids"]
        return {"input_ids": ids.view(4, 2, -1)}
    return random_batches(model.config, 8, token_limit(model, 128), 8, 0)[0]


def stored_bytes(folder: Path, chosen: str | None = None) -> int:
    """The size of the weight files of a checkpoint; its config can name the file (`chosen`)."""
    return sum(Path(file).stat().st_size for file in weight_files(folder, chosen))


def stored_parameters(folder: Path) -> int:
    """The number of weights in the files of a checkpoint; integers are buffers."""
    stored = [tensor for file in shard_files(folder) for tensor in read_header(file)]
    return sum(math.prod(tensor.shape) for tensor in stored if tensor.dtype in FLOATS)


def drop_auto_map(folder: Path) -> None:
    """Remove the names of the source's own classes from a config: their files are not copied."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.pop("auto_map", None) is not None:
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def hub_task(folder: Path, model_class: str) -> str:
    """The Hub's name for the task of a checkpoint."""
    return "sentence-similarity" if module_list(folder) else pipeline_of(model_class) or "feature-extraction"


def how_to_load(folder: Path, remote_code: bool, stock: bool = False) -> str:
    loader = "SentenceTransformer" if module_list(folder) else "from_pretrained"
    if stock:
        return f"{loader}, without this package: it is a stock checkpoint."
    line = f"`import hf_rankattn` before {loader}: the import registers the model type with transformers"
    if remote_code:
        line += ". Without the package, trust_remote_code=True loads the source files in the folder; read them first"
    return line + "."


def convert_streamed(source: Path, out: Path, base_model: str | None, overwrite: bool, request: dict) -> Outcome:
    refuse_adapter(source)
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} is not a folder with a config.json: only local checkpoints can be streamed.")
    with fresh_folder(out, overwrite, **MODEL_FOLDER) as staging:
        with readable(source, also_writes=True), writing(out):
            config, layers = convert_shards(source, staging, **request)
        copy_companions(source, staging)
        drop_auto_map(staging)
        outcome = Outcome(
            layers=layers,
            parameters_before=stored_parameters(source),
            parameters_after=stored_parameters(staging),
            weight_bytes_before=stored_bytes(source),
            weight_bytes_after=stored_bytes(staging),
            base_model=base_model,
            load=how_to_load(source, remote_code=False),
            folder=str(out.resolve()),
            not_judged="a streamed conversion runs no model",
        )
        model_class = (config.architectures or [f"{type(config).__name__.removesuffix('Config')}Model"])[0]
        card = model_card(
            config,
            model_class=model_class,
            repo_id=out.resolve().name,
            base_model=base_model,
            how=story(outcome, str(source), 0, request["seed"]),
            results=results_of(outcome, hub_task(source, model_class), None),
            sentence_transformers=bool(module_list(source)),
        )
        card.save(staging / "README.md")
    return outcome
