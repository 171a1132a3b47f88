"""What `rankattn need` found: sentences, tables, drawings, a figure and the page."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..files.atomic import staged, write_whole
from .drawings import ABOVE, LEFT, WIDTH, draw, heat_map, labelled
from .html import Grid, Picture, Section, render_page
from .plots import STYLES, literal, new_figure


if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKER, TABLE, PAGE, FIGURE = "need.json", "table.parquet", "report.html", "need.png"
METADATA = b"hf_rankattn_need"
WHOLE, DEFAULT = "whole", "attention"
# what a width counts, of queries and keys and of values
DIRECTIONS = {"qk": "query-key directions", "v": "value dimensions"}
PLACES = {"qk": "Queries and keys", "v": "Values"}
# in one order, because a line has its colour by its place
NAMES = {
    "qk": {
        "attention": "fitted, by attention",
        "components": "principal components",
        "weights": "weights alone",
        "logits": "fitted, all logits alike",
    },
    "v": {"attention": "fitted", "components": "principal components", "weights": "weights alone"},
}
QUALITIES = {
    "perplexity": "the perplexity of the whole model divided by that of the limited one",
    "accuracy": "the accuracy of the limited model divided by that of the whole one",
    "embedding_cosine": "the mean cosine of pooled embeddings to those of the whole model",
}


def percent(share: float) -> str:
    """A share in per cent, without digits that say nothing.

    >>> percent(0.99), percent(0.9953), percent(1 - 0.005)
    ('99 %', '99.5 %', '99.5 %')
    """
    return f"{round(100 * share, 1):g} %"


class Need:
    """The table and the facts of one model, as numbers for sentences and drawings."""

    def __init__(self, table: pd.DataFrame, facts: Mapping[str, Any]):
        self.table, self.facts = table, facts
        self.rows = table[table.metric == "quality"]
        self.target = 1 - facts["target_loss"]
        whole = self.rows[self.rows.objective == WHOLE].set_index("kind").width
        self.full = {kind: int(whole[kind]) for kind in PLACES}
        needed = table[table.metric == "needed_width"].set_index("kind").value
        self.needed = {kind: int(needed[kind]) for kind in PLACES}

    def curve(self, kind: str, objective: str) -> dict[int, float]:
        """Quality by width in all layers, the full width included."""
        rows = self.rows[(self.rows.kind == kind) & (self.rows.layers == "all") & (self.rows.objective == objective)]
        found = {int(width): float(value) for width, value in zip(rows.width, rows.value, strict=True)}
        return dict(sorted({**found, self.full[kind]: 1.0}.items())) if found else {}

    def curves(self, kind: str) -> dict[str, dict[int, float]]:
        found = {objective: self.curve(kind, objective) for objective in NAMES[kind]}
        return {objective: line for objective, line in found.items() if line}

    def map(self, kind: str) -> pd.DataFrame:
        """Quality with one layer limited (widths x layers)."""
        rows = self.rows[(self.rows.kind == kind) & (self.rows.layers != "all")]
        rows = rows.assign(layer=rows.layers.astype(int), width=rows.width.astype(int))
        return rows.pivot(index="width", columns="layer", values="value")

    def largest_loss(self, kind: str) -> float:
        """The end of the colours of a map, at least 1 %, so that noise is pale."""
        return max(0.01, 1 - float(self.map(kind).min().min()))

    def found(self) -> dict[str, Any]:
        """The answer in numbers."""
        return {
            kind: {
                "needed": self.needed[kind],
                "of": self.full[kind],
                "quality": self.curve(kind, DEFAULT).get(self.needed[kind], 1.0),
            }
            for kind in PLACES
        }

    def sentence(self) -> str:
        """The answer in one sentence."""
        parts = [f"{self.needed[kind]} of {self.full[kind]} {DIRECTIONS[kind]}" for kind in PLACES]
        return (
            f"This model keeps {percent(self.target)} of its quality with {parts[0]} in each head, or with {parts[1]}."
        )

    def sentences(self) -> list[str]:
        quality = QUALITIES[self.facts["quality"]]
        found = [
            self.sentence(),
            f"Quality is {quality}. Each kind is limited alone, to the same width in all heads of all layers.",
        ]
        found += [line for kind in PLACES if (line := self.layer_sentence(kind))]
        if "divergence" in set(self.table.metric):
            found.append(
                "One layer is judged by exp(-divergence) from the tokens that the whole model expects: that is the ratio of perplexities "
                "on texts that the model itself would write, with less noise on few tokens."
            )
        return found

    def layer_sentence(self, kind: str) -> str:
        values = self.map(kind)
        if values.empty:
            return ""
        width, line = int(values.index[0]), values.iloc[0]
        few = int((line < self.target).sum())
        worst = line.idxmin()
        return (
            f"Limited to {width} of {self.full[kind]} {DIRECTIONS[kind]} one at a time, {few} of {len(line)} layers cost more than "
            f"{percent(1 - self.target)} of the quality; layer {worst} costs most and leaves {line[worst]:.3f}."
        )

    def about(self) -> str:
        facts, head = self.facts, f"{self.full['qk']} query-key directions and {self.full['v']} value dimensions"
        return (
            f"{facts['model_type']}, {facts['layers']} layers with attention, heads of {head}, {facts['dtype']}. Quality is measured on "
            f"{facts['held_out']}; limits are fitted on {facts['calibration']}. The last run took {facts['seconds']:.0f} s, "
            f"{facts['cpu_seconds']:.0f} s of them on the CPU."
        )

    def refused(self) -> list[str]:
        return [f"The baseline {name} was not measured: {why}." for name, why in self.facts.get("refused", {}).items()]


def curve_picture(need: Need, kind: str) -> Picture:
    """Quality by width, one line for each way to fit, with a mark at the width that is needed."""
    lines, full, width, height = need.curves(kind), need.full[kind], 420.0, 240.0
    every = [value for line in lines.values() for value in line.values()]
    bottom = min(0.9, math.floor(10 * max(min(every), 0)) / 10)
    top = max(1.0, *every)

    def across(rank: float) -> float:
        return LEFT + width * rank / full

    def down(value: float) -> float:
        return ABOVE + height * (top - max(value, bottom)) / (top - bottom)

    steps = round(10 * (1 - bottom))
    levels = [bottom + (1 - bottom) * step / steps for step in range(steps + 1)] if steps > 2 else [bottom, 0.95, 1.0]
    ticks = sorted({round(full * part / 8) for part in range(1, 9)})
    points = {
        NAMES[kind][objective]: [
            (across(rank), down(value), f"{NAMES[kind][objective]}, {rank} of {full}: {value:.4f}")
            for rank, value in line.items()
        ]
        for objective, line in lines.items()
    }
    needed = need.needed[kind]
    caption = (
        f"{PLACES[kind]}: quality by {DIRECTIONS[kind]} kept in every head. The vertical line is at {needed}, the least that keeps "
        f"{percent(need.target)}. Rest the pointer on a point to see its value."
    )
    return draw(
        "curves",
        caption,
        caption,
        lines=list(points.items()),
        levels=[(down(level), f"{level:.2g}") for level in levels],
        ticks=[(across(rank), rank) for rank in ticks],
        width=width,
        height=height,
        page=WIDTH,
        across=DIRECTIONS[kind],
        marks=[(across(needed), f"{needed} of {full}")],
    )


def map_picture(need: Need, kind: str) -> Picture:
    """The loss with one layer limited, by layer and width: the stronger the colour, the more the model needs this layer's rank."""
    values, top = need.map(kind), need.largest_loss(kind)
    caption = (
        f"{PLACES[kind]}: loss of quality (1 - quality) with one layer limited and the others whole, by layer and by {DIRECTIONS[kind]} "
        f"that it keeps. The strongest colour is a loss of {percent(top)}. Rest the pointer on a cell to see its quality."
    )

    def title(width: int, layer: int, loss: float) -> str:
        return f"layer {layer}, {width} of {need.full[kind]} {DIRECTIONS[kind]}: quality {1 - loss:.4f}"

    return heat_map(1 - values, top, caption, caption, title, across="layer", down="width", shown_top=percent(top))


