"""RankBertModel against stock BertModel, at BERT-base widths."""

from collections.abc import Iterator
from functools import partial

import torch
from transformers import BertConfig, BertModel

from benchmarks.timing import Row, at_most, median_ratio, timed
from hf_rankattn import RankBertConfig, RankBertModel


LAYERS = 2
SHAPES = ((8, 128), (2, 512))


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor], mode: str):
    def forward():
        with torch.no_grad():
            model(**batch)

    def forward_backward():
        model.zero_grad(set_to_none=True)
        model(**batch).last_hidden_state.sum().backward()

    model.train(mode == "forward+backward, dropout 0.1")
    return forward if mode == "forward" else forward_backward


def run(repeats: int) -> Iterator[Row]:
    torch.manual_seed(0)
    stock = BertModel(BertConfig(num_hidden_layers=LAYERS), add_pooling_layer=False)
    geometries = {
        "qk_rank=None": (1.02, RankBertConfig(num_hidden_layers=LAYERS)),
        "qk_rank=16 of 64": (1.00, RankBertConfig(num_hidden_layers=LAYERS, qk_rank=16)),
    }
    for batch_size, length in SHAPES:
        batch = {"input_ids": torch.randint(30522, (batch_size, length))}
        for mode in ("forward", "forward+backward", "forward+backward, dropout 0.1"):
            models = {name: RankBertModel(config, add_pooling_layer=False) for name, (_, config) in geometries.items()}
            runs = {name: step(model, batch, mode) for name, model in models.items()}
            times = timed({"stock": step(stock, batch, mode), **runs}, repeats)
            for name, (limit, _) in geometries.items():
                ratio = median_ratio(times, name, "stock")
                yield at_most(f"rank BERT {name}, n = {length}, {mode}", "stock BertModel", ratio, limit)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pad_to: int) -> torch.Tensor:
    query, key = (torch.nn.functional.pad(x, (0, pad_to - x.shape[-1])) for x in (query, key))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.25)


def kernels(repeats: int) -> Iterator[Row]:
    """Why queries and keys are padded to the width of the values on the CPU: what the bare kernel takes."""
    for batch_size, length in SHAPES:
        query, key = (torch.randn(batch_size, 12, length, 16) for _ in range(2))
        value = torch.randn(batch_size, 12, length, 64)
        runs = {name: partial(attend, query, key, value, width) for name, width in (("native", 16), ("padded", 64))}
        ratio = median_ratio(timed(runs, 3 * repeats), "padded", "native")
        yield at_most(f"sdpa, rank 16 padded to 64, n = {length}, forward", "sdpa on unequal widths", ratio, 1.0)
