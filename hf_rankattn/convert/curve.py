"""A curve of quality against query-key rank: `rankattn convert --curve`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers

from ..families.slots import family_of_type
from ..files.atomic import staged
from ..files.batches import main_input
from ..files.checkpoints import load_tokenizer
from ..files.companions import checkpoint_folder, pooling_of, repository_of
from ..files.texts import package_text
from . import convert_model
from .checkpoint import (
    JUDGED,
    NONE,
    PACKAGE,
    Progress,
    batches_to_distil,
    calibration_batches,
    check_distil_text,
    default_objective,
    distilled_texts,
    load,
    own_ranks,
    token_limit,
)
from .damage import Judge, describe


def rank_curve(
    source: str,
    *,
    ranks: Sequence[int] | None = None,
    calibration: str = PACKAGE,
    objective: str | None = None,
    distil_steps: int = 0,
    distil_text: str | None = None,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Quality against rank: one row `way, rank, embedding_cosine` and the measures of the task for each conversion.

    The ways are the weights alone, calibrated, and with `distil_steps` calibrated and distilled. No model is written.
    """
    check_distil_text(distil_text, distil_steps)
    model = load(source)
    if (wanted := main_input(model.config)) != "input_ids":
        raise ValueError(
            f"{source} reads {wanted}, and a curve is judged on the package's text: convert it at one width."
        )
    folder = checkpoint_folder(source, getattr(model.config, "_commit_hash", None))
    tokenizer = load_tokenizer(folder, padding_side=None)
    batches = calibration_batches(tokenizer, model, source, calibration)
    judge = Judge(model, tokenizer, package_text()[JUDGED], token_limit(model), pooling=pooling_of(folder))
    widest = max(own_ranks(model.config))
    ranks = sorted(set(ranks or [max(widest * part // 8, 1) for part in (1, 2, 4, 6, 8)]))
    texts = {"calibration": batches, "objective": objective or default_objective(model.config)}
    ways: dict[str, dict[str, Any]] = {"weights only": {}, "calibrated": texts}
    if distil_steps:
        ways["calibrated and distilled"] = distilled = {**texts, "distil_steps": distil_steps}
        if distil_text is not None:
            trained = distilled_texts(distil_text, package_text()[JUDGED])
            distilled["distil_batches"] = batches_to_distil(tokenizer, model, trained, seed)
    return list(curve_rows(model, judge, ranks, ways, seed, progress))


def curve_rows(
    model, judge: Judge, ranks: Sequence[int], ways: dict[str, dict[str, Any]], seed: int, progress
) -> Iterator[dict[str, Any]]:
    """One row for each way and rank. No layer is widened: one with a smaller rank keeps its rank."""
    total, own = len(ranks) * len(ways), own_ranks(model.config)
    one_width = family_of_type(model.config.model_type, type(model).__name__).stock_width is not None
    for done, (way, rank) in enumerate(((way, rank) for way in ways for rank in ranks), start=1):
        # a stock config holds one width for queries, keys and values
        widths = (rank, rank) if one_width else ([min(rank, most) for most in own], None)
        converted = convert_model(model, *widths, seed=seed, **ways[way]).model
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
