"""A new token of a decoder of SmolLM2's shape whose keys and values are halved by a rank limit, at 4,096 tokens of context."""

import copy
import statistics
from collections.abc import Callable, Iterator

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.apart import apart
from benchmarks.timing import Row, at_most, median_ratio, timed
from hf_rankattn import RankCache, limit_rank


CONTEXT, WIDTH, HALF = 4096, 64, 32
# SmolLM2-135M; the weights are random, because times do not depend on them
SHAPE = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True},
}


def decoder(layers: int = 30, width: int | None = None, source: LlamaForCausalLM | None = None) -> LlamaForCausalLM:
    """The model, limited to `width` for keys and values if it is given; weights are those of `source`."""
    if source is None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": layers})).eval()
    else:
        model = copy.deepcopy(source, {id(weight): weight for weight in source.parameters()})
    if width is not None:
        batch = {"input_ids": torch.randint(SHAPE["vocab_size"], (1, 64))}
        limit_rank(model, width, width, calibration=batch, objective="components")
    return model


def filled(cache: Cache, tokens: int, chunk: int) -> Cache:
    """A cache with random keys and values of whole width, as a prompt of this length leaves it."""
    layers = len(cache.layers)
    with torch.no_grad():
        for _ in range(0, tokens, chunk):
            for layer in range(layers):
                cache.update(torch.randn(1, 3, chunk, WIDTH), torch.randn(1, 3, chunk, WIDTH), layer)
    return cache


def step(model: LlamaForCausalLM, cache: Cache | None) -> Callable[[], object]:
    """One new token after a context, or without one if there is no cache."""
    token = torch.tensor([[5]])

    def run() -> None:
        with torch.no_grad():
            own = DynamicCache(config=model.config) if cache is None else cache
            model(token, past_key_values=own, use_cache=True)

    return run


def growth(width: int | None, start: int, end: int) -> float:
    """Resident bytes per token by which a cache of one layer grows between two lengths; run in a process of its own."""
    model = decoder(layers=1, width=width)
    cache = filled(DynamicCache(config=model.config) if width is None else RankCache(model), start, 256)
    before = resident()
    filled(cache, end - start, 256)
    return (resident() - before) / (end - start)


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


def run(repeats: int) -> Iterator[Row]:
    whole = decoder()
    models = {"halved": decoder(width=HALF, source=whole), "full": decoder(width=WIDTH, source=whole)}
    caches: dict[str, Cache] = {name: filled(RankCache(model), CONTEXT, CONTEXT) for name, model in models.items()}
    caches["whole"] = filled(DynamicCache(config=whole.config), CONTEXT, CONTEXT)
    runs = {name: step(models.get(name, whole), cache) for name, cache in caches.items()}
    times = timed({**runs, "no context": step(whole, None)}, 2 * repeats, most=30.0)
    medians = {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
    where = f"at {CONTEXT} tokens, keys and values halved"
    against = "the whole model and a DynamicCache"

    note = ", ".join(f"{name}: {medians[name]:.1f} ms" for name in ("halved", "full", "whole", "no context"))
    yield at_most(f"a new token {where}", against, median_ratio(times, "halved", "whole"), 0.85, note)
    yield at_most(f"a new token {where}", "RankCache at full width", median_ratio(times, "halved", "full"), 0.95)
    alone = {name: [a - b for a, b in zip(times[name], times["no context"], strict=True)] for name in times}
    ratio = statistics.median(alone["halved"]) / statistics.median(alone["whole"])
    yield at_most(f"a new token less one without context, {where}", against, ratio, 0.65)

    tokens = caches["halved"].get_seq_length()
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches["whole"].layers)  # type: ignore[union-attr]
    ours = caches["halved"].nbytes  # type: ignore[attr-defined]
    per_token = f"{ours / tokens:.0f} and {kept / caches['whole'].get_seq_length():.0f} bytes"
    ratio = ours / tokens / (kept / caches["whole"].get_seq_length())
    yield at_most("bytes of a cache per token, keys and values halved", against, ratio, 0.5, per_token).counted()
    grown = [apart(growth, width, 8192, 65536) for width in (HALF, None)]
    note = f"{grown[0]:.0f} and {grown[1]:.0f} bytes"
    yield at_most("growth of the process per token and layer", "a DynamicCache", grown[0] / grown[1], 0.6, note)
