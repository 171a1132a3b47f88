"""The paths through heads that make up the output of a model: one by one, or all of a length at once."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..checks import whole
from ..files.running import Inputs
from ..measure import relative_residual
from ..measure.norms import drop_rows, working
from .batches import probing
from .frozen import FrozenAttention, FrozenStep, walk
from .tables import LongTable
from .task_head import TaskHead


Part = torch.Tensor | None  # None is zero


def added(part: Part, update: Part) -> Part:
    """The sum of two parts, in the memory of the first."""
    if part is None or update is None:
        return update if part is None else part
    return part.add_(update)


class Lengths:
    """The part of the stream that went through k heads, for every k, by one recursion over the sublayers.

    In `(I + t A_L) ... (I + t A_1)` the coefficient of t^k is the sum of all paths of length k. A layer moves the part of k
    heads to k + 1, and its skip keeps it at k, so parts are updated in place from the longest to the shortest.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def start(self, states: torch.Tensor) -> None:
        self.parts = [states.clone()]

    def step(self, step: FrozenStep, stream: torch.Tensor) -> None:
        if isinstance(step, FrozenAttention):
            self.parts.append(None)
        for k in reversed(range(len(self.parts))):
            part = self.parts[k] if step.skip else None
            if isinstance(step, FrozenAttention) and k and self.parts[k - 1] is not None:
                part = added(part, step.attend(self.parts[k - 1]))  # type: ignore[arg-type]
            self.parts[k] = None if part is None else step.carry_(part)
        self.parts[0] = added(self.parts[0], step.source)

    def index(self) -> list[dict[str, int]]:
        return [{"length": k} for k in range(len(self.parts))]


class Guard:
    """Compares the input of each sublayer with the output that the frozen sublayer before it gives on its own input."""

    expected: torch.Tensor
    error: torch.Tensor

    def start(self, states: torch.Tensor) -> None:
        self.expected, self.error = states, torch.zeros(len(states), dtype=states.dtype, device=states.device)

    def arrive(self, stream: torch.Tensor) -> None:
        """Compare the actual input of a sublayer, or the output of the last one, with what was expected."""
        self.error = torch.maximum(self.error, relative_error(self.expected, stream))

    def expect(self, step: FrozenStep, stream: torch.Tensor, updates: Sequence[torch.Tensor]) -> None:
        """Compute what should arrive next."""
        total = stream.clone() if step.skip else torch.zeros_like(stream)
        for update in updates:
            total += update
        self.expected = step.carry_(total) if step.source is None else step.carry_(total).add_(step.source)


class Layers(Guard):
    """For each layer or each head: the part of the stream that went through it."""

    def __init__(self, heads: bool) -> None:
        self.by_head, self.parts, self.rows = heads, list[Part](), list[dict[str, int]]()
        self.depth = 0

    def step(self, step: FrozenStep, stream: torch.Tensor) -> None:
        self.arrive(stream)
        for place, part in enumerate(self.parts):
            update = step.attend(part) if isinstance(step, FrozenAttention) and part is not None else None
            part = added(part if step.skip else None, update)
            self.parts[place] = None if part is None else step.carry_(part)
        new: list[torch.Tensor] = []
        if isinstance(step, FrozenAttention):
            new = list(step.attend_heads(stream)) if self.by_head else [step.attend(stream)]
            self.rows += [{"layer": self.depth, **({"head": h} if self.by_head else {})} for h in range(len(new))]
            self.depth += 1
        self.expect(step, stream, new)
        self.parts += [step.carry_(part) for part in new]

    def index(self) -> list[dict[str, int]]:
        return self.rows


class Steps:
    """Keeps every sublayer, for networks that are small enough to list their paths one by one."""

    def __init__(self) -> None:
        self.steps: list[FrozenStep] = []
        self.states: torch.Tensor | None = None

    def start(self, states: torch.Tensor) -> None:
        self.states = states.clone()

    def step(self, step: FrozenStep, stream: torch.Tensor) -> None:
        self.steps.append(step)


class PathTerm(NamedTuple):
    """One path: where it starts, the head of each layer (0 for the skip, _ before its start), its map and its term."""

    source: str
    path: str
    length: int
    matrix: torch.Tensor
    term: torch.Tensor


def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bnd,bnd->b", x, y)


