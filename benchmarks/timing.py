"""Competitors timed in turn, so that a busy machine is unfair to all of them alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass
class Row:
    """One line of the table: a ratio and what it should be."""

    what: str
    against: str
    ratio: float
    target: str
    met: bool
    note: str = ""

    def as_dict(self) -> dict:
        return asdict(self)


def at_most(what: str, against: str, ratio: float, limit: float, note: str = "") -> Row:
    return Row(what, against, ratio, f"<= {limit:.2f}", ratio <= limit, note)


def at_least(what: str, against: str, ratio: float, limit: float, note: str = "") -> Row:
    return Row(what, against, ratio, f">= {limit:.2f}", ratio >= limit, note)


def timed(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each competitor over interleaved repeats, after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for repeat in range(repeats):
        # the order changes from repeat to repeat, as whoever runs second finds a warm cache
        order = list(runs.items()) if repeat % 2 else list(runs.items())[::-1]
        for name, run in order:
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def median_ratio(times: dict[str, list[float]], name: str, against: str) -> float:
    """Median over the repeats of the ratio within a repeat: what slows the machine for a while slows both sides."""
    return statistics.median(ours / theirs for ours, theirs in zip(times[name], times[against], strict=True))
