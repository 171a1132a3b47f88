"""From a checkpoint to a folder or a figure: what `rankattn convert` runs."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from . import models
from .checkpoints import one_line, readable, refuse_integers
from .folders import check_replaceable, fresh_folder, staged
from .models.convert import LayerReport, convert_model, convert_shards
from .models.convert.families import family_of_type
from .probe.architectures import base_of
from .probe.batches import evaluating
from .report.cards import model_card
from .sharing import MODEL_FOLDER, card_of, export_model
from .survey import UnfitTokenizer, check_tokens
from .texts import file_text, package_text


logger = logging.get_logger(__name__)


PACKAGE = "package"
BATCH = 8
CALIBRATED, JUDGED = slice(0, 40), slice(40, 80)
BESIDE_THE_WEIGHTS = ("tokenizer*", "vocab*", "special_tokens_map.json", "added_tokens.json", "spiece.model", "merges.txt", "generation_config.json")  # fmt: skip


@dataclass
class Outcome:
    """What a conversion did: layer by layer, in numbers, and where it went."""

    layers: list[LayerReport]
    damage: dict[str, float]
    parameters_saved: int
    folder: str

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "layers": [layer.as_dict() for layer in self.layers]}


def read_texts(file: str | Path) -> list[str]:
    """The paragraphs of a UTF-8 file, or its lines where no line is empty; `"package"` is the package's own text."""
    if str(file) == PACKAGE:
        return package_text()[CALIBRATED]
    texts = file_text(file)
    if not texts:
        raise ValueError(f"{file} holds no text: calibration needs paragraphs with an empty line between them.")
    return texts


def text_batches(tokenizer, texts: Sequence[str], limit: int) -> list[dict[str, torch.Tensor]]:
    """Padded batches of texts cut to `limit` tokens."""
    return [
        dict(tokenizer(list(texts[start : start + BATCH]), padding=True, truncation=True, max_length=limit, return_tensors="pt"))
        for start in range(0, len(texts), BATCH)
    ]  # fmt: skip