def pictures(need: Need) -> list[Picture]:
    maps = [map_picture(need, kind) for kind in PLACES if not need.map(kind).empty]
    return [*(curve_picture(need, kind) for kind in PLACES), *maps]


def grid(need: Need, kind: str) -> Grid:
    """Quality by width and way to fit."""
    lines = need.curves(kind)
    widths = sorted({width for line in lines.values() for width in line})
    rows = [
        [str(width), *(f"{line[width]:.4f}" if width in line else "-" for line in lines.values())] for width in widths
    ]
    return Grid(
        [DIRECTIONS[kind], *(NAMES[kind][objective] for objective in lines)], rows, f"{PLACES[kind]}, all layers"
    )


def section(table: pd.DataFrame, facts: Mapping[str, Any]) -> list[Section]:
    """The sections of one model: sentences with drawings, then all numbers."""
    try:
        need = Need(table, facts)
        return [
            Section(facts["title"], need.sentences(), (), pictures(need)),
            Section(
                f"All numbers: {facts['title']}",
                [need.about(), *need.refused()],
                [grid(need, kind) for kind in PLACES],
            ),
        ]
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"this is not a table of rankattn need: {type(error).__name__} {error}.") from error


def need_figure(table: pd.DataFrame, facts: Mapping[str, Any]) -> "Figure":
    """The curves and the maps of both kinds as one figure."""
    need = Need(table, facts)
    rows = 1 + any(not need.map(kind).empty for kind in PLACES)
    figure, axes = new_figure(rows, 2, 10.0, 3.6 + 1.9 * (rows - 1), height_ratios=[3.6, 1.6][:rows])
    for place, kind in enumerate(PLACES):
        axis = axes[0, place]
        for (objective, line), (marker, dash, colour) in zip(need.curves(kind).items(), STYLES, strict=False):
            name = NAMES[kind][objective]
            axis.plot(
                list(line), list(line.values()), marker=marker, linestyle=dash, color=colour, label=name, markersize=5
            )
        axis.axhline(need.target, color="0.6", linewidth=0.8)
        axis.axvline(need.needed[kind], color="0.6", linewidth=0.8, linestyle=":")
        axis.set(
            xlabel=f"{DIRECTIONS[kind]} kept, of {need.full[kind]}",
            title=f"{PLACES[kind]}: {need.needed[kind]} needed",
        )
        axis.set_ylim(max(0, axis.get_ylim()[0]), None)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
        if rows == 1:
            continue
        values, below = need.map(kind), axes[1, place]
        losses, top = (1 - values).clip(lower=0), need.largest_loss(kind)
        mesh = below.imshow(losses, aspect="auto", cmap="Blues", vmin=0, vmax=top, origin="lower")
        figure.colorbar(mesh, ax=below, label="loss of quality")
        below.set_yticks(range(len(values.index)), [str(width) for width in values.index])
        ticks = labelled(len(values.columns))
        below.set_xticks(list(ticks), [str(values.columns[tick]) for tick in ticks])
        below.set(xlabel="layer limited alone", ylabel="width")
    axes[0, 0].set_ylabel("quality")
    figure.suptitle(f"How much rank is needed? {literal(facts['title'])}", fontsize=11)
    return figure


