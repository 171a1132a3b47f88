"""The work of `rankattn convert`: from a checkpoint to a folder, or to a curve of quality against rank."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging

from .. import models
from ..families.slots import entries_of, family_of_type
from ..files.atomic import fresh_folder, staged
from ..files.batches import UnfitTokenizer, check_tokens, longest
from ..files.batches import padded_batches as text_batches
from ..files.checkpoints import (
    NoTokenizer,
    load_config,
    load_model,
    load_tokenizer,
    one_line,
    readable,
    refuse_adapter,
    weight_files,
)
from ..files.companions import checkpoint_folder, copy_companions, module_list, pooling_of, repository_of
from ..files.texts import calibration_text, file_text, package_text
from ..hub.cards import model_card, pipeline_of
from ..hub.sharing import MODEL_FOLDER, add_source, card_of, check_exportable
from . import convert_model, convert_shards
from .damage import POOLINGS, Judge, describe, latency
from .labelled import labelled_texts
from .outcome import Judged, Outcome, results_of, story
from .shards import FLOATS, read_header, shard_files


logger = logging.get_logger(__name__)
Progress = Callable[[int, int], Any]
PACKAGE, NONE = "package", "none"
JUDGED = slice(40, 80)
LONGEST_TEXT = 256
NARROW_HEADS = 32
JUDGING_TEXT = "40 paragraphs of the text in hf_rankattn"


def read_texts(file: str | Path) -> list[str]:
    """The paragraphs of a UTF-8 file, or its lines if no line is empty; `"package"` is the package's own text."""
    if str(file) == PACKAGE:
        return calibration_text()
    texts = file_text(file)
    if not texts:
        raise ValueError(f"{file} holds no text: calibration needs paragraphs with an empty line between them.")
    return texts


def load(name: str) -> PreTrainedModel:
    """The model with the class that its config names, or AutoModel. Only the weights of a pooler may be missing."""
    config = load_config(name)
    family_of_type(config.model_type, name)
    named = str(config.architectures[0]) if config.architectures else ""
    kinds: list[Any] = [getattr(module, named, None) for module in (models, transformers)]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, PreTrainedModel)]
    kind = next((kind for kind in kinds if kind.config_class is type(config)), AutoModel)
    return load_model(name, config, kind, needed=lambda key: "pooler" not in key, say_unused=True)


def token_limit(model: PreTrainedModel, most: int = LONGEST_TEXT) -> int:
    """The number of tokens of a text that are read: `most`, or the number of positions of the model."""
    return min(most, longest(model.config) or most)


