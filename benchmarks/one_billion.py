"""The memory that measuring takes for a model of a billion weights."""

from collections.abc import Iterator

import torch
from transformers import AutoModel, LlamaConfig

from benchmarks.apart import apart
from benchmarks.measure import ids
from benchmarks.memory import high_water_mark
from benchmarks.timing import Row, at_most
from hf_rankattn.probe.survey import survey


def peak_and_weights() -> tuple[float, float, int]:
    """Peak resident megabytes of all of `rankattn measure` on a Llama shape of 1.2 billion bfloat16 weights, those of its
    weights, and their number."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=16, vocab_size=128256, dtype=torch.bfloat16)
    with torch.device("meta"):
        empty = AutoModel.from_config(config)
    model = empty.to_empty(device="cpu").eval()
    random = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        weight.data.fill_(1) if name.endswith("norm.weight") else weight.data.normal_(std=0.02, generator=random)
    model.rotary_emb = type(model.rotary_emb)(config)  # its buffers are computed, not stored
    survey(model, [ids(8, 128)])
    bytes_held = sum(weight.nbytes for weight in model.parameters())
    return high_water_mark(reset=False), bytes_held / 2**20, model.num_parameters()


def run(repeats: int) -> Iterator[Row]:
    """Minutes of computation, so only when asked for; memory does not depend on the repeats."""
    peak, held, count = apart(peak_and_weights, threads=2)
    note = f"{peak / 1024:.1f} GB; {count / 1e9:.2f} billion weights take {held / 1024:.1f}"
    what = "survey of a Llama shape in bfloat16, 8 x 128, peak of the process"
    yield at_most(what, "12 GB", peak / 1024 / 12, 1.0, note)