def write_need(table: pd.DataFrame, facts: dict[str, Any], folder: Path) -> list[str]:
    """Write `table.parquet`, the figure and `report.html` to the folder of the measurements; returns the names of the files."""
    arrow = pa.Table.from_pandas(pd.DataFrame(table), preserve_index=False)
    metadata = {**(arrow.schema.metadata or {}), METADATA: json.dumps(facts).encode()}
    with staged(folder / TABLE) as staging:
        pq.write_table(arrow.replace_schema_metadata(metadata), staging)
    with staged(folder / FIGURE) as staging:
        need_figure(table, facts).savefig(staging)
    write_whole(folder / PAGE, need_page(table, facts))
    return sorted((TABLE, FIGURE, PAGE))


def need_page(table: pd.DataFrame, facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())
    footer = ["Written by rankattn need. The numbers are in table.parquet.", f"{versions}."]
    lead = "The quality of the model within limits of its rank, over all layers and one layer at a time."
    return render_page("How much rank does it need?", lead, section(table, facts), footer=footer, kind="need")


def read_need(folder: Path) -> Sequence[Section] | None:
    """The sections of a folder of `rankattn need`; None for any other folder, or one whose measurements have not ended."""
    path = folder / TABLE
    if not path.is_file():
        return None
    try:
        metadata = pq.read_schema(path).metadata or {}
        if METADATA not in metadata:
            return None
        facts, table = json.loads(metadata[METADATA]), pd.read_parquet(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from error
    return section(table, facts)