def own_ranks(config) -> list[int]:
    """The query-key rank that the heads of each layer (ALBERT: of each group) have."""
    layers = entries_of(config, family_of_type(config.model_type, type(config).__name__))
    if not hasattr(config, "head_geometry"):
        return [config.hidden_size // config.num_attention_heads] * len(layers)
    return [config.head_geometry(sum(layers[:entry])).qk_rank for entry in range(len(layers))]


def default_objective(config, calibrated: bool = True) -> str:
    """`"attention"`, which loses less, for heads of BERT and ALBERT of at most 32 dimensions; else `"logits"`.

    The cost of `"attention"` grows with the fourth power of the width: minutes for heads of 64 dimensions.
    """
    family = family_of_type(config.model_type, type(config).__name__)
    narrow = max(own_ranks(config)) <= NARROW_HEADS
    return "attention" if calibrated and narrow and family.positions is None else "logits"


def calibration_batches(tokenizer, model: PreTrainedModel, source: str, calibration: str):
    """Batches of the calibration texts; the error for an unfit tokenizer says how to convert without texts."""
    try:
        batches = text_batches(tokenizer, read_texts(calibration), token_limit(model))
        check_tokens(tokenizer, batches, model.config)
    except UnfitTokenizer as error:
        raise ValueError(
            f"{source} cannot be calibrated on {calibration}: {error} Or convert from the weights alone with "
            f"calibration='{NONE}'."
        ) from error
    return batches


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
    qk_rank,
    calibration: str | None = None,
    energy: float | None = None,
    mean_rank: float | None = None,
    objective: str | None = None,
    distil_steps: int = 0,
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
    for the weights alone. `objective` is chosen by [`default_objective`] if it is None. The damage is measured on 40 other paragraphs, or on `dataset`, with its labels if it has some.
    With `stream`, the weights alone are converted layer by layer, and no model is run.
    """
    if out is None:
        raise ValueError("give `out`, the folder to write to.")
    if qk_rank is None:
        raise ValueError("no rank is given: give `qk_rank`, or qk_rank='auto' for one rank per layer.")
    if Path(out).resolve() in (Path(source).resolve(), *Path(source).resolve().parents):
        raise ValueError(f"`out` is {out}, which holds the source {source}: choose another folder.")
    base_model = base_model or repository_of(source)
    transformers.utils.logging.disable_progress_bar()
    request = {"energy": energy, "mean_rank": mean_rank, "seed": seed, "progress": progress}
    if stream:
        if calibration not in (None, NONE) or objective is not None or distil_steps or dataset or remote_code:
            raise ValueError(
                "stream=True converts the weights alone and runs no model: leave `calibration`, `objective`, "
                "`distil_steps`, `dataset` and `remote_code` out."
            )
        return convert_streamed(Path(source), Path(out), base_model, overwrite, {"qk_rank": qk_rank, **request})
    calibration = calibration or PACKAGE
    if calibration == NONE and (objective == "attention" or distil_steps):
        raise ValueError(f"objective='attention' and `distil_steps` need texts: leave calibration='{NONE}' out.")
    texts = [] if calibration == NONE else read_texts(calibration)
    # the folder is made before the work, so that an output that cannot be written is refused at once
    with fresh_folder(out, overwrite, **MODEL_FOLDER) as staging:
        model = load(source)
        with readable(source):
            folder = checkpoint_folder(source, getattr(model.config, "_commit_hash", None))
        bytes_before = stored_bytes(folder, getattr(model.config, "transformers_weights", None))
        tokenizer = None
        try:
            tokenizer = load_tokenizer(folder, padding_side=None)
        except NoTokenizer as error:
            if texts:
                hint = f"Or convert from the weights alone with calibration='{NONE}'."
                raise ValueError(f"{error} {hint}") from error
            if dataset is not None:
                raise
        if texts:
            request["calibration"] = calibration_batches(tokenizer, model, source, calibration)
        judged = read_judged(model, dataset, split, column, label_column, examples)
        objective = objective or default_objective(model.config, bool(texts))
        fit: dict[str, Any] = {"objective": objective, "distil_steps": distil_steps, **request}
        # before the conversion, so that texts or labels that cannot be used are refused at once
        judge = None if tokenizer is None else make_judge(model, tokenizer, judged, pooling_of(folder))
        converted, layers = convert_model(model, qk_rank, **fit)
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
            load=how_to_load(folder, remote_code),
            folder=str(Path(out).resolve()),
            can_weigh=family_of_type(model.config.model_type, source).positions is None,
        )
        if texts:
            name = "the package" if calibration == PACKAGE else Path(calibration).name
            outcome.calibrated_on = f"{len(texts)} texts of {name}"
        if judge is not None:
            outcome.damage = judge.damage(converted)
            outcome.judged_on = f"{judged.source}, {judged.split}"
            parts = (part for text in judged.texts for part in ([text] if isinstance(text, str) else text))
            outcome.judged_texts_seen = len({" ".join(part.split()) for part in parts} & set(texts))
        card = card_of(
            converted,
            Path(out).resolve().name,
            base_model=base_model,
            how=story(outcome, source, distil_steps, seed),
            results=results_of(outcome, hub_task(folder, type(converted).__name__), judged),
            remote_code=remote_code,
            sentence_transformers=bool(module_list(folder)),
        )
        card.save(staging / "README.md")
    return outcome


def read_judged(model, dataset: str | None, split: str, column, label_column, examples: int) -> Judged:
    if dataset is None:
        if column is not None or label_column is not None:
            raise ValueError("`column` and `label_column` are columns of a dataset: give `dataset` as well.")
        return Judged(package_text()[JUDGED], None, JUDGING_TEXT, "hf_rankattn-text", "not used in calibration")
    texts, labels = labelled_texts(model, dataset, split, column, label_column, examples)
    local = Path(dataset).exists()
    name = Path(dataset).resolve().name if local else dataset
    return Judged(texts, labels, f"{len(texts)} rows of {name}", "local" if local else dataset, split)


def make_judge(model: PreTrainedModel, tokenizer, judged: Judged, pooling: str) -> Judge | None:
    if pooling not in POOLINGS:
        logger.warning(f"the checkpoint pools by {pooling!r}; the damage is measured with the mean of the tokens.")
    try:
        return Judge(model, tokenizer, judged.texts, token_limit(model), judged.labels, pooling)
    except UnfitTokenizer as error:
        logger.warning(f"the damage was not measured: {error}")
        return None


def random_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Random tokens, for the latency of a model without a tokenizer."""
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...] = (8, token_limit(model, 128))
    if type(model).__name__.endswith("ForMultipleChoice"):
        shape = (4, 2, shape[1])
    return {"input_ids": torch.randint(model.config.vocab_size, shape, generator=generator)}


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