def part_metrics(part: Part, output: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """How a part relates to the output (batch, n, d), whose padding is zero; each value is (batch)."""
    size = inner(output, output)
    if part is None:
        nothing, undefined = torch.zeros_like(size), torch.full_like(size, torch.nan)
        return {"projection": nothing, "norm_ratio": nothing, "cosine": undefined, "relative_residual": undefined}
    part = drop_rows(part, mask)
    product, norm = inner(part, output), inner(part, part).sqrt()
    return {
        "projection": product / size,
        "norm_ratio": norm / size.sqrt(),
        "cosine": product / (norm * size.sqrt()),
        "relative_residual": relative_residual(part, mask),
    }


def relative_error(found: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The distance of two states (batch, n, d) over the norm of the second, (batch); none for states that are all zero."""
    distance = torch.linalg.vector_norm(found - states, dim=(1, 2))
    return torch.where(distance == 0, 0, distance / torch.linalg.vector_norm(states, dim=(1, 2)))


def checked(error: torch.Tensor, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The error of a decomposition as a metric; an error above half of the digits is raised."""
    # at least the precision of float32, because some norms of float64 models compute in it
    allowed = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    if bool(error.isnan().any()):
        raise ValueError(
            f"the states of {type(model).__name__} hold NaN or Inf. Its weights do, or it is in float64 and padding masks "
            "whole rows of a softmax that computes in float32: use float32."
        )
    if not bool((error <= allowed).all()):
        raise ValueError(
            f"the paths of {type(model).__name__} do not add up to its output: relative error {error.max().item():.1e}. "
            "Its layers do something that the table of architectures does not know, such as adapters (merge them first) "
            "or hooks."
        )
    return {"reconstruction_error": error}


@probing
def path_lengths(
    model: PreTrainedModel, inputs: Inputs, by: Literal["length", "layer", "head"] = "length", loss: bool = False
) -> pd.DataFrame:
    """The exact contribution of all paths of each length to the output of a model, without listing the paths.

    Args:
        model: A model of a family in the table of architectures, whole or under [`ablate`].
        inputs: As in [`measure_collapse`].
        by (`str`, *optional*, defaults to `"length"`):
            `"length"`: the parts are the sums of all paths through k heads, k = 0..L; together they are the output.
            `"layer"` or `"head"`: the parts are the sums of all paths through the attention of a layer, or through one
            head of it. A path through k heads is in k of these parts, so their sum is the sum over k of k times the part
            of length k. There are L or L H parts: `"head"` takes the time of a dozen forward passes.
        loss (`bool`, *optional*):
            Also report the loss of the task head on each example (the batch needs labels) when only some parts of
            `last_hidden_state` are kept: lengths up to k (`loss_up_to`) or only k (`loss_only`), with `accuracy_up_to` and
            `accuracy_only` where labels are classes of tokens; for layers and heads, everything but their part
            (`loss_without`).

    Maps and scales of norms are frozen at their values in the forward pass of the whole model. Then every sublayer is
    linear, and its biases and the outputs of MLPs are sources, whose paths start with length 0. The output is
    `last_hidden_state`, after the last norm of models that have one.

    Metrics: `projection` (inner product with the output over its squared norm), `norm_ratio`, `cosine`,
    `relative_residual` of the part itself; cosine and residual of a zero part are NaN. `reconstruction_error`, in rows
    without length, layer or head, is the relative distance of the sum of all lengths from the output; for layers and heads,
    whose sum is not the output, it is the largest such distance of one sublayer. A large error is raised.

    Returns a long table with the columns `model, length, example, metric, value`, with `layer` or `layer, head` instead of
    `length`.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import path_lengths
    >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> batch = {"input_ids": torch.arange(1, 33)[None]}
    >>> table = path_lengths(model, batch)
    >>> shares = table[table.metric == "projection"].set_index("length").value
    >>> shares.index.tolist(), bool(abs(shares.sum() - 1) < 1e-5)
    ([0, 1, 2], True)
    """
    labels = {"length": ["length"], "layer": ["layer"], "head": ["layer", "head"]}
    if not isinstance(by, str) or by not in labels:
        raise ValueError(f"`by` must be 'length', 'layer' or 'head', got {by!r}.")
    table = LongTable(model, *labels[by], "example")
    if loss and table.base is model:
        raise ValueError(f"{type(model).__name__} has no task head, and so no loss: give a model with a head.")
    for batch, mask, task_batch in table.task_batches(inputs, labels=loss):
        walker = Lengths() if by == "length" else Layers(heads=by == "head")
        result = walk(model, batch, walker)
        actual = working(result.last_hidden_state)
        output = drop_rows(actual, mask)
        for index, part in zip(walker.index(), walker.parts, strict=True):
            table.add(part_metrics(part, output, mask), **index)
        if loss:
            for index, metrics in losses(walker, TaskHead(model, result, task_batch), actual):
                table.add(metrics, **index)
        nowhere = dict.fromkeys(labels[by], pd.NA)
        table.add(checked(final_error(walker, actual, output, mask), model), **nowhere)
    return table.finish().astype(dict.fromkeys(labels[by], "Int64"))


def final_error(
    walker: Lengths | Layers, actual: torch.Tensor, output: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The relative distance of the decomposition from the model, (batch); consumes the parts of lengths."""
    if isinstance(walker, Layers):
        walker.arrive(actual)
        return walker.error
    total: Part = None
    while walker.parts:  # summed in the memory of the first
        total = added(total, walker.parts.pop(0))
    return relative_error(torch.zeros_like(output) if total is None else drop_rows(total, mask), output)


def losses(
    walker: Lengths | Layers, head: TaskHead, output: torch.Tensor
) -> Iterator[tuple[dict[str, int], dict[str, torch.Tensor]]]:
    """The loss on a part of the output, for every part of a walker."""
    total = torch.zeros_like(output)
    for index, part in zip(walker.index(), walker.parts, strict=True):
        own = torch.zeros_like(output) if part is None else part
        if isinstance(walker, Lengths):
            total += own
            kept = {"only": head.scores(own, needed=True), "up_to": head.scores(total, needed=True)}
            yield index, {f"{name}_{cut}": values for cut, found in kept.items() for name, values in found.items()}
        else:
            yield index, {"loss_without": head.scores(output - own, needed=True)["loss"]}


def each_path(steps: list[FrozenStep], states: torch.Tensor) -> Iterator[PathTerm]:
    """Every path of a frozen network, from the states at its beginning and from every source inside it."""
    identity = torch.eye(states.shape[1], dtype=states.dtype, device=states.device).expand(len(states), -1, -1)

    def follow(place: int, source: str, path: tuple[str, ...], matrix, term) -> Iterator[PathTerm]:
        if place == len(steps):
            yield PathTerm(source, " ".join(path), sum(part not in "0_" for part in path), matrix, term)
            return
        step = steps[place]
        taken = ("0",) if isinstance(step, FrozenAttention) else ()
        if step.skip:
            yield from follow(place + 1, source, path + taken, matrix, step.carry_(term.clone()))
        if isinstance(step, FrozenAttention):
            for head, update in enumerate(step.attend_heads(term)):
                longer = step.maps[:, head] @ matrix
                yield from follow(place + 1, source, (*path, str(head + 1)), longer, step.carry_(update))

    yield from follow(0, "embeddings", (), identity, states)
    before: tuple[str, ...] = ()
    for place, step in enumerate(steps):
        before += ("_",) if isinstance(step, FrozenAttention) else ()
        if step.source is not None:
            yield from follow(place + 1, step.name, before, identity, step.source)


def count_paths(steps: list[FrozenStep]) -> int:
    behind, total = 1, 0
    for step in reversed(steps):
        total += behind if step.source is not None else 0
        behind *= step.skip + (step.heads if isinstance(step, FrozenAttention) else 0)
    return total + behind


@probing
def path_terms(model: PreTrainedModel, inputs: Inputs, limit: int = 20_000) -> pd.DataFrame:
    """Every path through the heads of a small network, one by one; the sum of their terms is its output.

    Args:
        model, inputs: As in [`path_lengths`], which has an example.
        limit (`int`, *optional*, defaults to 20000): The largest number of paths; there are (H + 1)^L with skips.

    `path` has an entry for every layer: a head, counted from 1, or 0 for the skip, or `_` for layers before its `source`:
    the embeddings, or what a sublayer adds (its bias, the output of an MLP, the bias of a norm). Besides the metrics of
    [`path_lengths`] there are `row_sum_error`, the largest distance from one of a row sum of the path's map (the product of
    the maps of its heads), and `reconstruction_error`, in rows without a path.

    Returns a long table with the columns `model, source, path, length, example, metric, value`.
    """
    limit = whole("limit", limit, 1)
    table = LongTable(model, "source", "path", "length", "example")
    for batch, mask in table.batches(inputs):
        walker = Steps()
        output = drop_rows(working(walk(model, batch, walker).last_hidden_state), mask)
        if (count := count_paths(walker.steps)) > limit:
            raise ValueError(f"the network has {count} paths, above limit={limit}: use path_lengths, which sums them.")
        total: Part = None
        assert walker.states is not None
        for source, path, length, matrix, term in each_path(walker.steps, walker.states):
            deviation = (matrix.sum(-1) - 1).abs()
            if mask is not None:
                deviation = deviation.masked_fill(~mask.bool(), 0)
            metrics = {**part_metrics(term, output, mask), "row_sum_error": deviation.amax(-1)}
            table.add(metrics, source=source, path=path, length=length)
            total = term.clone() if total is None else total.add_(term)
        assert total is not None
        error = relative_error(drop_rows(total, mask), output)
        table.add(checked(error, model), source=None, path=None, length=pd.NA)
    return table.finish().astype({"length": "Int64"})
