"""What measuring costs on top of running the model."""

import statistics
from collections.abc import Callable, Iterator

import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
)

from benchmarks.memory import live_peak
from benchmarks.timing import Row, at_most, median_ratio, timed
from hf_rankattn import ablate, measure_attention, measure_collapse
from hf_rankattn.probe.collapse import VARIANTS


LAYERS = 4
HIDDEN = 768


def bert(layers: int, positions: int = 512, implementation: str = "sdpa") -> BertModel:
    config = BertConfig(
        num_hidden_layers=layers, max_position_embeddings=positions, attn_implementation=implementation
    )
    return BertModel(config, add_pooling_layer=False).eval()


def gpt2(layers: int, implementation: str = "sdpa") -> GPT2Model:
    return GPT2Model(GPT2Config(n_layer=layers, attn_implementation=implementation)).eval()


def llama(layers: int, implementation: str = "sdpa") -> LlamaModel:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, attn_implementation=implementation)
    return LlamaModel(config).eval()


def ids(examples: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(30000, (examples, length), generator=torch.Generator().manual_seed(0))}


def ablated_forwards(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for switches in VARIANTS.values():
            with torch.no_grad(), ablate(model, **switches):
                model(**batch)

    return run


def eager_forward(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(**batch)

    return run


def bare_spectra(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """An eager forward, and one singular-value call a layer on its maps: the least that the full set can cost."""

    def run() -> None:
        with torch.no_grad():
            for maps in model(**batch, output_attentions=True).attentions:
                torch.linalg.svdvals(maps)

    return run


def collapse(repeats: int) -> Iterator[Row]:
    model, batch = bert(LAYERS), ids(8, 128)
    runs = {"ours": lambda: measure_collapse(model, batch), "forwards": ablated_forwards(model, batch)}
    times = timed(runs, repeats)
    milliseconds = f"{statistics.median(times['ours']) * 1e3:.0f} ms, {LAYERS} layers"
    ratio = median_ratio(times, "ours", "forwards")
    yield at_most("measure_collapse, 4 variants, 8 x 128", "the same ablated forwards", ratio, 1.05, milliseconds)
    states = 8 * 128 * HIDDEN * 4 / 2**20
    for layers in (2, 12):
        model = bert(layers)
        ours, forwards = live_peak(lambda: measure_collapse(model, batch)), live_peak(ablated_forwards(model, batch))  # noqa: B023
        note = f"{ours:.1f} against {forwards:.1f} MB; a layer of states is {states:.1f} MB"
        what = f"measure_collapse, {layers} layers, 8 x 128, extra peak memory"
        yield at_most(what, "one layer of hidden states", (ours - forwards) / states, 2.0, note).counted()


def attention(repeats: int) -> Iterator[Row]:
    model, batch = bert(LAYERS, implementation="eager"), ids(8, 128)
    runs = {
        "cheap": lambda: measure_attention(model, batch, "cheap"),
        "eager": eager_forward(model, batch),
        "full": lambda: measure_attention(model, batch, "full"),
        "bare": bare_spectra(model, batch),
    }
    times = timed(runs, repeats)
    cheap, full = median_ratio(times, "cheap", "eager"), median_ratio(times, "full", "bare")
    yield at_most("measure_attention, cheap, 8 x 128", "an eager forward", cheap, 1.25)
    yield at_most("measure_attention, full, 8 x 128", "eager forward + bare svdvals", full, 1.15)
    maps = 12 * 2048**2 * 4 / 2**20
    long, batch = bert(4, positions=2048, implementation="eager"), ids(1, 2048)
    ours, eager = live_peak(lambda: measure_attention(long, batch, "cheap")), live_peak(eager_forward(long, batch))
    note = f"{ours:.0f} against {eager:.0f} MB of the forward; a layer of maps is {maps:.0f} MB"
    what = "measure_attention, cheap, n = 2048, 4 layers, extra peak memory"
    yield at_most(what, "one layer of maps", (ours - eager) / maps, 1.0, note).counted()


def decoders(repeats: int) -> Iterator[Row]:
    """The same ratios on layers that add to the stream in their own code."""
    for name, make in {"GPT-2": gpt2, "Llama": llama}.items():
        model, eager, batch = make(LAYERS), make(LAYERS, "eager"), ids(8, 128)
        runs = {
            "collapse": lambda: measure_collapse(model, batch),  # noqa: B023
            "forwards": ablated_forwards(model, batch),
            "cheap": lambda: measure_attention(eager, batch, "cheap"),  # noqa: B023
            "eager": eager_forward(eager, batch),
            "full": lambda: measure_attention(eager, batch, "full"),  # noqa: B023
            "bare": bare_spectra(eager, batch),
        }
        times = timed(runs, repeats)
        shape = f"{name} shape, 8 x 128"
        ratio = median_ratio(times, "collapse", "forwards")
        yield at_most(f"measure_collapse, 4 variants, {shape}", "the same ablated forwards", ratio, 1.05)
        ratio = median_ratio(times, "cheap", "eager")
        yield at_most(f"measure_attention, cheap, {shape}", "an eager forward", ratio, 1.25)
        ratio = median_ratio(times, "full", "bare")
        yield at_most(f"measure_attention, full, {shape}", "eager forward + bare svdvals", ratio, 1.15)


def run(repeats: int) -> Iterator[Row]:
    yield from collapse(repeats)
    yield from decoders(repeats)
    yield from attention(repeats)
