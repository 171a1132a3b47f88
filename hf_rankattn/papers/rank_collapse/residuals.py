"""How fast tokens become equal from layer to layer, with and without skips and MLPs, in fresh models and checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from ...families.architectures import family_of, layers_of
from ...probe import ablate, layer_bounds, measure_collapse
from ...probe.collapse import VARIANTS
from ...probe.survey import possible_variants
from ...report.plots import VARIANTS as LOOKS
from ...report.plots import literal, new_figure, published_table
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, every, judge
from ..sweep.tolerances import RESIDUAL, TRICK
from ._layer_exponents import LAYERS, attention_exponent, exponents_figure, rate_claims, theory_claims
from ._subjects import (
    AXIS,
    FAMILIES,
    FLOOR,
    Batch,
    checkpoint_inputs,
    checkpoint_parameters,
    fresh_model,
    inputs_of,
    layer_axis,
    number,
    titled,
)


SHOWS = "relative residual by layer in four variants: BERT, ALBERT, XLNet, every other family, and any checkpoint"
OPTIONS = ("as_published", "checkpoint", "text", "dataset")

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"shape": "smoke", "family_shape": "smoke", "examples": 2, "length": 16, "deep": 6, "seeds": 1},
    "laptop": {"shape": "base", "family_shape": "tiny", "examples": 8, "length": 128, "deep": 24, "seeds": 3},
    "paper": {"shape": "base", "family_shape": "base", "examples": 32, "length": 128, "deep": 24, "seeds": 5},
}
NAMES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
TRICKED = ", identity trick"
SWITCHES: dict[str, dict[str, Any]] = {name: dict(parts) for name, parts in VARIANTS.items()} | {
    f"san{TRICKED}": {"attention_skip": True, "mlp": "identity_trick"},
    f"san+skip{TRICKED}": {"mlp": "identity_trick"},
}
# name -> model type, fields of its config: attention alone under each mask, in float64 for its lower floor
RATES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("bert", {}),
    "BERT, causal": ("bert", {"is_decoder": True}),
    "ALBERT": ("albert", {}),
    "XLNet": ("xlnet", {}),
    "XLNet, causal": ("xlnet", {"attn_type": "uni"}),
}
FIGURE = "Dong et al., plot of residuals in BERT, ALBERT, XLNet"
HUB = {"bert": "google-bert/bert-base-cased", "albert": "albert/albert-base-v2", "xlnet": "xlnet/xlnet-base-cased"}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    draws = list(range(seeds or setting["seeds"]))
    sizes = {"examples": setting["examples"], "length": setting["length"]}
    shape, family_shape = {"shape": setting["shape"]}, {"shape": setting["family_shape"]}
    few = {**sizes, "examples": min(2, setting["examples"])}

    def of_kind(kind: str, more: Mapping[str, Any], cost: float = 1.0, **axes: Any) -> list[Cell]:
        return [Cell({"kind": kind, **axis, **more}, cost=cost) for axis in grid(**axes, seed=draws)]

    common = {"as_published": bool(options.get("as_published")), **shape, **sizes}
    found = of_kind("init", common, 10.0, model=list(NAMES), inputs=["ids", "text"])
    if checkpoint := checkpoint_parameters(options):
        found.append(Cell({"kind": "checkpoint", **checkpoint, **sizes, "seed": 0}, cost=5.0))
    if options.get("as_published"):
        return found
    found += of_kind("rate", {**shape, **few}, 4.0, model=list(RATES))
    found += of_kind("family", {**family_shape, **sizes}, model=list(FAMILIES))
    # the exponent of one layer hardly depends on its width, so these cells are small at every scale
    found += of_kind("exponent", {"shape": "tiny", "length": 16}, model=list(LAYERS))
    found += of_kind("no values", {"layers": setting["deep"], **family_shape, **sizes}, model="bert")
    found += of_kind("bounds", {**shape, **few, "examples": 1}, model="bert")
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    kind, family, shape, seed = (parameters.get(name, "") for name in ("kind", "model", "shape", "seed"))
    sizes: dict[str, Any] = {name: parameters.get(name) for name in ("examples", "length", "seed")}
    if kind == "exponent":
        return [{"variant": "san", "exponent": attention_exponent(family, shape, sizes["length"], seed)}]
    if kind == "checkpoint":
        model, batches, facts = checkpoint_inputs(parameters, **sizes)
        names = ("title", "model_type", "causal", "source", "precision_floor")
        return curves(model, batches, possible_variants(model, batches[0]), {name: facts[name] for name in names})
    if kind == "init":
        return initial_curves(parameters, sizes)
    options: dict[str, Any] = {"layers": parameters.get("layers")}
    if kind == "rate":
        family, fields = RATES[family]
        options = {"dtype": "float64", **fields}
    model = fresh_model(family, shape, seed, **options)
    batches = inputs_of(model.config, "ids", **sizes)
    if kind == "bounds":
        return bounds(model, batches)
    if kind == "rate":
        return curves(model, batches, ["san", "san+mlp"])
    if kind == "family":
        row = family_of(model)
        facts = {"title": row.name, "causal": bool(row.causal(model.config))}
        return curves(model, batches, possible_variants(model, batches[0]), facts)
    for layer in layers_of(model):  # heads that add nothing: the residual after all layers is that of the input
        layer.attention.self.value.weight.data.zero_()  # type: ignore[union-attr,operator]
    return curves(model, batches, ["san+skip"])


def initial_curves(parameters: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variants of one fresh model; as published, each of another model, and parts of ALBERT's MLPs are kept."""
    family, shape, seed, inputs = (parameters[name] for name in ("model", "shape", "seed", "inputs"))
    if not parameters["as_published"]:
        model = fresh_model(family, shape, seed)
        variants = SWITCHES if family == "albert" else VARIANTS
        return curves(model, inputs_of(model.config, inputs, **sizes), list(variants))
    rows = []
    for place, variant in enumerate(VARIANTS):
        model = fresh_model(family, shape, 1000 * (place + 1) + seed)
        chosen = variant + (TRICKED if family == "albert" and variant + TRICKED in SWITCHES else "")
        rows += curves(model, inputs_of(model.config, inputs, **sizes), [chosen])
    return rows


