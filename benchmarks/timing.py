"""Competitors timed in turn, so that a busy machine is unfair to all of them alike; and lines through times that grow."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal


TIME_NOISE = 0.25  # what medians of ratios differ by between two runs on a shared machine
MOST_SECONDS = 12.0
LEAST_REPEATS = 3
COUNT_NOISE = 0.02  # what is counted, not timed: bytes of tensors, cosines


@dataclass
class Row:
    """One line of the table: a ratio (or an exponent) and what it should be."""

    what: str
    against: str
    ratio: float
    target: str
    met: bool
    note: str = ""
    better: Literal["lower", "higher"] = "lower"
    noise: float = TIME_NOISE
    suite: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.what, self.against

    def counted(self, noise: float = COUNT_NOISE) -> "Row":
        """The same row with the narrow band of what is counted."""
        return replace(self, noise=noise)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def at_most(what: str, against: str, ratio: float, limit: float, note: str = "") -> Row:
    return Row(what, against, ratio, f"<= {limit:.2f}", ratio <= limit, note)


def at_least(what: str, against: str, ratio: float, limit: float, note: str = "") -> Row:
    return Row(what, against, ratio, f">= {limit:.2f}", ratio >= limit, note, "higher")


def timed(
    runs: Mapping[str, Callable[[], object]], repeats: int, most: float = MOST_SECONDS
) -> dict[str, list[float]]:
    """Seconds of CPU of each competitor over interleaved repeats, after one warm-up each.

    All run on one thread, so that on a quiet machine these are the seconds of the clock; on a busy one, what others take
    is not counted. When `most` seconds are spent, `LEAST_REPEATS` are enough: what takes seconds is not what is noisy.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for repeat in range(repeats):
        if repeat >= LEAST_REPEATS and sum(map(sum, times.values())) > most:
            break
        # the order changes from repeat to repeat, as whoever runs second finds a warm cache
        order = list(runs.items()) if repeat % 2 else list(runs.items())[::-1]
        for name, run in order:
            times[name].append(cpu_seconds(run))
    return times


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def median_ratio(times: Mapping[str, Sequence[float]], name: str, against: str) -> float:
    """Median over the repeats of the ratio within a repeat: what slows the machine for a while slows both sides."""
    return statistics.median(ours / theirs for ours, theirs in zip(times[name], times[against], strict=True))


def fitted_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of the least-squares line through (log size, log seconds).

    >>> round(fitted_exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 3:
        raise ValueError(f"a line needs at least three sizes with a time each, got {len(sizes)} and {len(seconds)}.")
    if min(sizes) <= 0 or min(seconds) <= 0:
        raise ValueError("sizes and times must be positive to have logarithms.")
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    return statistics.linear_regression(x, y).slope


def exponent(
    what: str, expected: float, tolerance: float, sizes: Sequence[float], seconds: Sequence[float], note: str = ""
) -> Row:
    """A row whose ratio is a fitted exponent; steeper than expected misses as flatter does."""
    found = fitted_exponent(sizes, seconds)
    shown = f"{sizes[0]:g} to {sizes[-1]:g}: {seconds[0]:.3f} to {seconds[-1]:.3f} s"
    target = f"{expected:.2f} ± {tolerance:.2f}"
    met = abs(found - expected) <= tolerance
    against = f"exponent {expected:g}"
    return Row(what, against, found, target, met, f"{shown}; {note}" if note else shown, noise=0.1)
