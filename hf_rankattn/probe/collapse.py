"""How token states lose rank from layer to layer, with and without the parts that prevent it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..families.architectures import attending_layers, family_of, layers_of
from ..families.stream import states_of, tensors_in
from ..files.running import Inputs, evaluating
from ..measure import residual, token_cosine
from ..measure.norms import drop_rows, norm_of_sizes, working
from ..measure.spectrum import states_effective_rank
from .ablate import ablate
from .batches import check_depth, probing, run
from .tables import LongTable, examples_of


VARIANTS = {
    "san": {"attention_skip": True, "mlp": True},
    "san+mlp": {"attention_skip": True},
    "san+skip": {"mlp": True},
    "transformer": {},
}


def states_metrics(states: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """[`relative_residual`], the composite norm of [`residual`], and [`token_cosine`], computed in one buffer."""
    states = drop_rows(working(states), mask)
    buffer = residual(states, mask)
    left = norm_of_sizes(buffer.abs_())
    return {
        "relative_residual": left / norm_of_sizes(torch.abs(states, out=buffer)),
        "residual_norm": left,
        "token_cosine": token_cosine(states, mask),
    }


class LayerStates:
    """Hooks that reduce the states of each layer to metrics at once, and keep only those."""

    def __init__(
        self, model: PreTrainedModel, mask: torch.Tensor | None, stack: ExitStack, whole: bool, examples: int
    ):
        self.examples = examples
        self.family, self.mask, self.whole = family_of(model), mask, whole
        self.rows: list[dict[str, torch.Tensor]] = []
        for layer in dict.fromkeys(layers_of(model)):
            stack.callback(layer.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(self.leave).remove)

    def enter(self, module, args, kwargs) -> None:
        if not self.rows:
            self.reduce(states_of(args, kwargs))

    def leave(self, module, args, output) -> None:
        self.reduce(next(tensors_in(output)))

    def reduce(self, states: torch.Tensor) -> None:
        if states.ndim == 2:  # the patches of one image
            states = states[None]
        if states.ndim > 3:  # images as (batch, height, width, d)
            states = states.flatten(1, -2)
        if not self.family.layers and len(states) != self.examples == states.shape[1] and states.ndim == 3:
            raise ValueError(
                f"the states after layer {len(self.rows)} are {tuple(states.shape)}, tokens by examples: only layers whose states "
                "have the examples first are measured without a row in the table of architectures."
            )
        states = states if self.family.batch_first else states.transpose(0, 1)
        mask = None if self.mask is None else self.mask.to(states.device)
        metrics = states_metrics(states.detach(), mask)
        if not bool(torch.isfinite(metrics["relative_residual"]).all()):
            raise ValueError(
                f"the states after layer {len(self.rows)} hold NaN or Inf, or are all zero: there is no residual to "
                "measure. Check the weights of the model."
            )
        if self.whole:
            metrics["effective_rank"] = states_effective_rank(states.detach(), mask)
        self.rows.append(metrics)


@probing
def measure_collapse(
    model: PreTrainedModel, inputs: Inputs, variants: Sequence[str] = tuple(VARIANTS)
) -> pd.DataFrame:
    """Relative residual, residual norm and mean token cosine of every example at layers 0 (embeddings) to L.

    In decoders that read an encoder, cross-attention stays in all variants, with its skip connection. Of the whole model (the
    variant `"transformer"`) also `effective_rank`, that of the matrix of token states.

    Args:
        model: A model whose layers add attention and MLPs to a residual stream, of any type.
        inputs: One batch (a dict of tensors), a list of batches, or a DataLoader. `attention_mask` is honoured.
        variants (`Sequence[str]`, *optional*):
            Of `"san"` (attention alone), `"san+mlp"`, `"san+skip"` and `"transformer"` (the whole model).
        tower (`str`, *optional*):
            For a model with several lists of layers, which one: `"encoder"`, `"decoder"`, `"text"`, `"vision"`, ...

    Returns a long table with the columns `model, variant, layer, example, metric, value`.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import measure_collapse
    >>> model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)).eval()
    >>> batch = {"input_ids": torch.arange(1, 33)[None]}
    >>> table = measure_collapse(model, batch, variants=["san"])
    >>> table[table.metric == "relative_residual"].layer.tolist()
    [0, 1, 2]
    """
    if isinstance(variants, str) or not variants:
        raise ValueError(f"`variants` must be a list of names, got {variants!r}; there are {', '.join(VARIANTS)}.")
    if unknown := sorted(set(variants) - set(VARIANTS)):
        raise ValueError(f"unknown variants {unknown}; there are {', '.join(VARIANTS)}.")
    table = LongTable(model, "variant", "layer", "example")
    attending = attending_layers(model)
    # every batch is read once and measured in all variants, so generators and shuffling loaders work too
    for batch, mask in table.batches(inputs):
        for variant in dict.fromkeys(variants):
            switches: dict[str, Any] = VARIANTS[variant]
            # layers without softmax attention, those of hybrids, stay whole
            with evaluating(table.base), ablate(model, **switches, layers=attending), ExitStack() as stack:
                recorder = LayerStates(model, mask, stack, variant == "transformer", examples_of(batch))
                run(model, batch)
            check_depth(model, len(recorder.rows) - 1, "states")
            for layer, metrics in enumerate(recorder.rows):
                table.add(metrics, variant=variant, layer=layer)
    place = {variant: number for number, variant in enumerate(dict.fromkeys(variants))}
    return table.finish().sort_values("variant", key=lambda names: names.map(place), kind="stable", ignore_index=True)
