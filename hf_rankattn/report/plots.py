"""Figures of the tables of `rankattn measure`, and what all figures share."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VARIANTS = {
    "transformer": ("whole model", "-", "o", "#1b4f72"),
    "san+skip": ("attention + skips", "--", "s", "#117a65"),
    "san+mlp": ("attention + MLPs", "-.", "^", "#b9770e"),
    "san": ("attention alone", ":", "D", "#922b21"),
}
# marker, line and colour of curves that share a panel: they differ in a grey print, too
STYLES = (
    ("o", "-", "#1b4f72"),
    ("s", "--", "#b9770e"),
    ("^", "-.", "#922b21"),
    ("D", ":", "#117a65"),
    ("v", "-", "#6c3483"),
    ("P", "--", "#424949"),
    ("X", "-.", "#a04000"),
)
PUBLISHED_NAMES = {"bert": "bert-base-cased", "albert": "albert-base-v2", "xlnet": "xlnet-base-cased"}
PUBLISHED_FLOOR = 5e-7  # published residuals below it are rounding of float32
PANELS = 24


def new_figure(rows: int, columns: int, width: float, height: float, **kwargs) -> tuple["Figure", np.ndarray]:
    """A figure that needs no display and is independent of pyplot, and its axes (rows, columns)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def literal(text: str) -> str:
    """A name for a figure: control characters are escaped, and so is `$`, which starts mathematics in matplotlib."""
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return printable.replace("$", r"\$")


def published_table(name: str) -> pd.DataFrame:
    """Values read from a published figure; the column `partly_hidden` marks points that other curves cover in part."""
    return pd.read_csv(next(Path(__file__).parent.parent.glob(f"**/published/{name}.csv")))


def published_residuals(model_type: str, random_init: bool) -> pd.DataFrame:
    """The published curves of a family, `variant, layer, value`; empty if there are none.

    The means over 32 texts in the figures of Dong, Cordonnier and Loukas (2021), read from the vector paths of their PDF
    files to 1e-8. Values below [`PUBLISHED_FLOOR`] are left out; `published_table("residuals")` has them.
    """
    table = published_table("residuals")
    table = table[table.value > PUBLISHED_FLOOR]
    family = model_type.removeprefix("rank_")
    weights = "init" if random_init else "pretrained"
    return table[(table.model == family) & (table.weights == weights)][["variant", "layer", "value"]]


