"""What the paths of BERT-base cost: all 2.3e13 of them, by length, against running the model."""

import statistics
from collections.abc import Iterator

import torch

from benchmarks.measure import HIDDEN, bert, eager_forward, ids
from benchmarks.memory import live_peak
from benchmarks.timing import Row, at_most, median_ratio, timed
from hf_rankattn import path_lengths


LAYERS = 12


def run(repeats: int) -> Iterator[Row]:
    torch.manual_seed(0)
    model, batch = bert(LAYERS, implementation="eager"), ids(8, 128)
    forward = eager_forward(model, batch)
    times = timed({"lengths": lambda: path_lengths(model, batch), "forward": forward}, repeats)
    note = f"{statistics.median(times['lengths']):.1f} s, {LAYERS} layers"
    ratio = median_ratio(times, "lengths", "forward")
    yield at_most("path_lengths, BERT-base, 8 x 128", "an eager forward", ratio, 4.0, note)
    states = 8 * 128 * HIDDEN * 4 / 2**20
    ours, theirs = live_peak(lambda: path_lengths(model, batch)), live_peak(forward)
    note = f"{ours:.1f} against {theirs:.1f} MB; a layer of states is {states:.1f} MB"
    what = "path_lengths, BERT-base, 8 x 128, extra peak memory"
    yield at_most(what, "one layer of hidden states", (ours - theirs) / states, LAYERS + 2.0, note).counted()
