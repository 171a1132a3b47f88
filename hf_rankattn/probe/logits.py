"""How much of its query-key rank a model uses: the spectra of the logits that its heads have on given tokens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import pandas as pd
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..measure import factor_spectrum
from ..measure.spectrum import spectrum_metrics
from .architectures import base_of, family_of, layers_of, submodule
from .attention import implementation
from .batches import Inputs, batches_of, evaluating, plain, real_tokens, run
from .weights import rank_limit, spectrum_rows


Record = Callable[[torch.Tensor, torch.Tensor], None]
_record: ContextVar[Record] = ContextVar("record")
NAME = "rankattn_logits"


def recording_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """torch's attention, which shows its queries (batch, heads, n, r) and keys, after all positions, to the probe."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _record.get()(query * scale, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1))
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(NAME, recording_attention)
# without a mask function of its own an attention function is given no mask, and padding is attended to in silence
AttentionMaskInterface.register(NAME, sdpa_mask)


class LayerLogits:
    """The spectra of each layer's row-centred logits, from queries and keys; neither is kept."""

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
    """Send queries and keys to `record` while the model runs, by the attention interface or by the family's own way."""
    family = family_of(model)
    with ExitStack() as stack:
        if family.logits is not None:
            for layer in dict.fromkeys(layers_of(model)):
                family.logits(submodule(layer, family.attention), record, stack)
        else:
            stack.enter_context(implementation(model, NAME))
            token = _record.set(record)
            stack.callback(_record.reset, token)
        yield


def measure_logits(
    model: PreTrainedModel, inputs: Inputs, rtol: float = 1e-2, energy: float = 0.9, spectra: bool = False
) -> pd.DataFrame:
    """Rank metrics of the row-centred logits of every layer, head and example.

    Args:
        model: A model of a family in the table of architectures.
        inputs: One batch (a dict of tensors), a list of batches, or a DataLoader. Padded rows and columns are dropped.
        rtol (`float`, *optional*, defaults to 0.01): Tolerance of `numerical_rank`, relative to the largest value.
        energy (`float`, *optional*, defaults to 0.9): The share of squared singular values that `energy_rank` keeps.
        spectra (`bool`, *optional*):
            Add a column `component`, and rows of the metric `energy_share`: the share of squared singular values of each
            component, in descending order.

    Softmax ignores what is constant along a row, so the keys are centred over the tokens of their text. Queries and keys
    are taken where they meet, after biases, norms and rotary positions; masks are left aside. Of XLNet's logits it is
    the content term, without that of the relative positions. Besides the rank metrics there are `rank_limit`, which the
    geometry allows (for latent attention `min(qk_nope_head_dim, kv_lora_rank, q_lora_rank) + qk_rope_head_dim`), and
    `logit_std`, the root mean square of the row-centred logits: near 0 for maps that look at no content, above
    `sqrt(2 ln n)` for maps that are nearly hard.

    Returns a long table with the columns `model, layer, head, example, metric, value`.

    Example:

    ```python
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from hf_rankattn import measure_logits

    >>> shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = BertModel(BertConfig(**shape)).eval()
    >>> batch = {"input_ids": torch.arange(1, 33)[None]}
    >>> table = measure_logits(model, batch)
    >>> table[table.metric == "rank_limit"].value.unique().tolist()
    [16.0]
    ```
    """
    model = plain(model)
    base, depth, frames, offset = base_of(model), len(layers_of(model)), [], 0
    for batch in batches_of(base, inputs):
        record = LayerLogits(real_tokens(base, batch))
        with evaluating(base), recording(model, record):
            run(base, batch)
        if len(record.rows) != depth:
            raise ValueError(
                f"{len(record.rows)} of the {depth} layers of {type(model).__name__} showed their queries and keys."
            )
        for layer, (spectrum, spread, width) in enumerate(record.rows):
            metrics = spectrum_metrics(spectrum, rtol, energy)
            metrics["logit_std"] = spread
            limit = torch.full_like(spread, rank_limit(model.config, width, rotated=True))
            # n rows less their mean have rank n - 1 at most
            metrics["rank_limit"] = torch.minimum(limit, record.lengths(limit) - 1)
            examples, heads = spread.shape
            index = pd.MultiIndex.from_product(
                [range(offset, offset + examples), range(heads)], names=["example", "head"]
            )
            frames.append(spectrum_rows(spectrum, metrics, index, spectra).assign(layer=layer))
        offset += examples
    table = pd.concat(frames, ignore_index=True).assign(model=model.config.model_type)
    columns = ["model", "layer", "head", "example", "metric", "value"]
    return table[[*columns[:4], "component", *columns[4:]] if spectra else columns]