def curves(
    model: PreTrainedModel, batches: list[Batch], variants: Sequence[str], facts: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """A row for each variant and layer: the relative residual over the examples."""
    rows = []
    for variant in variants:
        with ablate(model, **SWITCHES[variant]):
            table = measure_collapse(model, batches, ["transformer"])
        for layer, values in table[table.metric == "relative_residual"].groupby("layer").value:
            low, high = float(values.quantile(0.05)), float(values.quantile(0.95))
            row = {"variant": variant, "layer": int(layer), "value": float(values.mean()), "low": low, "high": high}
            rows.append({**row, **(facts or {})})
    return rows


def bounds(model: PreTrainedModel, batches: list[Batch]) -> list[dict[str, Any]]:
    """The bounds of the theorems and the measured residual, for every layer."""
    table = layer_bounds(model, batches)
    wide = table.pivot_table(index="layer", columns="metric", values="value", aggfunc="max")
    names = ["residual", "measured", "beta", "gamma", "kappa", "lipschitz"]
    names += ["published_bound", "published_bound_v1", "sharp_bound", "repaired_bound"]
    return [
        {"layer": int(layer), **{name: float(row[name]) for name in names if name in row}}
        for layer, row in wide.iterrows()
    ]


def published_curve(model: str, weights: str, variant: str) -> pd.Series:
    """The published residual by layer."""
    rows = published_table("residuals")
    rows = rows[(rows.model == model) & (rows.weights == weights) & (rows.variant == variant)]
    return rows.set_index("layer").value


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """Filled markers are ours; hollow ones are read off the published figures."""
    found = {f"residuals-init-{inputs}": initial_figure(table, inputs) for inputs in ("ids", "text")}
    figure, axes = new_figure(1, 3, 12.6, 4.6, sharey=True)
    for axis, (model, name) in zip(axes[0], NAMES.items(), strict=True):
        draw_curves(axis, f"{name}, pretrained", table[:0], (model, "pretrained"))
    title = "Published values of pretrained models (mean of 32 texts; ALBERT with the identity trick)"
    found["residuals-pretrained"] = titled(figure, title, [axes[0, 0]], columns=4)
    given = table[table.kind == "checkpoint"]
    if len(given):
        figure, axes = new_figure(1, 1, 8.4, 5.0)
        family = str(given.model_type.iloc[0]).removeprefix("rank_")
        read = (family, "pretrained") if family in NAMES else None
        title = f"Do tokens stay apart? {literal(given.title.iloc[0])} on {literal(given.source.iloc[0])}"
        draw_curves(axes[0, 0], "", given, read)
        note = f"published: {NAMES[family]}-base, pretrained" if read else None
        found["residuals-checkpoint"] = titled(figure, title, [axes[0, 0]], note)
    if (table.kind == "family").any():
        found["residuals-families"] = family_figure(table[table.kind == "family"])
        found["residuals-rates"] = exponents_figure(table)
    for figure in found.values():
        figure.supylabel(AXIS)
    return found


def initial_figure(table: pd.DataFrame, inputs: str) -> Figure:
    """A column for each family: variants without skips above, on a logarithmic axis, those with skips below."""
    rows = table[(table.kind == "init") & (table.inputs == inputs)]
    models = list(dict.fromkeys(rows.model))
    figure, axes = new_figure(2, len(models), 4.2 * len(models), 7.6, sharey="row")
    for (upper, lower), model in zip(axes.T, models, strict=True):
        own, read = rows[rows.model == model], (model, "init")
        draw_curves(upper, f"{NAMES[model]}: attention skips removed", own, read, ("san", "san+mlp"))
        draw_curves(lower, f"{NAMES[model]}: skips kept", own, read, ("san+skip", "transformer"), log=False)
    first = rows.iloc[0]
    how = "as published" if rows.as_published.any() else "all variants of a seed are one model"
    what = {"ids": "random ids", "text": "words of a text"}[inputs]
    title = (
        f"Fresh weights, {what}: do tokens stay apart? ({first['shape']} shapes, {int(first.examples)} x "
        f"{int(first.length)} tokens, {rows.seed.nunique()} seed(s); {how})"
    )
    note = "published, fresh weights, 12 layers (ALBERT: with the identity trick); same line styles"
    return titled(figure, title, list(axes[:, models.index("albert")]), note)


def draw_curves(
    axis: Axes,
    title: str,
    rows: pd.DataFrame,
    published: tuple[str, str] | None = None,
    variants: Sequence[str] = tuple(LOOKS),
    log: bool = True,
) -> None:
    """A line for each variant: mean over seeds, band over texts and seeds; hollow markers are the published curve."""
    for variant in variants:
        name, line, marker, colour = LOOKS[variant]
        trick: dict[str, Any] = {"label": f"{name} (MLP by the identity trick)", "linewidth": 0.9, "markersize": 7}
        for how, look in (("", {"marker": marker, "label": name}), (TRICKED, {"marker": "+", **trick})):
            layers = rows[rows.variant == variant + how].groupby("layer")
            found = layers.agg({"value": "mean", "low": "min", "high": "max"}).clip(lower=FLOOR / 4)
            axis.fill_between(found.index, found.low, found.high, color=colour, alpha=0.12, linewidth=0)
            if len(found):
                axis.plot(found.index, found.value, line, color=colour, **look)
        if published:
            curve = published_curve(*published, variant)
            shown: dict[str, Any] = (
                {"color": "0.4", "linewidth": 0.8} if len(rows) else {"color": colour, "label": name}
            )
            axis.plot(curve.index, curve, line, marker=marker, markerfacecolor="white", markersize=4, **shown)
    layer_axis(axis, log)
    if not log:
        axis.set_ylim(0, 1.1)
    axis.set_title(title)


def family_figure(rows: pd.DataFrame) -> Figure:
    """A small panel for each family with fresh weights."""
    models = dict.fromkeys(rows.model)
    lines = -(-len(models) // 4)
    figure, axes = new_figure(lines, 4, 12.6, 2.6 * lines + 1.2)
    for axis in axes.flat[len(models) :]:
        axis.set_visible(False)
    for axis, model in zip(axes.flat, models, strict=False):
        part = rows[rows.model == model]
        whole, causal = part.variant.nunique() == 4, ", causal" if part.causal.iloc[0] else ""
        note = "" if whole else "\n(skips cannot be removed; linear axis)"
        draw_curves(axis, f"{part.title.iloc[0]}{causal}{note}", part, log=whole)
    first = rows.iloc[0]
    title = (
        f"Every family with fresh weights ({first['shape']} shape, {int(first.examples)} x {int(first.length)} random tokens, "
        f"{rows.seed.nunique()} seed(s))"
    )
    return titled(figure, title, [axes[0, 0]], columns=4)


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    fresh = table[table.kind == "init"]
    yield from initial_claims(fresh)
    yield from albert_claims(fresh)
    if (table.kind == "rate").any():
        yield from rate_claims(table)
        yield from theory_claims(table)
    yield from pretrained_claims()
    yield from checkpoint_claims(table[table.kind == "checkpoint"])


def rows_of(fresh: pd.DataFrame, model: str, variant: str, inputs: str = "ids") -> pd.DataFrame:
    return fresh[(fresh.model == model) & (fresh.variant == variant) & (fresh.inputs == inputs)]


def mean_curve(fresh: pd.DataFrame, model: str, variant: str, inputs: str = "ids") -> pd.Series:
    return rows_of(fresh, model, variant, inputs).groupby("layer").value.mean()


def last_residuals(fresh: pd.DataFrame, model: str, variant: str) -> pd.Series:
    """The residual after the last layer, for each seed."""
    rows = rows_of(fresh, model, variant)
    return rows[rows.layer == rows.layer.max()].set_index("seed").value


def initial_claims(fresh: pd.DataFrame) -> Iterator[Claim]:
    as_published = bool(fresh.as_published.any())
    mlps, published_mlps = {}, {}
    for model, name in NAMES.items():
        how = TRICKED if as_published and model == "albert" else ""
        ids, text = (mean_curve(fresh, model, f"san{how}", inputs) for inputs in ("ids", "text"))
        theirs = published_curve(model, "init", "san")
        late = rows_of(fresh, model, f"san{how}")
        late = late[late.layer >= min(4, late.layer.max())]
        yield Claim(
            f"{name} at initialisation, attention alone: tokens become equal within a few layers",
            FIGURE,
            f"{number(theirs[0])} at the input, {number(theirs[1])} after layer 1, {number(theirs[2])} after layer 2",
            f"{', '.join(map(number, ids[:3]))} (random ids); {', '.join(map(number, text[:3]))} (text)",
            late.value.max() < 1e-5,
            "Required: below 1e-5 from layer 4 on, in every seed.",
        )
        ends = [last_residuals(fresh, model, variant) for variant in (f"san+skip{how}", "transformer")]
        read = [published_curve(model, "init", variant)[12] for variant in ("san+skip", "transformer")]
        yield every(
            judge(f"{what} over the published", own / value, least=1 / RESIDUAL, ratio=True)
            for what, own, value in zip(("attention + skips", "whole model"), ends, read, strict=True)
        ).claim(
            f"{name} at initialisation: skips keep tokens apart, with and without MLPs",
            FIGURE,
            f"{read[0]:.3f} (attention + skips), {read[1]:.3f} (whole model) after layer 12",
            f"{ends[0].mean():.3f}, {ends[1].mean():.3f} after layer {int(ids.index.max())}; without skips "
            f"{number(ids.iloc[-1])}",
            no="Tokens do not become equal, but they come nearer to it than published."
            + (" The published curve still has parts of the MLP, see the fault below." if model == "albert" else ""),
        )
        mlps[name] = ids[1], mean_curve(fresh, model, "san+mlp")[1]
        published_mlps[name] = theirs[1], published_curve(model, "init", "san+mlp")[1]
    yield Claim(
        "MLPs slow collapse down: at initialisation, residual after layer 1 without and with them",
        "Dong et al., Corollary 3.2 and plot of residuals",
        ", ".join(f"{name} {a:.4f} and {b:.4f}" for name, (a, b) in published_mlps.items()),
        ", ".join(f"{name} {number(a)} and {number(b)}" for name, (a, b) in mlps.items()),
        all(b > 1.5 * a for a, b in mlps.values()),
        "Required: 1.5 times as large in each. The corollary allows MLPs to slow collapse; fresh ones do not. Both end at "
        "the floor in the same layer.",
    )


def albert_claims(fresh: pd.DataFrame) -> Iterator[Claim]:
    read = published_curve("albert", "init", "san+skip")[12]
    right = mean_curve(fresh, "albert", "san+skip")
    trick = last_residuals(fresh, "albert", f"san+skip{TRICKED}")
    tricked, plain = (mean_curve(fresh, "albert", f"san{how}") for how in (TRICKED, ""))
    yield judge("residual with the trick minus the published", trick - read, -TRICK, TRICK).claim(
        "Fault: replacing ALBERT's two MLP maps by identities leaves activation, skip and norm in what is called "
        "attention + skips",
        "Dong et al., code",
        f"{read:.4f} after layer 12",
        f"{trick.mean():.3f} with the trick"
        + (f", {right.iloc[-1]:.3f} with the MLP removed" if len(right) else "")
        + (f"; attention alone, layer 1: {tricked[1]:.2e} and {plain[1]:.2e}" if len(plain) else ""),
        "The published value is that of a network with parts of the MLP in it; without them tokens are nearer to equal. The "
        "trick also changes the curve of attention alone.",
    )
    starts = fresh[fresh.layer == 0]
    spread = starts.groupby(["model", "inputs", "seed"]).value.agg(lambda values: values.max() - values.min()).max()
    theirs = [published_curve("bert", "init", variant)[0] for variant in VARIANTS]
    as_published = starts.as_published.any()
    yield Claim(
        "Fault: the published variants have weights drawn anew for each, so their curves start at different values",
        "Dong et al., code",
        f"BERT's four curves start at {min(theirs):.3f} to {max(theirs):.3f}",
        f"largest difference of two variants at the input: {spread:.2g}",
        spread > 1e-3 if as_published else spread == 0,
        "Required: more than 1e-3. As published."
        if as_published
        else "Required: 0. Here all variants of a seed are one model.",
    )


def pretrained_claims() -> Iterator[Claim]:
    slower = {}
    for model, name in NAMES.items():
        theirs = {variant: published_curve(model, "pretrained", variant) for variant in reversed(LOOKS)}
        yield Claim(
            f"{name} pretrained: residual after layer 12 (attention alone, + MLPs, + skips, whole model)",
            FIGURE,
            ", ".join(number(curve[12]) for curve in theirs.values()),
            "",
            None,
            f"Needs the published weights: --checkpoint {HUB[model]} --dataset wiki_bio. Values below 5e-07 are rounding of "
            "float32.",
        )
        pure, mlp = (theirs[variant].reindex(range(1, 13), fill_value=2e-7) for variant in ("san", "san+mlp"))
        above = np.maximum(pure, mlp) > 1e-6
        slower[name] = int((mlp > pure)[above].sum()), int(above.sum())
    yield Claim(
        "MLPs slow collapse down in pretrained models: layers in which attention + MLPs is above attention alone",
        "Dong et al., Corollary 3.2 and plot of residuals",
        "MLPs counteract collapse",
        ", ".join(f"{name} {a} of {b}" for name, (a, b) in slower.items()) + " (of the published values themselves)",
        all(a > b / 2 for a, b in slower.values()),
        "Required: in most layers of each. Weights were trained with skips, so this may say more about taking them away than "
        "about MLPs.",
    )


def checkpoint_claims(rows: pd.DataFrame) -> Iterator[Claim]:
    if not len(rows):
        return
    shown = {variant: part.set_index("layer").value for variant, part in rows.groupby("variant", sort=False)}
    ends = ", ".join(f"{variant} {number(values.iloc[-1])}" for variant, values in shown.items())
    removable = "san" in shown
    yield Claim(
        f"{rows.title.iloc[0]} on {rows.source.iloc[0]}: taking the skips away makes tokens equal, keeping them does not",
        FIGURE,
        "BERT pretrained: floor without skips, .310 whole",
        f"after layer {int(rows.layer.max())}: {ends} (input {number(shown['transformer'].iloc[0])})",
        bool(shown["san"].iloc[-1] < 1e-4 < 0.05 < shown["transformer"].iloc[-1]) if removable else None,
        "" if removable else "Its layers add attention in their own code: the skip cannot be taken away.",
    )
