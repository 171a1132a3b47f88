"""How costs grow: exponents fitted to seconds of CPU, beside those that the formulas have."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from transformers import BertConfig, BertModel

from benchmarks.measure import ids
from benchmarks.timing import Row, cpu_seconds, exponent
from hf_rankattn import convert_rank, measure_collapse, path_lengths, theory
from hf_rankattn.measure import cheap_metrics, spectral_metrics
from hf_rankattn.theory.agreement import AgreementProduct


REPEATS = 3
SHORT = 3.0
Make = Callable[[int], Callable[[], object]]


def small_bert(hidden: int, layers: int, positions: int = 512, widening: int = 4) -> BertModel:
    config = BertConfig(
        vocab_size=512,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=widening * hidden,
        max_position_embeddings=positions,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def tokens(examples: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(examples, length)["input_ids"] % 512}


def grown(
    what: str,
    expected: float,
    tolerance: float,
    sizes: Sequence[int],
    make: Make,
    formula: str,
    repeats: int = REPEATS,
) -> Row:
    """Fit the exponent of what `make(size)` returns: the least of some repeats for each size.

    All sizes take turns, so that a machine that is slow for a while is so for all of them; what is short is noisy, and is
    repeated until `SHORT` seconds have been spent.
    """
    runs = {size: make(size) for size in sizes}
    runs[sizes[0]]()  # what is done once in a process is no part of growth
    seconds = dict.fromkeys(sizes, math.inf)
    done, spent = 0, 0.0
    while done < repeats or spent < SHORT:
        for size, run in runs.items():
            took = cpu_seconds(run)
            seconds[size], spent = min(seconds[size], took), spent + took
        done += 1
    return exponent(what, expected, tolerance, sizes, [seconds[size] for size in sizes], formula)


def collapse_of_batch(examples: int) -> Callable[[], object]:
    return partial(measure_collapse, small_bert(256, 2), tokens(examples, 64), ["transformer"])


def collapse_of_length(length: int, hidden: int) -> Callable[[], object]:
    model = small_bert(hidden, 1, positions=length)
    return partial(measure_collapse, model, tokens(1, length), ["transformer"])


def collapse_of_layers(layers: int) -> Callable[[], object]:
    return partial(measure_collapse, small_bert(256, layers), tokens(4, 64), ["transformer"])


def lengths_of_layers(layers: int) -> Callable[[], object]:
    model = small_bert(64, layers, widening=1)  # what is linear in layers is kept small
    model.set_attn_implementation("eager")
    return partial(path_lengths, model, tokens(1, 256))


def maps_of(n: int, metrics: Callable[..., object]) -> Callable[[], object]:
    logits = 3 * torch.randn(1, 1, n, n, generator=torch.Generator().manual_seed(0))
    return partial(metrics, logits.softmax(-1))


def weights_alone(hidden: int, layers: int) -> Callable[[], object]:
    return partial(convert_rank, small_bert(hidden, layers), 16)


def calibrated(hidden: int, layers: int, examples: int) -> Callable[[], object]:
    return partial(convert_rank, small_bert(hidden, layers), 16, calibration=tokens(examples, 64))


def product_of_heads(heads: int) -> Callable[[], object]:
    queries, keys = theory.random_heads(16, heads, seed=0)
    product = AgreementProduct(queries, keys, memory=0)
    return partial(product, queries[:, 0])


def best_weights(heads: int) -> Callable[[], object]:
    queries, keys = theory.random_heads(16, heads, seed=0)
    return partial(theory.optimal_weights, queries, keys, method="conjugate_gradients")


def run(repeats: int) -> Iterator[Row]:
    torch.manual_seed(0)
    what = "measure_collapse in tokens, n << 6 d"
    yield grown(what, 1, 0.15, (128, 256, 512), partial(collapse_of_length, hidden=768), "24 n d^2 rules")
    what = "measure_collapse in tokens, n >> 6 d"
    yield grown(what, 2, 0.2, (4096, 8192, 16384), partial(collapse_of_length, hidden=32), "4 n^2 d rules", 2)
    what = "measure_collapse in layers"
    yield grown(what, 1, 0.1, (4, 8, 16, 32), collapse_of_layers, "a layer after the other")
    what = "measure_collapse in examples"
    yield grown(what, 1, 0.1, (8, 16, 32, 64), collapse_of_batch, "")
    what = "path_lengths in layers"
    yield grown(what, 2, 0.25, (96, 144, 192), lengths_of_layers, "L^2 / 2 parts", 2)
    what = "cheap metrics of maps in tokens"
    yield grown(what, 3, 0.25, (1024, 2048, 4096), partial(maps_of, metrics=cheap_metrics), "a Gram matrix, 2 n^3", 2)
    what = "full metrics of maps in tokens"
    yield grown(what, 3, 0.25, (512, 1024, 2048), partial(maps_of, metrics=spectral_metrics), "an SVD, O(n^3)", 1)
    what = "convert_rank, weights alone, in the hidden size"
    yield grown(what, 2, 0.25, (384, 768, 1536), partial(weights_alone, layers=2), "d / 32 heads of d r^2", 4)
    what = "convert_rank, weights alone, in layers"
    yield grown(what, 1, 0.1, (8, 16, 32, 64), partial(weights_alone, 256), "")
    what = "convert_rank, calibrated, in layers"
    make = partial(calibrated, 64, examples=8)
    yield grown(what, 2, 0.25, (32, 48, 64), make, "L^2 / 2 forward layers", 2)
    what = "product with C in heads, nothing kept"
    yield grown(what, 2, 0.15, (4096, 8192, 16384), product_of_heads, "H^2 / 2 entries, two arcsines each", 2)
    what = "optimal weights in heads"
    yield grown(what, 2, 0.2, (2048, 4096, 8192), best_weights, "steps do not grow with H", 1)
