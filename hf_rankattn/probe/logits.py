"""How much of its query-key rank a model uses: the spectra of the logits of its heads on given tokens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..families.architectures import attention_of, family_of, layers_of
from ..files.running import Inputs, evaluating
from ..measure import factor_spectrum
from ..measure.spectrum import spectrum_metrics
from .batches import check_attending, probing, run
from .interface import LIMIT, Attended, showing_layers
from .tables import LongTable
from .weights import limit_of, rank_limit


Record = Callable[[torch.Tensor, torch.Tensor], None]


class LayerLogits:
    """The spectra of each layer's row-centred logits, from queries and keys, which are not kept."""

    def __init__(self, mask: torch.Tensor | None):
        self.mask = mask
        self.rows: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self.tokens = 0

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> None:
        if not bool(torch.isfinite(query).all() & torch.isfinite(key).all()):
            raise ValueError(f"the logits of layer {len(self.rows)} hold NaN or Inf. Check the weights of the model.")
        spectrum = factor_spectrum(query.detach(), key.detach(), center_rows=True, mask=self.mask)
        self.tokens = query.shape[-2]
        spread = spectrum.square().sum(-1).sqrt()
        spread = spread / self.lengths(spread)
        self.rows.append((spectrum, spread, query.shape[-1]))

    def lengths(self, like: torch.Tensor) -> torch.Tensor:
        """The real tokens of each example, (batch, 1)."""
        if self.mask is None:
            return torch.full_like(like[:, :1], self.tokens)
        return self.mask.sum(-1, keepdim=True).to(like)


@contextmanager
def recording(model: PreTrainedModel, record: Record) -> Iterator[None]:
    """Send queries and keys to `record` while the model runs, by the attention interface or by hooks of the family."""
    family = family_of(model)
    limited = any(LIMIT in module.__dict__ for module in model.modules())
    with ExitStack() as stack:
        if family.show_query_key is not None and not limited:
            for layer in dict.fromkeys(layers_of(model)):
                family.show_query_key(attention_of(model, layer), record, stack)
        else:

            def look(layer: int, seen: Attended) -> None:
                if not family.layers:  # what was read off the structure is compared with the maps
                    seen.check_maps(layer)
                record(*seen.factors())

            stack.enter_context(showing_layers(model, look, "sdpa" if family.layers else "eager"))
        yield


@probing
def measure_logits(
    model: PreTrainedModel, inputs: Inputs, rtol: float = 1e-2, energy: float = 0.9, spectra: bool = False
) -> pd.DataFrame:
    """Rank metrics of the row-centred logits of every layer, head and example.

    Args:
        model, inputs: As in [`measure_collapse`], which has an example. Padded rows and columns are dropped.
        rtol, energy, spectra (*optional*): As in [`measure_weights`].

    Softmax ignores a constant along a row, so the keys are centred over the tokens of their text. Queries and keys include
    biases, norms and rotary positions; masks are ignored. For XLNet only the content term is measured, without the
    relative positions. Besides the rank metrics there are `rank_limit`, the largest rank for this geometry (for latent
    attention `min(qk_nope_head_dim, kv_lora_rank, q_lora_rank) + qk_rope_head_dim`), and `logit_std`, the root mean square
    of the row-centred logits: near 0 for maps that ignore content, above `sqrt(2 ln n)` for maps that are nearly hard.

    Returns a long table with the columns `model, layer, head, example, metric, value`.
    """
    table = LongTable(model, "layer", "head", "example", *(["component"] if spectra else []))
    rotated, listed = family_of(model).positions == "rotary positions", family_of(model).layers
    for batch, mask in table.batches(inputs):
        record = LayerLogits(mask)
        with evaluating(table.base), recording(model, record):
            run(model, batch)
        layers = check_attending(model, len(record.rows), "queries and keys")
        for layer, (spectrum, spread, width) in zip(layers, record.rows, strict=True):
            metrics = spectrum_metrics(spectrum, rtol, energy)
            metrics["logit_std"] = spread
            if listed:
                most = rank_limit(model.config, width, rotated)
            else:
                _, most = limit_of(attention_of(model, layers_of(model)[layer]), model.config, width, width)
            limit = torch.full_like(spread, most)
            # n centred rows have at most rank n - 1
            metrics["rank_limit"] = torch.minimum(limit, record.lengths(limit) - 1)
            table.add_heads(metrics, layer, spectrum if spectra else None)
    return table.finish()
