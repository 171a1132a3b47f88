"""The numbers of an earlier run, and what has become of them."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.timing import COUNT_NOISE, Row


FORMAT = 1
SHOWN = 0.005  # of bytes that are counted: extra memory of next to nothing may double without being any


@dataclass
class Run:
    """The rows of a run, the seconds that each suite took, and where."""

    rows: list[Row]
    seconds: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        rows = [{**row.as_dict(), "ratio": round(row.ratio, 4)} for row in self.rows]
        seconds = {suite: round(value, 1) for suite, value in self.seconds.items()}
        return {"format": FORMAT, "machine": self.machine, "seconds": seconds, "rows": rows}

    def write(self, path: Path) -> None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, path)

    def updated_by(self, other: "Run", suites: Iterable[str]) -> "Run":
        """This run, with what `other` says of some suites in place of its own."""
        again = set(suites)
        rows = [row for row in self.rows if row.suite not in again] + other.rows
        return Run(rows, {**self.seconds, **other.seconds}, other.machine)


def read_run(path: Path) -> Run:
    """A run from its JSON, or a `ValueError` that says what is wrong with the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}, and {FORMAT} is read")
        rows = [Row(**row) for row in found["rows"]]
        return Run(rows, dict(found["seconds"]), dict(found["machine"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} cannot be read as a run of the benchmarks: {reason}") from error


def this_machine() -> dict[str, Any]:
    """What makes numbers of two runs differ that no code has changed."""
    names = ("torch", "transformers", "numpy")
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def change(now: Row, then: Row) -> float:
    """By which share a row is worse than it was, negative where it is better: 0.5 is half as much again."""
    worse, better = (now.ratio, then.ratio) if now.better == "lower" else (then.ratio, now.ratio)
    if worse == better or (now.noise <= COUNT_NOISE and abs(worse - better) < SHOWN):
        return 0.0
    # extra memory may be none at all, or less than none, and then has no ratio
    if better <= 0:
        return float("inf") if worse > 0 else 0.0
    return worse / better - 1 if worse > 0 else -1.0


def verdict(now: Row, then: Row | None) -> str:
    """What the table says of a row beside its baseline."""
    if then is None:
        return "new"
    by = change(now, then)
    word = "worse" if by > now.noise else "better" if by < -now.noise / (1 + now.noise) else ""
    return f"{then.ratio:.2f} {word}".strip()


def comparison(run: Run, baseline: Run, suites: Iterable[str]) -> list[str]:
    """One line for each row that is worse than the baseline beyond its noise, that is new, or that is gone."""
    before: Mapping[tuple[str, str], Row] = {row.key: row for row in baseline.rows}
    lines = []
    for row in run.rows:
        then = before.get(row.key)
        if then is None:
            lines.append(f"new, not in the baseline: {row.what} (against {row.against}): {row.ratio:.2f}")
        elif (by := change(row, then)) > row.noise:
            share = f"{by:.0%}" if by != float("inf") else "any measure"
            lines.append(
                f"worse than the baseline by {share} (noise up to {row.noise:.0%}): {row.what} (against {row.against}): "
                f"{then.ratio:.2f} then, {row.ratio:.2f} now"
            )
        if then is not None and then.met and not row.met:
            lines.append(f"met in the baseline, missed now: {row.what} (against {row.against}), target {row.target}")
    keys, wanted = {row.key for row in run.rows}, set(suites)
    lines += [
        f"gone, in the baseline only: {row.what} (against {row.against})"
        for row in baseline.rows
        if row.suite in wanted and row.key not in keys
    ]
    return lines
