"""Drawings of a page, as numbers for the macros of `templates/drawings.html`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup

from .html import Picture, page_templates


MOST_LABELS = 12
WIDTH = 664.0  # of every drawing, so that their letters have one size
LEFT, ABOVE = 54.0, 10.0


def draw(macro: str, alt: str, caption: str, **numbers: Any) -> Picture:
    templates = page_templates()
    templates.filters["one"] = "{:.1f}".format
    drawing = getattr(templates.get_template("drawings.html").module, macro)(
        alt=alt, left=LEFT, above=ABOVE, **numbers
    )
    return Picture(Markup("".join(str(drawing).splitlines())), caption, wide=True)


def labelled(count: int) -> range:
    return range(0, count, max(1, math.ceil(count / MOST_LABELS)))


def heat_map(
    values: pd.DataFrame,
    top: float,
    alt: str,
    caption: str,
    title: Callable[[Any, Any, float], str],
    *,
    across: str = "head",
    down: str = "layer",
    shown_top: str | None = None,
) -> Picture:
    """A map of `values`: the larger a value, up to `top`, the stronger the colour. `title(row, column, value)` is shown on hover."""
    rows, columns = values.shape
    cell, height = min(48.0, max(8.0, 590 / columns)), min(22.0, max(8.0, 420 / rows))
    shares = 0.03 + 0.97 * (values / top).clip(0, 1).fillna(0).to_numpy()
    cells = [
        (LEFT + column * cell, ABOVE + row * height, shares[row, column], title(name, entry, value))
        for row, (name, line) in enumerate(values.iterrows())
        for column, (entry, value) in enumerate(line.items())
    ]
    right = LEFT + columns * cell
    return draw(
        "heat_map",
        alt,
        caption,
        cells=cells,
        cell=cell,
        height=height,
        middle=(LEFT + right) / 2,
        bottom=ABOVE + rows * height,
        rows=[(ABOVE + (row + 0.5) * height + 4, values.index[row]) for row in labelled(rows)],
        columns=[(LEFT + (column + 0.5) * cell, values.columns[column]) for column in labelled(columns)],
        top=shown_top or f"{top:.0f}",
        width=max(WIDTH, right + 16),
        across=across,
        down=down,
    )


def curves(lines: Mapping[str, Sequence[float]], floor: float, alt: str, caption: str) -> Picture:
    """Relative residuals by layer, one line for each name. The axis is logarithmic if a residual is below 0.05."""
    last = max(len(line) for line in lines.values()) - 1
    lowest = min(min(line) for line in lines.values())
    logarithmic = lowest < 0.05
    least, most = max(lowest, floor / 4), max(1.0, *(max(line) for line in lines.values()))
    width, height = 420.0, 240.0

    def across(layer: int) -> float:
        return LEFT + width * layer / max(1, last)

    def down(value: float) -> float:
        share = math.log(max(value, least) / least) / math.log(most / least) if logarithmic else value / most
        return ABOVE + height * (1 - share)

    exponents = range(math.ceil(math.log10(least)), 1) if logarithmic else ()
    levels = [10.0**exponent for exponent in exponents][:: max(1, len(exponents) // 6)] or [0.0, 0.25, 0.5, 0.75, 1.0]
    names = [f"{level:.0e}" if logarithmic and level < 0.01 else f"{level:g}" for level in levels]
    points = {
        name: [(across(layer), down(value), f"{name}, layer {layer}: {value:.2g}") for layer, value in enumerate(line)]
        for name, line in lines.items()
    }
    return draw(
        "curves",
        alt,
        caption,
        lines=list(points.items()),
        levels=[(down(level), name) for level, name in zip(levels, names, strict=True)],
        ticks=[(across(layer), layer) for layer in labelled(last + 1)],
        width=width,
        height=height,
        page=WIDTH,
        across="layer (0: input)",
        marks=(),
    )