def mean_pooled(model: PreTrainedModel, batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The mean of the last hidden states of each text over its real tokens, (texts, d)."""
    base, rows = base_of(model), []
    with evaluating(model):
        for batch in batches:
            mask = batch["attention_mask"][..., None].to(model.device)
            states = base(**{name: value.to(model.device) for name, value in batch.items()}).last_hidden_state
            rows.append(((states * mask).sum(1) / mask.sum(1)).float().cpu())
    return torch.cat(rows)


def retrieval_accuracy(model: PreTrainedModel, tokenizer, texts: Sequence[str], limit: int) -> float:
    """How often the second half of a text is the nearest of all second halves to its first, and the other way round."""
    words = [text.split() for text in texts]
    halves = [[" ".join(w[: len(w) // 2]) for w in words], [" ".join(w[len(w) // 2 :]) for w in words]]
    first, second = (
        torch.nn.functional.normalize(mean_pooled(model, text_batches(tokenizer, half, limit)), dim=-1)
        for half in halves
    )
    similar = first @ second.T
    own = torch.arange(len(texts))
    return ((similar.argmax(1) == own).double().mean() + (similar.argmax(0) == own).double().mean()).item() / 2


class Judge:
    """The original's answers on texts that calibration has not seen, against which a converted model is held."""

    def __init__(self, model: PreTrainedModel, tokenizer, texts: Sequence[str], limit: int):
        self.tokenizer, self.texts, self.limit = tokenizer, list(texts), limit
        self.batches = text_batches(tokenizer, texts, limit)
        check_tokens(tokenizer, self.batches, model.config)
        self.original = mean_pooled(model, self.batches)
        self.original_retrieval = retrieval_accuracy(model, tokenizer, texts, limit)

    def cosine(self, model: PreTrainedModel) -> float:
        return torch.cosine_similarity(mean_pooled(model, self.batches), self.original).mean().item()

    def damage(self, model: PreTrainedModel) -> dict[str, float]:
        retrieval = retrieval_accuracy(model, self.tokenizer, self.texts, self.limit)
        return {
            "embedding_cosine": self.cosine(model),
            "half_retrieval_accuracy": retrieval,
            "half_retrieval_accuracy_of_the_original": self.original_retrieval,
        }


def load(name: str) -> PreTrainedModel:
    """The model with the class its checkpoint was saved with, or an error of one line."""
    with readable(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    family_of_type(config.model_type, name)
    refuse_integers(name, config)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is judged below
    try:
        with readable(name):
            options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
            model, info = class_of(config).from_pretrained(name, **options)
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(key for key in info["missing_keys"] if ".layer" in key or "_layer" in key):
        raise ValueError(
            f"{len(missing)} weights of {name} are missing, {missing[0]} for one: they would be random, and there would be "
            "nothing to keep in a conversion."
        )
    return model.eval()


def class_of(config) -> Any:
    """The class that the config names, if there is one of that name for such configs; a name alone is not trusted."""
    named = str(config.architectures[0]) if config.architectures else ""
    for module in (models, transformers):
        found = getattr(module, named, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config):
            return found
    return AutoModel


def load_tokenizer(name: str):
    """The tokenizer beside a checkpoint, or None."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except OSError:
        return None
    except Exception as error:  # tokenizers fail in as many ways as there are formats
        logger.warning(f"the tokenizer of {name} cannot be read, so none is written: {one_line(error)}")
        return None


def token_limit(model: PreTrainedModel) -> int:
    return min(256, getattr(model.config, "max_position_embeddings", None) or 256)


def base_name(source: str) -> str:
    return Path(source).resolve().name if Path(source).exists() else source


def convert_checkpoint(
    source: str,
    out: str | Path | None,
    *,
    qk_rank,
    calibration: str | None = None,
    energy: float | None = None,
    mean_rank: float | None = None,
    objective: str = "logits",
    distil_steps: int = 0,
    stream: bool = False,
    base_model: str | None = None,
    overwrite: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Outcome:
    """Convert the checkpoint `source` and write model, tokenizer and card to `out`, all or nothing.

    `calibration` is a file of texts, or `"package"` for 40 paragraphs of the package's own. The damage is measured on 40
    others of the package's own. With `stream`, the weights alone are converted shard by shard, and nothing is run.
    """
    if out is None:
        raise ValueError("there is nowhere to write to: name a folder with --out.")
    if qk_rank is None:
        raise ValueError("no rank is given: choose one with --qk-rank, or --auto for one per layer.")
    check_replaceable(Path(out).resolve(), overwrite, **MODEL_FOLDER)
    request: dict[str, Any] = {
        "qk_rank": qk_rank,
        "energy": energy,
        "mean_rank": mean_rank,
        "seed": seed,
        "progress": progress,
    }
    if stream:
        if calibration is not None or objective != "logits" or distil_steps:
            raise ValueError(
                "a streamed conversion uses the weights alone: leave calibration, objective and distilling out."
            )
        return convert_streamed(Path(source), Path(out), base_model or base_name(source), overwrite, request)
    texts = None if calibration is None else read_texts(calibration)
    model, tokenizer = load(source), load_tokenizer(source)
    if texts is not None and tokenizer is None:
        raise ValueError(
            f"{source} has no tokenizer, so calibration texts cannot be read: convert without calibration."
        )
    batches = None if texts is None else text_batches(tokenizer, texts, token_limit(model))
    if batches:
        check_tokens(tokenizer, batches, model.config)
    request.update(calibration=batches, objective=objective, distil_steps=distil_steps)
    converted, layers = convert_model(model, **request)
    damage = {}
    if tokenizer is not None:
        try:
            damage = Judge(model, tokenizer, package_text()[JUDGED], token_limit(model)).damage(converted)
        except UnfitTokenizer as error:
            logger.warning(f"the damage was not measured: {error}")
    card = card_of(
        converted,
        Path(out).resolve().name,
        base_model=base_model or base_name(source),
        how=story(layers, calibration, len(texts or []), objective, distil_steps, seed),
        results=results_of(damage, layers),
    )
    folder = export_model(converted, out, tokenizer=tokenizer, card=card, overwrite=overwrite)
    return Outcome(layers, damage, sum(layer.parameters_saved for layer in layers), str(folder))


def convert_streamed(source: Path, out: Path, base_model: str, overwrite: bool, request: dict[str, Any]) -> Outcome:
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} is not a folder with a config.json: only local checkpoints can be streamed.")
    rank = request.pop("qk_rank")
    with fresh_folder(out, overwrite, **MODEL_FOLDER) as staging:
        with readable(source, also_writes=True):
            config, layers = convert_shards(source, staging, rank, **request)
        for pattern in BESIDE_THE_WEIGHTS:
            for file in source.glob(pattern):
                shutil.copyfile(file, staging / file.name)
        card = model_card(
            config,
            model_class=(config.architectures or [f"{type(config).__name__.removesuffix('Config')}Model"])[0],
            repo_id=out.resolve().name,
            base_model=base_model,
            how=story(layers, None, 0, "logits", 0, request["seed"]),
            results=results_of({}, layers),
        )
        card.save(staging / "README.md")
    return Outcome(layers, {}, sum(layer.parameters_saved for layer in layers), str(out.resolve()))


def story(layers: list[LayerReport], calibration, texts: int, objective: str, distil_steps: int, seed: int) -> str:
    ranks = ", ".join(f"{layer.old_rank} to {layer.rank}" for layer in layers)
    lines = [f"Converted by `rankattn convert` (seed {seed}); query-key ranks, layer by layer: {ranks}."]
    if calibration is None:
        lines.append(
            "From the weights alone: truncated singular values of each head's query-key form, biases included."
        )
    else:
        what = (
            "the row-centred logits" if objective == "logits" else "the logits, weighted by the attention they meet,"
        )
        origin = "the package's own text" if calibration == PACKAGE else Path(calibration).name
        lines.append(f"Least squared error of {what} on {texts} texts of {origin}, layer by layer.")
    if distil_steps:
        lines.append(
            f"Then {distil_steps} steps of distillation towards the hidden states of the original, on these texts and variations."
        )
    return " ".join(lines)


def results_of(damage: dict[str, float], layers: list[LayerReport]) -> list[EvalResult]:
    """The damage as the card states it; the energy kept is of the logits, the mean over layers."""
    kept = sum(layer.energy_kept for layer in layers) / len(layers)
    names = {
        "embedding_cosine": "cosine of mean-pooled embeddings to the original's",
        "half_retrieval_accuracy": "retrieval of the other half of a paragraph, accuracy",
        "half_retrieval_accuracy_of_the_original": "the same, original model",
    }
    rows = [
        EvalResult(
            task_type="sentence-similarity",
            dataset_type="hf_rankattn-text",
            dataset_name="40 paragraphs of the text in hf_rankattn",
            dataset_split="not used in calibration",
            metric_type=metric,
            metric_name=names[metric],
            metric_value=round(value, 4),
        )
        for metric, value in damage.items()
    ]
    energy = EvalResult(
        task_type="sentence-similarity",
        dataset_type="logits",
        dataset_name="query-key logits, as the conversion met them",
        metric_type="energy_kept",
        metric_name="share of logit energy kept, mean over layers",
        metric_value=round(kept, 4),
    )
    return [*rows, energy]


def rank_curve(
    source: str, *, ranks: Sequence[int] | None = None, calibration: str = PACKAGE, distil_steps: int = 100, seed: int = 0,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Quality against rank, three ways: one row `way, rank, embedding_cosine` per conversion. No model is written."""
    model, tokenizer = load(source), load_tokenizer(source)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, so there are no texts to judge a conversion on.")
    limit = token_limit(model)
    batches = text_batches(tokenizer, read_texts(calibration), limit)
    judge = Judge(model, tokenizer, package_text()[JUDGED], limit)
    widest = model.config.hidden_size // model.config.num_attention_heads
    ranks = sorted(set(ranks or [max(widest * part // 8, 1) for part in (1, 2, 4, 6, 8)]))
    ways: dict[str, dict[str, Any]] = {
        "weights only": {},
        "calibrated": {"calibration": batches},
        "calibrated and distilled": {"calibration": batches, "distil_steps": distil_steps},
    }
    return list(curve_rows(model, judge, ranks, ways, seed, progress))


def curve_rows(model, judge: Judge, ranks: Sequence[int], ways: dict[str, dict[str, Any]], seed: int, progress) -> Iterator[dict[str, Any]]:  # fmt: skip
    total = len(ranks) * len(ways)
    for done, (way, rank) in enumerate(((way, rank) for way in ways for rank in ranks), start=1):
        converted = convert_model(model, rank, seed=seed, **ways[way]).model
        yield {"way": way, "rank": rank, "embedding_cosine": judge.cosine(converted)}
        progress(done, total)


def curve_to_file(
    source: str, out: str | None, *, calibration: str | None, distil_steps: int | None, overwrite: bool, seed: int, progress
) -> tuple[list[dict[str, Any]], Path]:  # fmt: skip
    """[`rank_curve`], drawn to a file that is not replaced unasked."""
    from .report.rank_curve import draw_rank_curve

    file = Path(out or "rank-curve.png")
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--curve draws a figure, so --out must end in .png, .pdf or .svg, got {file}.")
    if file.exists() and not overwrite:
        raise ValueError(f"{file} exists already: choose another file, or add --overwrite.")
    if not file.parent.is_dir():
        raise ValueError(f"{file} cannot be drawn: there is no folder {file.parent}.")
    rows = rank_curve(
        source, calibration=calibration or PACKAGE, distil_steps=100 if distil_steps is None else distil_steps, seed=seed,
        progress=progress,
    )  # fmt: skip
    with staged(file) as staging:
        draw_rank_curve(rows, staging, f"{base_name(source)} at smaller query-key rank")
    return rows, file
