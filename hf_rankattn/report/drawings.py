"""Inline SVG drawings of a page: they follow its light and dark theme, and each value is shown when the pointer rests on it."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd
from markupsafe import Markup

from .html import Picture


TEXT = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" style="fill:var(--soft)">{}</text>')
MOST_LABELS = 12
WIDTH = 664.0  # of every drawing, so that their letters have one size


def svg(width: float, height: float, alt: str, parts: Sequence[Markup]) -> Markup:
    opening = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}" font-size="11">').format(
        width, height, alt
    )
    return opening + Markup("").join(parts) + Markup("</svg>")


def labelled(count: int) -> range:
    return range(0, count, max(1, math.ceil(count / MOST_LABELS)))


def heat_map(values: pd.DataFrame, top: float, alt: str, caption: str, what: str) -> Picture:
    """A map of `values` (layers x heads): the larger a value, up to `top`, the stronger the colour; `what` names a value."""
    rows, columns = values.shape
    cell = min(48.0, max(8.0, 590 / columns))
    height = min(22.0, max(8.0, 420 / rows))
    left, above = 54.0, 8.0
    parts = []
    for row, (layer, line) in enumerate(values.iterrows()):
        for column, (head, value) in enumerate(line.items()):
            share = 0.0 if pd.isna(value) else min(1.0, max(0.0, float(value) / top))
            shown = "not measured" if pd.isna(value) else f"{value:.1f}"
            parts.append(
                Markup(
                    '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" style="fill:var(--accent);fill-opacity:{:.3f};'
                    'stroke:var(--line);stroke-width:.5"><title>layer {}, head {}: {} {}</title></rect>'
                ).format(
                    left + column * cell,
                    above + row * height,
                    cell,
                    height,
                    0.03 + 0.97 * share,
                    layer,
                    head,
                    what,
                    shown,
                )
            )
    bottom = above + rows * height
    for row in labelled(rows):
        parts.append(TEXT.format(left - 6, above + (row + 0.5) * height + 4, "end", values.index[row]))
    for column in labelled(columns):
        parts.append(TEXT.format(left + (column + 0.5) * cell, bottom + 14, "middle", values.columns[column]))
    parts.append(TEXT.format(left + columns * cell / 2, bottom + 30, "middle", "head"))
    parts.append(
        Markup(
            '<text transform="translate(14 {:.1f}) rotate(-90)" text-anchor="middle" style="fill:var(--soft)">layer</text>'
        ).format(above + rows * height / 2)
    )
    for step in range(11):
        parts.append(
            Markup(
                '<rect x="{:.1f}" y="{:.1f}" width="14" height="10" style="fill:var(--accent);fill-opacity:{:.3f}"></rect>'
            ).format(left + 14 * step, bottom + 40, 0.03 + 0.97 * step / 10)
        )
    parts.append(TEXT.format(left, bottom + 63, "start", "0"))
    parts.append(TEXT.format(left + 154, bottom + 63, "end", f"{top:.0f}"))
    return Picture(svg(max(WIDTH, left + columns * cell + 16), bottom + 70, alt, parts), caption, wide=True)


def curves(lines: Mapping[str, Sequence[float]], floor: float, alt: str, caption: str) -> Picture:
    """Relative residuals by layer, one line for each name. The axis is logarithmic if a residual is below 0.05."""
    last = max(len(line) for line in lines.values()) - 1
    lowest = min(min(line) for line in lines.values())
    logarithmic = lowest < 0.05
    least, most = max(lowest, floor / 4), max(1.0, *(max(line) for line in lines.values()))
    left, above, width, height = 54.0, 10.0, 420.0, 240.0

    def place(layer: float, value: float) -> tuple[float, float]:
        if logarithmic:
            share = math.log(max(value, least) / least) / math.log(most / least)
        else:
            share = value / most
        return left + width * layer / max(1, last), above + height * (1 - share)

    parts = []
    exponents = range(math.ceil(math.log10(least)), 1) if logarithmic else ()
    levels = [10.0**exponent for exponent in exponents][:: max(1, len(exponents) // 6)] or [0.0, 0.25, 0.5, 0.75, 1.0]
    for level in levels:
        _, y = place(0, level)
        parts.append(
            Markup(
                '<line x1="{:.1f}" x2="{:.1f}" y1="{y:.1f}" y2="{y:.1f}" style="stroke:var(--line)"></line>'
            ).format(left, left + width, y=y)
        )
        parts.append(
            TEXT.format(left - 6, y + 4, "end", f"{level:.0e}" if logarithmic and level < 0.01 else f"{level:g}")
        )
    for layer in labelled(last + 1):
        parts.append(TEXT.format(place(layer, most)[0], above + height + 16, "middle", layer))
    parts.append(TEXT.format(left + width / 2, above + height + 32, "middle", "layer (0: input)"))
    for number, (name, line) in enumerate(lines.items()):
        style = f"stroke:var(--line-{number % 4 + 1})"
        points = [place(layer, value) for layer, value in enumerate(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ("none", "7 4", "2 3", "9 3 2 3")[number % 4]
        parts.append(
            Markup(
                '<polyline points="{}" fill="none" style="{};stroke-width:2;stroke-dasharray:{}"></polyline>'
            ).format(path, style, dash)
        )
        for layer, ((x, y), value) in enumerate(zip(points, line, strict=True)):
            parts.append(
                Markup(
                    '<circle cx="{:.1f}" cy="{:.1f}" r="4" style="fill:var(--card);stroke-width:2;{}"><title>{}, layer {}: {:.2g}'
                    "</title></circle>"
                ).format(x, y, style, name, layer, value)
            )
        y = above + 12 + 20 * number
        parts.append(
            Markup(
                '<line x1="{:.1f}" x2="{:.1f}" y1="{y:.1f}" y2="{y:.1f}" style="{};stroke-width:2;stroke-dasharray:{}"></line>'
            ).format(left + width + 16, left + width + 46, style, dash, y=y)
        )
        parts.append(TEXT.format(left + width + 52, y + 4, "start", name))
    return Picture(svg(WIDTH, above + height + 40, alt, parts), caption, wide=True)
