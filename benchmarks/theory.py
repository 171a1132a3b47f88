"""What the best weights of rank-one heads cost, beside a dense solve."""

from collections.abc import Iterator

import numpy as np
import scipy.linalg

from benchmarks.timing import Row, at_least, median_ratio, timed
from hf_rankattn import theory


HEADS = 4096


def run(repeats: int) -> Iterator[Row]:
    for d in (8, 64):
        queries, keys = theory.random_heads(d, HEADS, seed=0)
        kernel = theory.head_agreement(queries, keys)
        accuracy = theory.head_accuracy(d, (queries * keys).sum(1))
        found: dict[str, np.ndarray] = {}

        def ours(queries=queries, keys=keys, found=found) -> None:
            found["ours"] = theory.optimal_weights(queries, keys)

        def dense(kernel=kernel, accuracy=accuracy, found=found) -> None:
            found["dense"] = scipy.linalg.solve(kernel, accuracy)

        def positive(kernel=kernel, accuracy=accuracy) -> None:
            scipy.linalg.solve(kernel, accuracy, assume_a="pos")

        times = timed({"ours": ours, "dense": dense, "positive": positive}, repeats)
        gap = np.abs(found["ours"] - found["dense"]).max()
        note = f"{min(times['ours']):.2f} s from the heads, {min(times['dense']):.2f} s from C; differ by {gap:.0e}"
        what = f"optimal weights, {HEADS} heads, d {d}, C included, speed"
        yield at_least(what, "scipy.linalg.solve, C given", median_ratio(times, "dense", "ours"), 1.0, note)
        note = f"{min(times['positive']):.2f} s"
        yield at_least(what, "the same, assume_a='pos'", median_ratio(times, "positive", "ours"), 1.0, note)
