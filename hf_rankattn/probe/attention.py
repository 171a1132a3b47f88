"""How much rank the attention maps of a model have, layer by layer and head by head."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Literal

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..families.architectures import attention_of, family_of, is_causal, layers_of
from ..files.running import Inputs, evaluating
from ..measure import cheap_metrics, spectral_metrics
from ..measure.spectrum import drop_padding
from .batches import check_attending, probing, run
from .interface import configs_of, implementation, showing_layers
from .tables import LongTable


MEASURES: dict[str, Callable[..., dict[str, torch.Tensor]]] = {"cheap": cheap_metrics, "full": spectral_metrics}
RELATIVE = ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "energy_rank")


@lru_cache(maxsize=256)
def content_free(n: int, metrics: str) -> dict[str, float]:
    """The metrics of the causal map that ignores content: row i is 1/i on its past."""
    maps = torch.tril(torch.ones(n, n, dtype=torch.float64)) / torch.arange(1, n + 1)[:, None]
    return {name: value.item() for name, value in MEASURES[metrics](maps).items()}


def shortest_window(model: PreTrainedModel) -> int | None:
    """The shortest sliding window that the configs of a model name; 1 where it differs between layers."""
    windows = []
    for config in configs_of(model):
        try:
            windows.append(getattr(config, "sliding_window", None))
        except Exception:  # transformers refuses to name one value for layers that differ
            return 1
    return min((window for window in windows if isinstance(window, int) and window), default=None)


class LayerMaps:
    """Reduces the maps of each layer to metrics at once, and keeps only those."""

    def __init__(self, model: PreTrainedModel, metrics: str, mask: torch.Tensor | None, stack: ExitStack):
        self.family, self.metrics, self.mask = family_of(model), metrics, mask
        self.causal = is_causal(model)
        self.window = shortest_window(model)
        self.rows: list[dict[str, torch.Tensor]] = []
        self.fresh = True
        if self.family.maps == "interface":
            stack.enter_context(showing_layers(model, lambda layer, seen: self.reduce(seen.maps), "eager"))
            return
        stack.enter_context(implementation(model, "eager"))
        for layer in dict.fromkeys(layers_of(model)):
            attention = attention_of(model, layer)
            if self.family.maps == "dropout":
                stack.callback(layer.register_forward_pre_hook(self.enter).remove)
                stack.callback(attention.dropout.register_forward_pre_hook(self.drop).remove)
            else:
                stack.callback(attention.register_forward_hook(self.leave).remove)

    def enter(self, module, args) -> None:
        self.fresh = True

    def drop(self, module, args) -> None:
        # XLNet's attention calls its dropout with the maps first, and then with its output
        if self.fresh:
            self.fresh = False
            self.reduce(args[0])

    def leave(self, module, args, output) -> None:
        self.reduce(output[1])

    def reduce(self, maps: torch.Tensor | None) -> None:
        mask = None if self.mask is None or maps is None else self.mask.to(maps.device)
        if maps is None or maps.ndim != 4:
            found = "nothing" if maps is None else f"a tensor of shape {tuple(maps.shape)}"
            raise ValueError(
                f"layer {len(self.rows)} gave {found} under eager attention, not maps (batch, heads, n, n): nothing can be measured."
            )
        if maps.shape[-1] != maps.shape[-2]:
            raise ValueError(
                f"the maps of layer {len(self.rows)} are of {maps.shape[-2]} tokens on {maps.shape[-1]} keys: only maps of tokens "
                "on themselves are measured."
            )
        try:
            values = MEASURES[self.metrics](maps.detach(), mask)
        except torch.linalg.LinAlgError:  # no singular values of NaN
            values = {"none": torch.tensor(torch.nan)}
        if not all(bool(torch.isfinite(value).all()) for value in values.values()):
            raise ValueError(f"the maps of layer {len(self.rows)} hold NaN or Inf. Check the weights of the model.")
        causal = self.causal
        if not self.family.layers and not causal:  # many causal models do not say so anywhere but in their masks
            causal = not bool(drop_padding(maps.detach(), mask)[0].triu(1).any())
        # a sliding window has a content-free map of its own
        if causal and not (self.window and self.window < maps.shape[-1]):
            lengths = [maps.shape[-1]] * len(maps) if self.mask is None else self.mask.bool().sum(-1).tolist()
            references = [content_free(length, self.metrics) for length in lengths]
            for name in [name for name in RELATIVE if name in values]:
                reference = torch.tensor([entry[name] for entry in references], device=maps.device)
                values[f"{name}_over_content_free"] = values[name] / reference[:, None].to(values[name].dtype)
        self.rows.append(values)


@probing
def measure_attention(
    model: PreTrainedModel, inputs: Inputs, metrics: Literal["cheap", "full"] = "cheap"
) -> pd.DataFrame:
    """Rank metrics of the attention map of every layer, head and example.

    Args:
        model, inputs: As in [`measure_collapse`], which has an example. Padded rows and columns are dropped.
        metrics (`str`, *optional*, defaults to `"cheap"`):
            `"full"` computes the singular values of every map ([`spectral_metrics`]); `"cheap"` needs none
            ([`cheap_metrics`]), and reports the error of its stable rank as a separate metric.

    A causal map has rank even if it ignores content, so for causal models each rank metric is also given as a multiple of
    that of the content-free map, under the name `..._over_content_free` (not with a sliding window shorter than the text).

    Returns a long table with the columns `model, layer, head, example, metric, value`.
    """
    if metrics not in MEASURES:
        raise ValueError(f"`metrics` must be 'cheap' or 'full', got {metrics!r}.")
    table = LongTable(model, "layer", "head", "example")
    for batch, mask in table.batches(inputs):
        with evaluating(table.base), ExitStack() as stack:
            recorder = LayerMaps(model, metrics, mask, stack)
            run(model, batch)
        for layer, values in zip(check_attending(model, len(recorder.rows), "maps"), recorder.rows, strict=True):
            table.add_heads(values, layer)
    return table.finish()
