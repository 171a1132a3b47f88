"""Single paths as separate sub-networks, as the paper on rank collapse evaluated them; they are no terms of the output."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from ..checks import whole
from ..families.architectures import attention_of, base_of, family_of, layers_of
from ..families.projections import submodule
from ..files.running import Inputs, evaluating
from ..measure import relative_residual
from ..measure.norms import working
from ..measure.residual import Center
from .ablate import Depth, ablate, first
from .batches import plain_output, probing
from .frozen import FrozenAttention, FrozenStep, decomposable, norm_on, walk
from .tables import LongTable, examples_of
from .task_head import TaskHead


def draw_paths(heads: Sequence[int], length: int, paths: int, seed: Sequence[int]) -> np.ndarray:
    """Random paths (paths, layers): a head for each layer, with replacement, and -1 for all but `length` layers."""
    random = np.random.default_rng(np.random.SeedSequence(seed))
    chosen = np.stack([random.integers(count, size=paths) for count in heads], axis=1)
    for row in chosen:
        row[random.choice(len(heads), size=len(heads) - length, replace=False)] = -1
    return chosen


def head_counts(model: PreTrainedModel) -> list[int]:
    read = decomposable(model).projections.query_key
    return [len(read(layer, model.config)[0]) for layer in layers_of(model)]


def bare_norm(module: nn.Module | None, states: torch.Tensor) -> torch.Tensor:
    """A norm without its gain and bias."""
    if module is None or isinstance(module, nn.Identity):
        return states
    norm, wide = norm_on(module, states), working(states)
    wide = wide - wide.mean(-1, keepdim=True) if norm.center else wide
    return (wide * norm.inverse).to(states.dtype)


class SubNetworks:
    """Hooks that send every row of a batch along its own path: one head in each layer, or around the layer."""

    def __init__(self, model: PreTrainedModel, chosen: torch.Tensor, stack: ExitStack):
        self.family, self.chosen, layers = family_of(model), chosen, layers_of(model)
        self.depth = Depth(base_of(model), layers, stack)
        self.heads = head_counts(model)
        for layer in dict.fromkeys(layers):
            self.select(layer, attention_of(model, layer), stack)
            if (norm := submodule(layer, self.family.attention_norm)) is not None:
                stack.callback(norm.register_forward_hook(lambda m, args, output: bare_norm(m, args[0])).remove)

    def chosen_heads(self, context: torch.Tensor) -> torch.Tensor:
        """Concatenated heads (batch, n, heads * v) with all but the chosen one of each row set to zero."""
        heads = self.heads[self.depth.layer]
        chosen = self.chosen[:, self.depth.layer, None].to(context.device)
        keep = torch.arange(heads, device=context.device) == chosen
        return (context.unflatten(-1, (heads, -1)) * keep[:, None, :, None]).flatten(-2)

    def select(self, layer: nn.Module, attention: Any, stack: ExitStack) -> None:
        if self.family.projections.output is not None:
            output = submodule(layer, self.family.projections.output)
            hook = lambda m, args: (self.chosen_heads(args[0]), *args[1:])  # noqa: E731
            stack.callback(output.register_forward_pre_hook(hook).remove)
            return
        inner = attention.post_attention

        def post_attention(states, context, *args, **kwargs):  # XLNet's (n, batch, heads, v)
            kept = self.chosen_heads(context.flatten(2).transpose(0, 1)).transpose(0, 1)
            return inner(states, kept.unflatten(-1, context.shape[2:]), *args, **kwargs)

        attention.post_attention = post_attention
        stack.callback(delattr, attention, "post_attention")

    def bypass(self, module, args, kwargs, output):
        """The rows whose path goes around a layer stay as they were."""
        states = args[0] if args else kwargs["hidden_states"]
        used = (self.chosen[:, self.depth.layer] >= 0).to(states.device)
        used = used[:, None, None] if self.family.batch_first else used[None, :, None]
        kept = torch.where(used, first(output), states)
        return (kept, *output[1:]) if isinstance(output, tuple) else kept


def sum_of_paths(model: PreTrainedModel, batch: dict, chosen: np.ndarray, mlp: bool):
    """The output of the base model on all paths, and the normalised sum of their states."""
    base, count = base_of(model), len(chosen)
    size = examples_of(batch)
    rows = torch.from_numpy(chosen).repeat_interleave(size, dim=0)
    whole_rows = {name: value.expand(size, *value.shape[1:]) for name, value in batch.items()}
    repeated = {name: value.repeat(count, *[1] * (value.ndim - 1)) for name, value in whole_rows.items()}
    with evaluating(base), ExitStack() as stack:
        # before `ablate`, whose hooks may read the output of a norm, which has to be without gain and bias
        networks = SubNetworks(model, rows, stack)
        stack.enter_context(ablate(model, attention_skip=True, mlp=not mlp))
        for layer in dict.fromkeys(layers_of(model)):  # after `ablate`, which looks at what the layers return
            stack.callback(layer.register_forward_hook(networks.bypass, with_kwargs=True).remove)
        result = base(**repeated, **plain_output(base))
    total = result.last_hidden_state.unflatten(0, (count, size)).sum(0)
    return result, bare_norm(submodule(layers_of(model)[-1], family_of(model).attention_norm), total)


@probing
def isolated_paths(
    model: PreTrainedModel, inputs: Inputs, paths: int = 5, repetitions: int = 5, mlp: bool = False, seed: int = 0
) -> pd.DataFrame:
    """Single paths, each run as a separate network, as in the published experiments on path effectiveness.

    Args:
        model: A model of a family whose layers normalise after they add; losses need a task head.
        inputs: As in [`measure_collapse`], which has an example; losses need labels.
        paths (`int`, *optional*, defaults to 5): How many paths of each length are summed; the paper has 5 and 20.
        repetitions (`int`, *optional*, defaults to 5): The number of draws.
        mlp (`bool`, *optional*): Keep the MLPs of the layers that a path uses, with their skips and norms.
        seed (`int`, *optional*, defaults to 0): Of the draws.

    These are **not** the terms of the decomposition ([`path_terms`], [`path_lengths`]): each path is a separate network
    that starts at the embeddings, with one random head in each of k random layers, without skips, and with attention
    recomputed on its own states; norms have no gain and bias. The last states of all paths are summed, normalised, and
    given to the task head.

    Metrics: `relative_residual` of the sum; with labels `loss`, and `accuracy` where labels are classes.
    Returns a long table with the columns `model, length, repetition, example, metric, value`.
    """
    if any(map(decomposable(model).pre_norm, layers_of(model))):
        raise ValueError("isolated paths need layers that normalise after they add, and these normalise before.")
    paths, repetitions, seed = whole("paths", paths, 1), whole("repetitions", repetitions, 1), whole("seed", seed, 0)
    heads, table = head_counts(model), LongTable(model, "length", "repetition", "example")
    for batch, mask, task_batch in table.task_batches(inputs):
        for length in range(len(heads) + 1):
            for repetition in range(repetitions):
                chosen = draw_paths(heads, length, paths, [seed, length, repetition])
                result, states = sum_of_paths(model, batch, chosen, mlp)
                metrics = {"relative_residual": relative_residual(states, mask)}
                if table.base is not model:
                    metrics |= TaskHead(model, result, task_batch).scores(states)
                table.add(metrics, length=length, repetition=repetition)
    return table.finish().astype({"length": "Int64"})


class Products:
    """The products of the maps along drawn paths, with later layers on the left, or on the right if `reverse`."""

    def __init__(self, chosen: np.ndarray, examples: np.ndarray, reverse: bool = False):
        self.chosen, self.examples, self.reverse, self.depth = chosen, examples, reverse, 0
        self.products: list[torch.Tensor | None] = [None] * len(chosen)

    def start(self, states: torch.Tensor) -> None: ...

    def step(self, step: FrozenStep, stream: torch.Tensor) -> None:
        if not isinstance(step, FrozenAttention):
            return
        for place, (example, head) in enumerate(zip(self.examples, self.chosen[:, self.depth], strict=True)):
            if head >= 0:
                maps, product = step.maps[example, head], self.products[place]
                if product is None:
                    self.products[place] = maps.clone()
                else:
                    self.products[place] = product @ maps if self.reverse else maps @ product
        self.depth += 1


@probing
def path_products(
    model: PreTrainedModel,
    inputs: Inputs,
    lengths: Sequence[int] | None = None,
    samples: int = 100,
    seed: int = 0,
    reverse: bool = False,
    center: Center = "mean",
) -> pd.DataFrame:
    """The distance from rank one of the product of attention maps along random paths, by the length of the path.

    Args:
        model, inputs: As in [`measure_collapse`], which has an example.
        lengths (`Sequence[int]`, *optional*): How many layers a path has; 1 to L by default.
        samples (`int`, *optional*, defaults to 100): Random paths of each length, in each batch.
        seed (`int`, *optional*, defaults to 0): Of the draws.
        reverse (`bool`, *optional*):
            Multiply with later layers on the right, as the published code does; in a path they are on the left.
        center (`str`, *optional*, defaults to `"mean"`): What is subtracted from a product, see [`residual`].

    The maps are those of the whole model. A product of row-stochastic maps approaches rank one at a geometric rate, not at
    the doubly exponential rate of the states of pure attention.

    Returns a long table with the columns `model, length, path, example, metric, value`; `path` counts the draws.
    """
    heads = head_counts(model)
    wanted = range(1, len(heads) + 1) if lengths is None else lengths
    samples, seed = whole("samples", samples, 1), whole("seed", seed, 0)
    within = isinstance(wanted, Sequence) and wanted and all(length in range(1, len(heads) + 1) for length in wanted)
    if not within:
        raise ValueError(f"`lengths` must be a list of whole numbers within 1 and {len(heads)}, got {lengths!r}.")
    table = LongTable(model, "length", "path", "example")
    for number, (batch, mask) in enumerate(table.batches(inputs)):
        chosen = np.concatenate([draw_paths(heads, length, samples, [seed, number, length]) for length in wanted])
        examples = np.random.default_rng(np.random.SeedSequence([seed, number])).integers(
            examples_of(batch), size=len(chosen)
        )
        walker = Products(chosen, examples, reverse)
        walk(model, batch, walker)
        for place, (product, example) in enumerate(zip(walker.products, map(int, examples), strict=True)):
            assert product is not None
            value = relative_residual(product, None if mask is None else mask[example], center).item()
            labels = {"length": wanted[place // samples], "path": place % samples, "example": table.offset + example}
            table.rows.append({**labels, "metric": "relative_residual", "value": value})
    return table.finish().astype({"length": "Int64"})
