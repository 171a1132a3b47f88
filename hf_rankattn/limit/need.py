"""How much rank a model needs: its quality within rank limits of several widths, over all layers and one layer at a time."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checks import whole
from ..convert.damage import POOLINGS
from ..families.architectures import attending_layers, base_of, layers_of
from ..families.structure import choosing_tower
from ..files.batches import Batch
from ..files.running import Inputs, batches_of
from ..probe.batches import plain, real_tokens
from .attaching import Fitting, run_within
from .cells import Cells
from .fitting import Seen
from .heads import HeadLimits, Widths
from .limiting import RankLimit, limit_rank, merged
from .quality import NextTokenPerplexity, quality_of, quality_of_layer


if TYPE_CHECKING:
    import pandas as pd

logger = logging.get_logger(__name__)
Progress = Callable[[int, int], Any]
# the argument of `limit_rank` for each kind, its default fit first, and the baselines beside it
KINDS = {"qk": "qk_rank", "v": "v_head_dim"}
DEFAULT = "attention"
BASELINES = {"qk": ("logits", "components", "weights"), "v": ("components", "weights")}
WHOLE, ALL = "whole", "all"
NEEDED = "needed_width"
COLUMNS = ["model", "kind", "layers", "objective", "width", "metric", "value"]
# the widths that are measured by default: where quality changes fast, they are close
EIGHTHS = (1, 2, 3, 4, 6)
# of the examples, for one layer of a language model: the passes are many
LAYER_EXAMPLES = 4


class Cell(NamedTuple):
    """One measurement: a kind, limited to a width in one layer or in all of them."""

    kind: str
    layers: str
    objective: str
    width: int

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.layers}-{self.objective}-{self.width}"


def measure_need(
    model: PreTrainedModel,
    held_out: Inputs,
    *,
    calibration: Inputs,
    widths: Sequence[int] | None = None,
    target_loss: float = 0.01,
    by_layer: bool = True,
    pooling: str = "mean",
    tower: str | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> "pd.DataFrame":
    """Measure the quality of a model within [`limit_rank`], for queries and keys (`"qk"`) and for values (`"v"`) alone.

    Args:
        model: A model that [`limit_rank`] takes. Quality is the perplexity of the whole model divided by that of the limited one for
            language models; the accuracy of the limited model divided by that of the whole one if `held_out` has `labels`; otherwise the
            mean cosine of embeddings to those of the whole model.
        held_out: A batch, a list of batches or a DataLoader, to measure quality on.
        calibration: The same, to fit the limits on; no example should be in both.
        widths (*optional*): The widths to measure, the same in all layers. Default: 1, 2, 3, 4 and 6 eighths of the width of a head.
        target_loss (`float`, *optional*, defaults to 0.01):
            The smallest width that keeps a quality of `1 - target_loss` is found by bisection between the measured widths.
        by_layer (`bool`, *optional*, defaults to `True`):
            Also limit one layer at a time, to the two smallest widths. A language model is judged there on the first four examples, by
            `exp(-divergence)` from the tokens that the whole model expects: perplexity changes by more than a layer costs there by chance.
        pooling (`str`, *optional*, defaults to `"mean"`): How token states become an embedding: `"mean"`, `"cls"` or `"max"`.
        tower (`str`, *optional*): One side of a model with several, as in [`measure_collapse`].
        seed (`int`, *optional*, defaults to 0): As in [`limit_rank`].
        folder (*optional*): Keeps each measurement here, and uses it again when the function is called with the same arguments.
        overwrite (`bool`, *optional*, defaults to `False`): Delete the measurements in the folder first.
        progress (*optional*): Called with the number of measurements that are done, and their number in all.

    Returns a table with the columns `model, kind, layers, objective, width, metric, value`. `layers` is `"all"` or the number of a layer.
    The metric `quality` is 1 for the whole model, `perplexity`, `accuracy`, `embedding_cosine` or `divergence` is what quality is computed from, and
    `needed_width` is the smallest width that keeps the target. The objective `"whole"` is the model without a limit, and the others are
    those of [`limit_rank`]: its default, and three baselines.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_rankattn import measure_need
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)).eval()
    >>> held_out, calibration = ({"input_ids": torch.randint(50, (2, 16))} for _ in range(2))
    >>> table = measure_need(model, held_out, calibration=calibration, widths=[2, 4])
    >>> sorted(set(table.layers)), sorted(set(table.metric))
    (['0', '1', 'all'], ['divergence', 'needed_width', 'perplexity', 'quality'])
    """
    model = plain(model)
    if not 0 < target_loss < 1:
        raise ValueError(f"`target_loss` must be between 0 and 1, such as 0.01 for 1 %, got {target_loss}.")
    if pooling not in POOLINGS:
        raise ValueError(f"`pooling` must be one of {', '.join(POOLINGS)}, got {pooling!r}.")
    with choosing_tower(tower):
        need = Need(model, held_out, calibration, pooling, tower, seed)
        grid = {kind: checked_widths(widths, kind, need.full[kind]) for kind in KINDS}
        with Cells(folder, need.settings, overwrite).opened() as cells:
            return need.table(cells, grid, widths is not None, target_loss, by_layer, progress)


def checked_widths(widths: Sequence[int] | None, kind: str, full: int) -> list[int]:
    """The widths to measure in rising order, the full one excluded."""
    if widths is None:
        return sorted({max(full * part // 8, 1) for part in EIGHTHS} - {full})
    if not widths:
        raise ValueError("`widths` is empty: give widths of at least 1, or leave it out.")
    what = "queries and keys" if kind == "qk" else "values"
    for width in widths:
        whole("widths", width, 1)
        if width > full:
            raise ValueError(
                f"`widths` has {width}, and the {what} of a head have the width {full}: give at most that."
            )
    return sorted({int(width) for width in widths} - {full})


class Need:
    """The measurements of one model."""

    def __init__(self, model: PreTrainedModel, held_out: Inputs, calibration: Inputs, pooling: str, tower, seed: int):
        self.model, self.tower, self.seed = model, tower, seed
        self.batch = merged(model, calibration)
        # a task has labels, which the model below its head does not take
        held = [dict(batch) for batch in ([held_out] if isinstance(held_out, Mapping) else held_out)]
        for batch in batches_of(base_of(model), held):
            real_tokens(model, batch)
        self.quality = quality_of(model, held, pooling)
        few = first_examples(held, LAYER_EXAMPLES) if isinstance(self.quality, NextTokenPerplexity) else held
        self.few = quality_of_layer(self.quality, model, few, pooling)
        self.widths = widths_of(model, self.batch, tower)
        self.full = {"qk": max(own.qk for own in self.widths), "v": max(own.value for own in self.widths)}
        self.settings = {
            "model": fingerprint(dict(model.state_dict()), dict(model.named_buffers())),
            "config": fingerprint_of_config(model),
            "held_out": fingerprint(*held),
            "calibration": fingerprint(self.batch),
            "quality": self.quality.name,
            "layer_quality": self.few.name,
            "pooling": pooling,
            "tower": tower,
            "seed": seed,
            "layer_examples": sum(len(next(iter(batch.values()))) for batch in few),
            **{name: version(name) for name in ("hf_rankattn", "torch", "transformers")},
        }
        self.answers: dict[str, torch.Tensor] = {}

    def table(
        self, cells: Cells, grid: dict[str, list[int]], given: bool, target_loss: float, by_layer: bool, progress
    ) -> "pd.DataFrame":
        wanted = [Cell(kind, ALL, DEFAULT, width) for kind in KINDS for width in grid[kind]]
        base = [
            Cell(kind, ALL, objective, width)
            for kind in KINDS
            for objective in BASELINES[kind]
            for width in (grid[kind] if given or len(grid[kind]) < 5 else grid[kind][1::2] + grid[kind][4:])
        ]
        numbers = attending_layers(self.model)
        # the two smallest widths: each takes a pass for each layer
        apart = {
            (kind, width): [Cell(kind, str(number), DEFAULT, width) for number in numbers]
            for kind in KINDS
            for width in (grid[kind][:2] if by_layer else ())
        }
        steps = sum(bisections(grid[kind], self.full[kind]) for kind in KINDS)
        total, done = len(wanted) + steps + len(base) + sum(map(len, apart.values())), 0

        def advance(count: int = 1) -> None:
            nonlocal done
            done += count
            progress(min(done, total), total)

        whole_values = cells.get(WHOLE) or cells.put(WHOLE, self.quality.of(self.whole(), self.whole()))
        found = {cell: self.measured(cells, cell, advance) for cell in wanted}
        needed = {}
        for kind in KINDS:
            needed[kind], tried = self.least(cells, kind, found, 1 - target_loss, advance)
            found |= tried
        advance(steps - (len(found) - len(wanted)))
        refused: dict[str, str] = {}
        for cell in base:
            if (values := self.baseline(cells, cell, refused, advance)) is not None:
                found[cell] = values
        for part in apart.values():
            found |= self.one_at_a_time(cells, part, advance)
        table = self.rows(found, whole_values, needed)
        table.attrs = {"refused": refused, "target_loss": target_loss, "quality": self.quality.name}
        return table

    def rows(
        self, found: Mapping[Cell, dict[str, float]], whole_values: Mapping[str, float], needed: Mapping[str, int]
    ) -> "pd.DataFrame":
        """The long table of all measurements and answers."""
        import pandas as pd

        measured = {Cell(kind, ALL, WHOLE, self.full[kind]): whole_values for kind in KINDS} | dict(found)
        rows = [
            {**cell._asdict(), "metric": metric, "value": value}
            for cell, values in measured.items()
            for metric, value in values.items()
        ]
        rows += [
            {"kind": kind, "layers": ALL, "objective": DEFAULT, "width": None, "metric": NEEDED, "value": float(width)}
            for kind, width in needed.items()
        ]
        table = pd.DataFrame(rows).assign(model=self.model.config.model_type).reindex(columns=COLUMNS)
        return table.astype({"width": "Int32"})

    def whole(self) -> torch.Tensor:
        if WHOLE not in self.answers:
            self.answers[WHOLE] = self.quality.answers(self.model)
        return self.answers[WHOLE]

    def limit(self, cell: Cell, applied: bool = True) -> RankLimit:
        own = [min(cell.width, widths.qk if cell.kind == "qk" else widths.value) for widths in self.widths]
        # the weights are the same on any text
        texts = first_examples([self.batch], 1)[0] if cell.objective == "weights" else self.batch
        return limit_rank(
            self.model,
            **{KINDS[cell.kind]: own},  # type: ignore[arg-type]
            calibration=texts,
            objective=cell.objective,  # type: ignore[arg-type]
            tower=self.tower,
            seed=self.seed,
            applied=applied,
        )

    def measured(self, cells: Cells, cell: Cell, advance: Callable[[], object]) -> dict[str, float]:
        """The quality of the model with all its layers limited."""
        if (values := cells.get(cell.key)) is None:
            answer = self.whole()
            with self.limit(cell):
                values = cells.put(cell.key, self.quality.of(answer, self.quality.answers(self.model)))
        advance()
        return values

    def baseline(
        self, cells: Cells, cell: Cell, refused: dict[str, str], advance: Callable[[], object]
    ) -> dict[str, float] | None:
        """The same for a baseline; None for weights that cannot be read, of which `refused` gets the reason."""
        if cell.objective in refused:
            advance()
            return None
        try:
            return self.measured(cells, cell, advance)
        except ValueError as error:
            if cell.objective != "weights":
                raise
            refused[cell.objective] = str(error).rstrip(".")
            logger.warning(f"the baseline of the weights alone is left out: {error}")
            advance()
            return None

    def least(
        self, cells: Cells, kind: str, found: Mapping[Cell, dict[str, float]], target: float, advance
    ) -> tuple[int, dict[Cell, dict[str, float]]]:
        """The smallest width that keeps the target, as do all larger ones that were measured, and what was measured to find it."""
        passing, failing, tried = self.full[kind], 0, {}
        for cell in sorted((cell for cell in found if cell.kind == kind), key=lambda cell: -cell.width):
            if found[cell]["quality"] < target:
                failing = cell.width
                break
            passing = cell.width
        while passing - failing > 1:
            cell = Cell(kind, ALL, DEFAULT, (passing + failing) // 2)
            tried[cell] = self.measured(cells, cell, advance)
            if tried[cell]["quality"] < target:
                failing = cell.width
            else:
                passing = cell.width
        return passing, tried

    def one_at_a_time(self, cells: Cells, part: Sequence[Cell], advance) -> dict[Cell, dict[str, float]]:
        """The quality with one layer limited and the others whole, for all layers at one width."""
        found = {cell: values for cell in part if (values := cells.get(cell.key)) is not None}
        advance(len(found))
        if len(found) < len(part):
            limit = self.limit(part[0], applied=False)
            if "few" not in self.answers:
                self.outputs = Outputs(self.model)
                with self.outputs.recorded():
                    self.answers["few"] = self.few.answers(self.model)
            for place, cell in enumerate(part):
                if cell in found:
                    continue
                every: list[Any] = list(limit.heads)
                heads = [
                    own if number == place else HeadLimits.unlimited(own.widths) for number, own in enumerate(every)
                ]
                with RankLimit(self.model, heads, self.tower), self.outputs.replayed(int(cell.layers)):
                    values = self.few.of(self.answers["few"], self.few.answers(self.model))
                found[cell] = cells.put(cell.key, values)
                advance(1)
        return {cell: found[cell] for cell in part}


class Outputs:
    """What the layers of the whole model return, so that the layers below a limited one need not run again.

    Layers that run more than once in a pass always run.
    """

    def __init__(self, model: PreTrainedModel):
        self.layers = layers_of(model)
        self.found: dict[nn.Module, list[Any]] = {layer: [] for layer in self.layers}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.found[module].append(output)

        with ExitStack() as stack:
            for layer in self.found:
                stack.enter_context(layer.register_forward_hook(keep))
            yield

    @contextmanager
    def replayed(self, number: int) -> Iterator[None]:
        """Within the block, the layers before the layer of this number return what they returned before, batch by batch."""
        shared = len(self.found) < len(self.layers)
        before = {} if shared else {layer: layer.__dict__.get("forward") for layer in self.layers[:number]}
        for layer in before:
            outputs = iter(self.found[layer])
            layer.forward = lambda *args, outputs=outputs, **kwargs: next(outputs)
        try:
            yield
        finally:
            for layer, own in before.items():
                del layer.forward
                if own is not None:  # accelerate puts a function of its own on layers that it offloads
                    layer.forward = own


def bisections(grid: Sequence[int], full: int) -> int:
    """The most steps that a bisection between two of these widths takes."""
    edges = [0, *grid, full]
    return max(math.ceil(math.log2(high - low)) for low, high in zip(edges, edges[1:], strict=False))


def widths_of(model: PreTrainedModel, batch: Batch, tower: str | None) -> list[Widths]:
    """The widths of the heads of each layer with attention; a `ValueError` for a model that cannot be limited."""
    found: list[Widths] = []

    def look(place: int, seen: Seen) -> HeadLimits:
        found.append(seen.widths)
        return HeadLimits.unlimited(seen.widths)

    one = first_examples([batch], 1)[0]
    fittings = [Fitting(place, look, real_tokens(model, one)) for place in range(len(attending_layers(model)))]
    run_within(model, fittings, one, tower)
    return found


def first_examples(batches: Sequence[Mapping[str, torch.Tensor]], count: int) -> list[Batch]:
    """The batches up to this number of examples; tensors that examples share, such as position ids, stay whole."""
    found: list[Batch] = []
    for batch in batches:
        size = max(len(value) for value in batch.values())
        if count > 0:
            found.append({name: value[:count] if len(value) == size else value for name, value in batch.items()})
        count -= size
    return found


def fingerprint_of_config(model: PreTrainedModel) -> str:
    """A hash of what the config says about the computation, and of the attention implementation."""
    fields = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "transformers_version")
    }
    text = json.dumps([fields, model.config._attn_implementation], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(*batches: Mapping[str, torch.Tensor]) -> str:
    """A hash of the names, shapes and values of tensors."""
    found = hashlib.sha256()
    for batch in batches:
        for name, tensor in batch.items():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if not tensor.is_meta:
                found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