def how_to_load(folder: Path, remote_code: bool) -> str:
    loader = "SentenceTransformer" if module_list(folder) else "from_pretrained"
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


def rank_curve(
    source: str,
    *,
    ranks: Sequence[int] | None = None,
    calibration: str = PACKAGE,
    objective: str | None = None,
    distil_steps: int = 0,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Quality against rank: one row `way, rank, embedding_cosine` and the measures of the task for each conversion.

    The ways are the weights alone, calibrated, and with `distil_steps` calibrated and distilled. No model is written.
    """
    model = load(source)
    folder = checkpoint_folder(source, getattr(model.config, "_commit_hash", None))
    tokenizer = load_tokenizer(folder, padding_side=None)
    batches = calibration_batches(tokenizer, model, source, calibration)
    judge = Judge(model, tokenizer, package_text()[JUDGED], token_limit(model), pooling=pooling_of(folder))
    widest = max(own_ranks(model.config))
    ranks = sorted(set(ranks or [max(widest * part // 8, 1) for part in (1, 2, 4, 6, 8)]))
    texts = {"calibration": batches, "objective": objective or default_objective(model.config)}
    ways: dict[str, dict[str, Any]] = {"weights only": {}, "calibrated": texts}
    if distil_steps:
        ways["calibrated and distilled"] = {**texts, "distil_steps": distil_steps}
    return list(curve_rows(model, judge, ranks, ways, seed, progress))


def curve_rows(
    model, judge: Judge, ranks: Sequence[int], ways: dict[str, dict[str, Any]], seed: int, progress
) -> Iterator[dict[str, Any]]:
    """One row for each way and rank. No layer is widened: one with a smaller rank keeps its rank."""
    total, own = len(ranks) * len(ways), own_ranks(model.config)
    for done, (way, rank) in enumerate(((way, rank) for way in ways for rank in ranks), start=1):
        converted = convert_model(model, [min(rank, most) for most in own], seed=seed, **ways[way]).model
        damage = judge.damage(converted)
        damage.setdefault("embedding_cosine", judge.cosine(converted))
        yield {"way": way, "rank": rank, **damage}
        progress(done, total)


def curve_to_file(
    source: str,
    out: str | None,
    draw: Callable[..., object],
    *,
    calibration: str | None = None,
    overwrite: bool = False,
    **options,
) -> tuple[list[dict[str, Any]], Path]:
    """[`rank_curve`] with its `options`, drawn to a file by `draw(rows, file, title, measure, label)`.

    An existing file is replaced only with `overwrite`.
    """
    file = Path(out or "rank-curve.png")
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"`out` of a curve must end in .png, .pdf or .svg, got {file}.")
    if file.exists() and not overwrite:
        raise ValueError(f"{file} exists already: choose another file, or replace it with overwrite=True.")
    if not file.parent.is_dir():
        raise ValueError(f"{file} cannot be drawn: there is no folder {file.parent}.")
    if calibration == NONE:
        raise ValueError(f"a curve compares the weights alone with calibration: leave calibration='{NONE}' out.")
    transformers.utils.logging.disable_progress_bar()
    # opened before the work, so that a file that cannot be written is refused at once
    with staged(file) as staging:
        rows = rank_curve(source, calibration=calibration or PACKAGE, **options)
        measure = list(rows[0])[2]
        title = f"{repository_of(source) or Path(source).resolve().name} at smaller query-key rank"
        draw(rows, staging, title, measure, describe(measure))
    return rows, file
