"""Single paths by themselves, as the paper on rank collapse evaluated them: sub-networks, not terms of the output."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel

from ..measure import relative_residual
from ..measure.norms import working
from ..measure.residual import Center
from ..theory.inputs import whole
from .ablate import Depth, ablate, first
from .architectures import base_of, family_of, layers_of, sublayers_of, submodule
from .batches import Inputs, batches_of, evaluating, plain, real_tokens
from .frozen import FrozenAttention, FrozenStep, norm_on, plain_output, walk
from .paths import long_table, plain_batches, rows_of
from .task_head import TaskHead, task_batches


def draw_paths(heads: Sequence[int], length: int, paths: int, seed: Sequence[int]) -> np.ndarray:
    """Random paths (paths, layers): a head for each layer, with replacement, and -1 for all but `length` layers."""
    random = np.random.default_rng(np.random.SeedSequence(seed))
    chosen = np.stack([random.integers(count, size=paths) for count in heads], axis=1)
    for row in chosen:
        row[random.choice(len(heads), size=len(heads) - length, replace=False)] = -1
    return chosen


def head_counts(model: PreTrainedModel) -> list[int]:
    family = family_of(model)
    if not (layers := layers_of(model)):
        raise ValueError(
            f"{type(model).__name__} has no layers, and so no paths: give one with num_hidden_layers > 0."
        )
    attentions = [submodule(layer, family.attention) for layer in layers]
    return [len(family.query_key(attention, model.config)[0]) for attention in attentions]


def bare_norm(module: nn.Module | None, states: torch.Tensor) -> torch.Tensor:
    """A norm without its gain and bias."""
    if module is None or isinstance(module, nn.Identity):
        return states
    norm, wide = norm_on(module, states), working(states)
    wide = wide - wide.mean(-1, keepdim=True) if norm.center else wide
    return (wide * norm.inverse).to(states.dtype)


class SubNetworks:
    """Hooks under which every row of a batch goes through a path of its own: one head a layer, or past the layer."""

    def __init__(self, model: PreTrainedModel, chosen: torch.Tensor, stack: ExitStack):
        self.family, self.chosen = family_of(model), chosen
        layers, rows = layers_of(model), sublayers_of(model)
        self.depth = Depth(base_of(model), layers, stack)
        self.heads = head_counts(model)
        for layer in dict.fromkeys(layers):
            self.select(layer, rows.projection, stack)
            if (norm := submodule(layer, rows.attention_norm)) is not None:
                stack.callback(norm.register_forward_hook(lambda m, args, output: bare_norm(m, args[0])).remove)
            stack.callback(layer.register_forward_hook(self.bypass, with_kwargs=True).remove)

    def chosen_heads(self, context: torch.Tensor) -> torch.Tensor:
        """Heads side by side (batch, n, heads * v) with all but the chosen one of each row set to zero."""
        heads = self.heads[self.depth.layer]
        chosen = self.chosen[:, self.depth.layer, None].to(context.device)
        keep = torch.arange(heads, device=context.device) == chosen
        return (context.unflatten(-1, (heads, -1)) * keep[:, None, :, None]).flatten(-2)

    def select(self, layer: nn.Module, projection: str | None, stack: ExitStack) -> None:
        if projection is not None:
            module = submodule(layer, projection)
            hook = lambda m, args: (self.chosen_heads(args[0]), *args[1:])  # noqa: E731
            stack.callback(module.register_forward_pre_hook(hook).remove)  # type: ignore[union-attr]
            return
        attention = submodule(layer, self.family.attention)
        inner: Callable = attention.post_attention  # type: ignore[union-attr,assignment]

        def post_attention(states, context, *args, **kwargs):  # XLNet's (n, batch, heads, v)
            kept = self.chosen_heads(context.flatten(2).transpose(0, 1)).transpose(0, 1)
            return inner(states, kept.unflatten(-1, context.shape[2:]), *args, **kwargs)

        attention.post_attention = post_attention  # type: ignore[union-attr,assignment]
        stack.callback(delattr, attention, "post_attention")

    def bypass(self, module, args, kwargs, output):
        states = args[0] if args else kwargs["hidden_states"]
        used = (self.chosen[:, self.depth.layer] >= 0).to(states.device)
        used = used[:, None, None] if self.family.batch_first else used[None, :, None]
        kept = torch.where(used, first(output), states)
        return (kept, *output[1:]) if isinstance(output, tuple) else kept


def examples_of(batch: dict) -> int:
    """How many examples a batch has, in which positions may be one row for all."""
    return max(len(value) for value in batch.values())


def sum_of_paths(model: PreTrainedModel, batch: dict, chosen: np.ndarray, mlp: bool):
    """What the base model returns for the last of some paths, and the normalised sum of the states of all of them."""
    base, count = base_of(model), len(chosen)
    size = examples_of(batch)
    rows = torch.from_numpy(chosen).repeat_interleave(size, dim=0)
    whole_rows = {name: value.expand(size, *value.shape[1:]) for name, value in batch.items()}
    repeated = {name: value.repeat(count, *[1] * (value.ndim - 1)) for name, value in whole_rows.items()}
    with evaluating(base), ablate(model, attention_skip=True, mlp=not mlp), ExitStack() as stack:
        SubNetworks(model, rows, stack)
        result = base(**repeated, **plain_output(base))
    total = result.last_hidden_state.unflatten(0, (count, size)).sum(0)
    return result, bare_norm(submodule(layers_of(model)[-1], sublayers_of(model).attention_norm), total)


def isolated_paths(
    model: PreTrainedModel,
    inputs: Inputs,
    paths: int = 5,
    repetitions: int = 5,
    mlp: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """What single paths do when each is run by itself, as in the published experiments on path effectiveness.

    Args:
        model: A model of a family whose layers normalise after they add; with a task head to have losses.
        inputs: One batch (a dict of tensors), a list of batches, or a DataLoader; with labels to have losses.
        paths (`int`, *optional*, defaults to 5): How many paths of each length are summed; the paper has 5 and 20.
        repetitions (`int`, *optional*, defaults to 5): How often they are drawn.
        mlp (`bool`, *optional*): Keep the MLPs of the layers that a path uses, with their skips and norms.
        seed (`int`, *optional*, defaults to 0): Of the draws.

    These are **not** the terms of the decomposition ([`path_terms`], [`path_lengths`]): each path is a network of its own
    that starts at the embeddings, with one random head in each of k random layers, without skips, and with attention
    recomputed on its own states; norms have no gain and bias. The last states of all paths are summed, normalised, and
    given to the task head.

    Metrics: `relative_residual` of the sum; with labels `loss`, and `accuracy` where labels are classes.
    Returns a long table with the columns `model, length, repetition, example, metric, value`.

    Example:

    ```python
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import isolated_paths

    >>> shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = BertModel(BertConfig(**shape)).eval()
    >>> batch = {"input_ids": torch.arange(1, 33)[None]}
    >>> table = isolated_paths(model, batch, paths=5, repetitions=2)
    >>> sorted(table.length.unique().tolist()), table.metric.unique().tolist()
    ([0, 1, 2], ['relative_residual'])
    ```
    """
    model = plain(model)
    if any(map(sublayers_of(model).pre_norm, layers_of(model))):
        raise ValueError("isolated paths are those of layers that normalise after they add, and these do so before.")
    paths, repetitions, seed = whole("paths", paths, 1), whole("repetitions", repetitions, 1), whole("seed", seed, 0)
    heads, base = head_counts(model), base_of(model)
    rows, offset = [], 0
    for batch, task_batch in plain_batches(model, inputs) if base is model else task_batches(model, inputs):
        mask = real_tokens(base, batch)
        for length in range(len(heads) + 1):
            for repetition in range(repetitions):
                chosen = draw_paths(heads, length, paths, [seed, length, repetition])
                result, states = sum_of_paths(model, batch, chosen, mlp)
                metrics = {"relative_residual": relative_residual(states, mask)}
                if base is not model:
                    metrics |= TaskHead(model, result, task_batch).scores(states)
                rows += rows_of(metrics, offset, length=length, repetition=repetition)
        offset += len(states)
    return long_table(model, rows, ["length", "repetition"])


class Products:
    """The products of the maps along drawn paths, later layers on the left, or on the right, while the model runs."""

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


def path_products(
    model: PreTrainedModel,
    inputs: Inputs,
    lengths: Sequence[int] | None = None,
    samples: int = 100,
    seed: int = 0,
    reverse: bool = False,
    center: Center = "mean",
) -> pd.DataFrame:
    """How near to rank one the product of the attention maps along a random path is, by the length of the path.

    Args:
        model: A model of a family in the table of architectures.
        inputs: One batch (a dict of tensors), a list of batches, or a DataLoader. `attention_mask` is honoured.
        lengths (`Sequence[int]`, *optional*): How many layers a path has; 1 to L by default.
        samples (`int`, *optional*, defaults to 100): Random paths of each length, in each batch.
        seed (`int`, *optional*, defaults to 0): Of the draws.
        reverse (`bool`, *optional*):
            Multiply with later layers on the right, as the published code does; in a path they are on the left.
        center (`str`, *optional*, defaults to `"mean"`): What is taken away from a product, see [`residual`].

    The maps are those of the whole model. A product of row-stochastic maps forgets its input at a geometric rate, not the
    doubly exponential one of the states of pure attention.

    Returns a long table with the columns `model, length, path, example, metric, value`; `path` counts the draws.

    Example:

    ```python
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import path_products

    >>> shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = BertModel(BertConfig(**shape)).eval()
    >>> batch = {"input_ids": torch.arange(1, 33)[None]}
    >>> table = path_products(model, batch, samples=20)
    >>> medians = table.groupby("length").value.median()
    >>> bool(medians[2] < medians[1] < 1)
    True
    ```
    """
    model = plain(model)
    heads = head_counts(model)
    wanted = range(1, len(heads) + 1) if lengths is None else lengths
    samples, seed = whole("samples", samples, 1), whole("seed", seed, 0)
    within = isinstance(wanted, Sequence) and wanted and all(length in range(1, len(heads) + 1) for length in wanted)
    if not within:
        raise ValueError(f"`lengths` must be a list of whole numbers within 1 and {len(heads)}, got {lengths!r}.")
    rows, offset = [], 0
    for number, batch in enumerate(batches_of(base_of(model), inputs)):
        size, mask = examples_of(batch), real_tokens(base_of(model), batch)
        chosen = np.concatenate([draw_paths(heads, length, samples, [seed, number, length]) for length in wanted])
        examples = np.random.default_rng(np.random.SeedSequence([seed, number])).integers(size, size=len(chosen))
        walker = Products(chosen, examples, reverse)
        walk(model, batch, walker)
        for path, (length, value) in enumerate(product_residuals(walker, wanted, samples, mask, center)):
            labels = {"length": length, "path": path % samples, "example": offset + int(examples[path])}
            rows.append({**labels, "metric": "relative_residual", "value": value})
        offset += size
    return long_table(model, rows, ["length", "path"])


def product_residuals(
    walker: Products, lengths: Sequence[int], samples: int, mask: torch.Tensor | None, center: Center
) -> Iterator[tuple[int, float]]:
    for place, (product, example) in enumerate(zip(walker.products, walker.examples, strict=True)):
        assert product is not None
        own = None if mask is None else mask[example]
        yield lengths[place // samples], relative_residual(product, own, center).item()
