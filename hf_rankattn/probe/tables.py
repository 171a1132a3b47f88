"""Long tables from tensors of metrics."""

from collections.abc import Mapping

import pandas as pd
import torch
from transformers import PreTrainedModel


def head_rows(metrics: Mapping[str, torch.Tensor], offset: int, layer: int, spectrum: torch.Tensor | None = None):
    """Metrics (batch, heads) of one layer; examples count from `offset`. See [`index_rows`]."""
    examples, heads = next(iter(metrics.values())).shape
    index = pd.MultiIndex.from_product([range(offset, offset + examples), range(heads)], names=["example", "head"])
    return index_rows(metrics, index, spectrum).assign(layer=layer)


def index_rows(
    metrics: Mapping[str, torch.Tensor], index: pd.Index, spectrum: torch.Tensor | None = None
) -> pd.DataFrame:
    """A row per metric and entry of the index; with a spectrum (..., r) also the share of energy of each component."""
    columns = {name: value.flatten().cpu().double().numpy() for name, value in metrics.items()}
    wide = pd.DataFrame(columns, index=index).rename_axis(columns="metric")
    rows = wide.stack().rename("value").reset_index()
    if spectrum is None:
        return rows
    share = spectrum.square() / spectrum.square().sum(-1, keepdim=True)
    components = pd.RangeIndex(share.shape[-1], name="component")
    shares = pd.DataFrame(share.flatten(0, -2).cpu().double().numpy(), index=index, columns=components)
    return pd.concat([rows, shares.stack().rename("value").reset_index().assign(metric="energy_share")])


def joined(model: PreTrainedModel, frames: list[pd.DataFrame], *labels: str) -> pd.DataFrame:
    """One table of the frames, with the columns `model`, the labels, `metric` and `value`."""
    table = pd.concat(frames, ignore_index=True).assign(model=model.config.model_type)
    return table[["model", *labels, "metric", "value"]]


def rows_of(metrics: Mapping[str, torch.Tensor], offset: int, **labels) -> list[dict]:
    """A row for every metric and example of values (batch)."""
    return [
        {**labels, "example": offset + example, "metric": metric, "value": value}
        for metric, values in metrics.items()
        for example, value in enumerate(values.cpu().double().tolist())
    ]


def long_table(model: PreTrainedModel, rows: list[dict], labels: list[str]) -> pd.DataFrame:
    table = pd.DataFrame(rows).assign(model=model.config.model_type)
    for name in ("length", "layer", "head"):
        if name in table:
            table[name] = table[name].astype("Int64")
    return table[["model", *labels, "example", "metric", "value"]]
