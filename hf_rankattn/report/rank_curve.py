"""Quality against query-key rank, drawn from a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plots import literal


# told apart by dash and marker too, so that a grey print can be read
STYLES = (("#b2182b", ":", "s"), ("#2166ac", "--", "o"), ("#1a1a1a", "-", "D"))


def draw_rank_curve(rows: Sequence[dict[str, Any]], file: str | Path, title: str, measure: str, label: str) -> Path:
    """Draw the column `measure` of rows with `way` and `rank`, one line a way, to a PNG or PDF file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for way, (colour, dash, marker) in zip(dict.fromkeys(row["way"] for row in rows), STYLES, strict=False):
        points = [(row["rank"], row[measure]) for row in rows if row["way"] == way]
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, marker=marker, label=way)
    axes.set_xlabel("query-key rank of a head")
    axes.set_ylabel(label)
    axes.set_xticks(sorted({row["rank"] for row in rows}))
    axes.set_title(literal(title), fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file)
    return Path(file)
