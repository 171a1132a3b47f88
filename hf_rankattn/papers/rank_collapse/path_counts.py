"""The number and the length of paths through heads and skips, and a test that they add up to the output."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import BertConfig, BertModel

from ... import theory
from ...probe import ablate, path_terms
from ...report.plots import STYLES, new_figure
from ..drawing import band
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, unpublished


SHOWS = "the lengths of all paths through named architectures, and small networks taken apart path by path"

SMALL = {"layers": 4, "heads": 3, "hidden": 24, "tokens": 10}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"networks": [{"layers": 2, "heads": 2, "hidden": 8, "tokens": 6}], "seeds": 1},
    "laptop": {"networks": [SMALL, {"layers": 6, "heads": 2, "hidden": 48, "tokens": 16}], "seeds": 3},
    "paper": {"networks": [SMALL, {"layers": 6, "heads": 3, "hidden": 48, "tokens": 32}], "seeds": 5},
}
PUBLISHED = {
    "bert-base": "mean 11.08, p(11) = p(12) = .383",
    "t5-11b": "mean 23.81, p(24) = .830",
    "gpt3-175b": "10^190.7 paths, mean 95.01",
    "deit-tiny": "mean 9.00, p(12) = .032",
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    found = [
        Cell({"kind": "counts", "architecture": name, "layers": layers, "heads": heads})
        for name, (layers, heads) in theory.ARCHITECTURES.items()
    ]
    for axis in grid(network=setting["networks"], skip=[False, True], seed=list(range(seeds or setting["seeds"]))):
        found.append(Cell({"kind": "terms", **axis.pop("network"), **axis}, cost=10.0))
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    if parameters["kind"] == "counts":
        paths = theory.path_counts(parameters["architecture"])
        summary = {name: getattr(paths, name) for name in ("log10_total", "mean", "standard_deviation")}
        return [{"length": k, "share": float(share), **summary} for k, share in enumerate(paths.distribution())]
    names = ("layers", "heads", "hidden", "tokens", "skip", "seed")
    return taken_apart(**{name: parameters[name] for name in names})


def taken_apart(layers: int, heads: int, hidden: int, tokens: int, skip: bool, seed: int) -> list[dict[str, Any]]:
    """The residual of the paths of each length, and how far the sum of all paths is from the output."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = BertConfig(vocab_size=100, intermediate_size=8, initializer_range=0.15, **sizes)
    model = BertModel(config, add_pooling_layer=False).double().eval()
    for parameter in model.parameters():  # fresh biases are zero and would prove nothing
        parameter.data += 0.05 * torch.randn_like(parameter)
    with ablate(model, mlp=True, norm=True, attention_skip=not skip):
        table = path_terms(model, {"input_ids": torch.randint(1, 100, (1, tokens))})
    whole = table[table.metric == "reconstruction_error"].value.item()
    terms = table[table.source == "embeddings"].groupby("metric")
    rows, stray = terms.get_group("relative_residual"), terms.get_group("row_sum_error").value.max()
    summary = {"reconstruction_error": whole, "row_sum_error": float(stray), "paths": len(rows)}
    return [
        {"length": int(k), "of_length": len(part), "relative_residual": float(part.value.mean()), **summary}
        for k, part in rows.groupby("length")
    ]


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """Left: the distribution of path lengths. Right: the residual of the paths of small networks, by length."""
    figure, axes = new_figure(1, 2, 13.0, 5.2, width_ratios=[1.25, 1.0])
    left, right = axes[0]
    shapes = table[table.kind == "counts"].groupby(["layers", "heads"], sort=False)
    for place, (_, shape) in enumerate(shapes):
        names = list(dict.fromkeys(shape.architecture))
        rows = shape[shape.architecture == names[0]]
        label = f"{', '.join(names)}: $10^{{{rows.log10_total.iloc[0]:.1f}}}$ paths"
        look = "os^Dv<>P*X"[place % 10] + ("-" if place % 10 < 5 else "--")
        colour = STYLES[place % 5][2]
        left.plot(rows.length / rows.length.max(), rows.share, look, color=colour, linewidth=1, label=label)
    left.set(xlabel="length of path / layers", ylabel="share of all paths", xlim=(0.35, 1.02), ylim=(0, None))
    left.set_title("By number, nearly all paths are long")
    terms = table[(table.kind == "terms") & table.skip.fillna(False).astype(bool)]
    for ((layers, heads), rows), style in zip(terms.groupby(["layers", "heads"]), STYLES, strict=False):
        label = f"{int(layers)} layers of {int(heads)} heads: {int(rows.paths.iloc[0])} paths"
        band(right, rows.groupby("length").relative_residual, style, label)
    right.set(yscale="log", xlabel="length of path", ylabel="relative residual of a path's term (mean)")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_title("The longer a path, the less rank it carries (attention with skips)")
    for axis in (left, right):
        axis.legend()
    return {"path-counts": figure}


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    counts = table[table.kind == "counts"]
    for name, published in PUBLISHED.items():
        rows = counts[counts.architecture == name].set_index("length")
        first, depth = rows.iloc[0], int(rows.index.max())
        shares = ", ".join(f"p({k}) = {rows.share[k]:.4f}" for k in ((11, 12) if name == "bert-base" else (depth,)))
        short = rows.share[rows.index <= depth / 2].sum()
        yield Claim(
            f"{name}: by number, nearly all paths are long; short ones matter only by what they carry",
            "Dong et al., plot of path lengths",
            published,
            f"10^{first.log10_total:.2f} paths, mean {first['mean']:.4f}, {shares}; {short:.1e} through half of the "
            "layers or fewer",
            abs(rows.share.sum() - 1) < 1e-12 and short < 0.1,
            "Required: less than a tenth of the paths through half of the layers. Counts are binomial in closed form; "
            "published values are read off the same formula.",
        )
    terms = table[table.kind == "terms"]
    for skip, rows in terms.groupby("skip"):
        right = bool((rows.paths == (rows.heads + (1 if skip else 0)) ** rows.layers).all())
        error, stray = rows.reconstruction_error.max(), rows.row_sum_error.max()
        yield Claim(
            f"The output of attention layers {'with' if skip else 'without'} skips is the sum of its paths, each with "
            "a map whose rows sum to one",
            "Dong et al., Theorem 2.1",
            "exact",
            f"{', '.join(str(int(count)) for count in rows.paths.unique())} paths; relative error at most {error:.0e}, "
            f"row sums off by {stray:.0e} (float64)",
            right and bool(error < 1e-12 and stray < 1e-12),
            "Required: below 1e-12.",
        )
    with_skip = terms[terms.skip.astype(bool)]
    curve = with_skip[with_skip.layers == with_skip.layers.iloc[0]].groupby("length").relative_residual.mean()
    listed = ", ".join(f"{value:.2g}" for value in curve)
    yield unpublished(
        "With skips, a path has the less rank the more heads it goes through",
        f"{listed} for lengths 0 to {int(curve.index.max())}",
        curve.is_monotonic_decreasing,
        "Required: less at every length.",
        "Dong et al., Section 3, paths",
    )