def residual_figure(table: pd.DataFrame, facts: dict[str, Any]) -> "Figure":
    """Relative residual by layer and variant, with the published curves of the family where there are some."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(1, 1, 8.0, 5.0)
    axis: Axes = axes[0, 0]
    rows = table[(table.question == "collapse") & (table.metric == "relative_residual")]
    published = published_residuals(facts["model_type"], facts["random_init"])
    hollow: dict[str, Any] = {"color": "0.45", "mfc": "white", "linewidth": 0.8, "markersize": 4}
    floor = facts["precision_floor"]
    for variant, (label, line, marker, colour) in VARIANTS.items():
        layers = rows[rows.variant == variant].groupby("layer").value
        if not len(layers):
            continue
        low, mean, high = layers.quantile(0.05), layers.mean(), layers.quantile(0.95)
        axis.plot(mean.index, mean.clip(lower=floor / 4), line, marker=marker, color=colour, label=label, markersize=5)
        axis.fill_between(mean.index, low.clip(lower=floor / 4), high, color=colour, alpha=0.15, linewidth=0)
        curve = published[published.variant == variant]
        if len(curve):
            axis.plot(curve.layer, curve.value, line, marker=marker, **hollow)
    if len(published):
        name = PUBLISHED_NAMES[facts["model_type"].removeprefix("rank_")]
        kind = "random weights" if facts["random_init"] else "pretrained"
        kind += ";\nwithout MLP: its activation, skip and norm left in" if name.startswith("albert") else ""
        axis.plot([], [], "-", marker="o", **hollow, label=f"published: {name}, {kind}\n(hollow, same line styles)")
    axis.set(xlabel="layer (0 = embeddings)", ylabel="relative residual (1: nothing shared, 0: all tokens equal)")
    if rows.value.min() > 0.05:
        axis.set_ylim(0, max(1.05, 1.05 * float(rows.value.max())))
    else:
        axis.set(yscale="log", ylim=(floor / 4, 2.0))
        label = "within ten times the precision floor:\nequal within precision"
        axis.axhspan(floor / 4, 10 * floor, color="0.9", zorder=0, label=label)
    axis.set_title(f"Do tokens stay apart? {literal(facts['title'])}", fontsize=11)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    title = "line: mean, band: 5 to 95 % of texts"
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), title=title, title_fontsize=8)
    return figure


def content_free_share(metric: str, n: float, causal: bool) -> float:
    """The rank, as a share of n, of a map whose rows are uniform over all tokens, or over the past if `causal`."""
    if not causal or metric == "argmax_coverage":
        return 1 / n
    size = round(n)
    maps = np.tril(np.ones((size, size))) / np.arange(1, size + 1)[:, None]
    singular = np.linalg.svd(maps, compute_uv=False)
    if metric == "participation_ratio":
        return float((singular**2).sum() ** 2 / (singular**4).sum()) / size
    share = singular / singular.sum()
    return math.exp(-(share * np.log(share)).sum()) / size


ATTENTION_PANELS = {
    "effective_rank": "effective rank / n\n(directions, weighted by size)",
    "participation_ratio": "participation ratio / n\n(directions that carry the energy)",
    "argmax_coverage": "argmax coverage / n\n(tokens with the largest weight of a row)",
}


def attention_figure(table: pd.DataFrame, facts: dict[str, Any]) -> "Figure":
    """Heat maps, layers x heads, of the rank of attention maps as a share of the tokens, with reference lines."""
    rows = table[table.question == "attention"]
    first = "effective_rank" if (rows.metric == "effective_rank").any() else "participation_ratio"
    tokens = table[table.metric == "tokens"].set_index("example").value
    n, causal = float(tokens.mean()), facts["causal"]
    size = min(15.0, 5.0 + 0.5 * facts["heads"]), min(9.0, 3.2 + 0.24 * facts["layers"])
    figure, axes = new_figure(1, 2, *size)
    ceiling, law = 0.632, "0.63 n: rows that each pick one token at random"
    if causal:
        ceiling, law = 0.5, "0.50 n: causal rows that each pick one token of their past at random"
    for axis, metric in zip(axes[0], (first, "argmax_coverage"), strict=True):
        chosen = rows[rows.metric == metric]
        shares = chosen.value / chosen.example.map(tokens).astype(float)
        means = shares.groupby([chosen.layer, chosen["head"]]).mean().unstack()
        share = means.to_numpy(dtype=float)
        image = axis.imshow(share, cmap="viridis", vmin=0, vmax=max(0.7, np.nanmax(share)), aspect="auto")
        axis.set(xlabel="head", ylabel="layer", xticks=ticks(share.shape[1]), yticks=ticks(share.shape[0]))
        # layers without attention are left out
        axis.set_yticklabels([means.index[row] for row in ticks(share.shape[0])])
        axis.set_title(ATTENTION_PANELS[metric], fontsize=10)
        bar = figure.colorbar(image, ax=axis)
        free = content_free_share(metric, n, causal)
        for value, name, style in ((ceiling, f"{ceiling:.2f}", "-"), (free, "content-free", "--")):
            bar.ax.axhline(value, color="white", linewidth=3)
            bar.ax.axhline(value, color="black", linewidth=1.5, linestyle=style)
            beside = bar.ax.get_yaxis_transform()
            bar.ax.text(-0.15, value, name, ha="right", va="center", fontsize=7, transform=beside)
    past = "their past" if causal else "all tokens"
    figure.suptitle(f"How much rank do the attention maps have? {literal(facts['title'])}", fontsize=11)
    figure.supxlabel(
        f"n = {n:.0f} tokens (mean). Solid line: {law}.\nDashed line: content-free, rows that spread evenly over {past}.",
        fontsize=8,
    )
    return figure


def ticks(count: int) -> list[int]:
    return list(range(0, count, max(1, math.ceil(count / 16))))


def spectra_figure(table: pd.DataFrame, facts: dict[str, Any]) -> "Figure":
    """Cumulative energy of the query-key weights and of the logits: one panel per layer, one line per head."""
    from matplotlib.ticker import MaxNLocator

    rows = table[table.metric == "energy_share"]
    layers = sorted(rows.layer.unique())
    chosen = [
        layers[place]
        for place in sorted({round(x) for x in np.linspace(0, len(layers) - 1, min(PANELS, len(layers)))})
    ]
    wanted = (4, 3, 5, 6) if len(chosen) <= 12 else (6, 5, 4)
    columns = next((count for count in wanted if len(chosen) % count == 0), min(len(chosen), 4))
    lines = math.ceil(len(chosen) / columns)
    size = max(6.5, 2.6 * columns + 0.8), 2.1 * lines + 1.3
    figure, axes = new_figure(lines, columns, *size, sharex=True, sharey=True)
    styles = {
        "weights": ("--", "#922b21", "weights W_Q W_K^T"),
        "logits": ("-", "#1b4f72", "row-centred logits on the inputs"),
    }
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    for axis, layer in zip(axes.flat, chosen, strict=False):
        for question, (line, colour, label) in styles.items():
            of_layer = rows[(rows.question == question) & (rows.layer == layer)]
            if not len(of_layer):
                continue
            shares = of_layer.pivot_table(index="component", columns="head", values="value").cumsum()
            shares.index = shares.index.astype(int) + 1
            axis.plot(shares.index, shares.to_numpy(), line, color=colour, alpha=0.25, linewidth=0.7)
            median = f"{label}, median head"
            axis.plot(shares.index, shares.median(axis=1), line, color=colour, linewidth=2, label=median)
        axis.axhline(0.9, color="0.4", linewidth=0.8)
        axis.set_title(f"layer {layer}", fontsize=9)
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    title = "thin lines: single heads; grey line: 90 %"
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, title=title, title_fontsize=8)
    figure.suptitle(f"How much query-key rank is used? {literal(facts['title'])}", fontsize=11)
    for axis in axes[-1]:
        axis.set_xlabel("components kept")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supylabel("share of energy kept", fontsize=9)
    return figure


# the ways of a conversion, told apart by dash and marker too
WAY_STYLES = (("#b2182b", ":", "s"), ("#2166ac", "--", "o"), ("#1a1a1a", "-", "D"))


def draw_rank_curve(rows: Sequence[dict[str, Any]], file: str | Path, title: str, measure: str, label: str) -> None:
    """Draw the column `measure` of rows with `way` and `rank`, one line a way, to a PNG, PDF or SVG file."""
    figure, axes = new_figure(1, 1, 6.4, 4.2)
    axis: Axes = axes[0, 0]
    for way, (colour, dash, marker) in zip(dict.fromkeys(row["way"] for row in rows), WAY_STYLES, strict=False):
        points = [(row["rank"], row[measure]) for row in rows if row["way"] == way]
        axis.plot(*zip(*points, strict=True), color=colour, linestyle=dash, marker=marker, label=way)
    axis.set(xlabel="query-key rank of a head", ylabel=label, xticks=sorted({row["rank"] for row in rows}))
    axis.set_title(literal(title), fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", frameon=False)
    figure.savefig(file)


FIGURES = {"residuals": residual_figure, "attention_rank": attention_figure, "query_key_spectra": spectra_figure}
