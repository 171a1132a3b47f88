"""The long table that every probe returns, filled batch by batch."""

from collections.abc import Iterator, Mapping

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..families.architectures import base_of
from ..files.running import Inputs, batches_of, forward_names
from .batches import PACKED, real_tokens


TEXTS = ("input_ids", "inputs_embeds", "decoder_input_ids")


class LongTable:
    """Collects metrics. `labels` are the columns between `model` and `metric`; `example` counts over all batches."""

    def __init__(self, model: PreTrainedModel, *labels: str):
        self.model, self.base, self.labels, self.offset = model, base_of(model), labels, 0
        self.sizes: set[int] = set()
        self.rows: list[dict] = []
        self.frames: list[pd.DataFrame] = []

    def batches(self, inputs: Inputs) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor | None]]:
        """Each batch with the inputs of the base model, and its mask, see [`real_tokens`]."""
        for batch, mask, _ in self.task_batches(inputs, labels=False):
            yield batch, mask

    def task_batches(self, inputs: Inputs, labels: bool = True) -> Iterator[tuple[dict, torch.Tensor | None, dict]]:
        """As `batches`, with a third entry: the same batch for the whole model, where `labels` are wanted."""
        accepted = forward_names(self.base)
        for whole in batches_of(self.model if labels else self.base, inputs):
            batch = {name: value for name, value in whole.items() if name in accepted}
            self.sizes = {len(value) for value in batch.values()}
            yield batch, real_tokens(self.base, batch), whole
            self.offset += examples_of(batch)

    def add(self, metrics: Mapping[str, torch.Tensor], **labels) -> None:
        """Add a row for every metric and example of values (batch)."""
        for values in metrics.values():
            self.check_examples(len(values))
        self.rows += [
            {**labels, "example": self.offset + example, "metric": metric, "value": value}
            for metric, values in metrics.items()
            for example, value in enumerate(values.cpu().double().tolist())
        ]

    def add_heads(self, metrics: Mapping[str, torch.Tensor], layer: int, spectrum: torch.Tensor | None = None) -> None:
        """Add metrics (batch, heads) or (heads) of a layer; with a spectrum (..., r), the energy share of each component."""
        *examples, heads = next(iter(metrics.values())).shape
        for count in examples:
            self.check_examples(count)
        levels = {"example": range(self.offset, self.offset + examples[0])} if examples else {}
        levels["head"] = range(heads)
        index = pd.MultiIndex.from_product(levels.values(), names=list(levels))
        columns = {name: value.flatten().cpu().double().numpy() for name, value in metrics.items()}
        frames = [pd.DataFrame(columns, index=index).rename_axis(columns="metric").stack()]
        if spectrum is not None:
            energy = spectrum.square()
            total = energy.sum(-1, keepdim=True).clamp(min=torch.finfo(energy.dtype).tiny)  # logits can be all zero
            share = (energy / total).flatten(0, -2).cpu().double().numpy()
            frames.append(pd.DataFrame(share, index=index).rename_axis(columns="component").stack())
        tables = [frame.rename("value").reset_index() for frame in frames]
        tables[1:] = [table.assign(metric="energy_share") for table in tables[1:]]
        self.frames += [table.assign(layer=layer) for table in tables]

    def check_examples(self, count: int) -> None:
        """Refuse layers that fold tokens into the batch, because their rows are of no single example."""
        if self.sizes and count not in self.sizes:
            raise ValueError(
                f"the layers of {type(self.base).__name__} run on {count} rows, and the batch has {max(self.sizes)} examples: parts of "
                "an example are kept apart there, and cannot be measured together."
            )

    def finish(self) -> pd.DataFrame:
        """The table, with further columns of the rows after `value`."""
        table = pd.concat(self.frames, ignore_index=True) if self.frames else pd.DataFrame(self.rows)
        front = ["model", *self.labels, "metric", "value"]
        table["model"] = self.model.config.model_type
        return table[[*front, *(name for name in table if name not in front)]]


def examples_of(batch: Mapping[str, torch.Tensor]) -> int:
    """The number of examples of a batch; `position_ids` may have one row for all of them, and texts have several images."""
    if any(name in batch for name in TEXTS):
        return next(len(batch[name]) for name in TEXTS if name in batch)
    return 1 if any(name in batch for name in PACKED) else max(len(value) for value in batch.values())
