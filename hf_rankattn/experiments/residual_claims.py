"""What the residuals say of the theorems and figures on rank collapse."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .layer_exponents import CUBIC
from .runner import Claim


if TYPE_CHECKING:
    import pandas as pd

FIGURE = "Dong et al., plot of residuals in BERT, ALBERT, XLNet"
NAMES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
RECOMPUTE = "Needs the published weights: --checkpoint {} --dataset wiki_bio."
HUB = {"bert": "google-bert/bert-base-cased", "albert": "albert/albert-base-v2", "xlnet": "xlnet/xlnet-base-cased"}


def number(value: float) -> str:
    return f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def residual_claims(table: "pd.DataFrame") -> Sequence[Claim]:
    found = [*initial_claims(table), *albert_claims(table)]
    if (table.kind == "rate").any():
        found += [*rate_claims(table), *theory_claims(table)]
    return [*found, *pretrained_claims(), *checkpoint_claims(table)]


def curve(table: "pd.DataFrame", kind: str, model: str, variant: str, inputs: str | None = None) -> "pd.Series":
    rows = table[(table.kind == kind) & (table.model == model) & (table.variant == variant)]
    if inputs is not None:
        rows = rows[rows.inputs == inputs]
    return rows.groupby("layer").value.mean()


def published_curve(model: str, weights: str, variant: str) -> "pd.Series":
    from ..report.plots import published_table

    rows = published_table("residuals")
    rows = rows[(rows.model == model) & (rows.weights == weights) & (rows.variant == variant)]
    return rows.set_index("layer").value


def initial_claims(table: "pd.DataFrame") -> Iterator[Claim]:
    trick = bool(table[table.kind == "init"].as_published.any())
    for model, name in NAMES.items():
        san = f"san{', identity trick' if trick and model == 'albert' else ''}"
        skip = f"san+skip{', identity trick' if trick and model == 'albert' else ''}"
        ids, text = (curve(table, "init", model, san, inputs) for inputs in ("ids", "text"))
        theirs = published_curve(model, "init", "san")
        second = f", {number(theirs[2])} after layer 2"
        yield Claim(
            f"{name} at initialisation, attention alone: tokens become equal within a few layers",
            FIGURE,
            f"{number(theirs[0])} at the input, {number(theirs[1])} after layer 1{second}",
            f"{number(ids[0])}, {number(ids[1])}, {number(ids[2])} (random ids); {number(text[0])}, {number(text[1])}, "
            f"{number(text[2])} (text)",
            bool(max(ids[4:].max() if len(ids) > 4 else ids.iloc[-1], ids.iloc[-1]) < 1e-5),
        )
        last = int(ids.index.max())
        ours = [curve(table, "init", model, variant, "ids").iloc[-1] for variant in (skip, "transformer")]
        read = [published_curve(model, "init", variant).get(12) for variant in ("san+skip", "transformer")]
        yield Claim(
            f"{name} at initialisation: skips keep tokens apart, with and without MLPs",
            FIGURE,
            f"{read[0]:.3f} (attention + skips), {read[1]:.3f} (whole model) after layer 12",
            f"{ours[0]:.3f}, {ours[1]:.3f} after layer {last}",
            bool(min(ours) > 1e3 * ids.iloc[-1] and min(ours) > 0.05),
        )
    mlps = {}
    for model in NAMES:
        base = "san, identity trick" if trick and model == "albert" else "san"
        mlps[model] = [curve(table, "init", model, variant, "ids")[1] for variant in (base, "san+mlp")]
    yield Claim(
        "MLPs slow collapse down: at initialisation, residual after layer 1 without and with them",
        "Dong et al., Corollary 3.2 and plot of residuals",
        ", ".join(
            f"{NAMES[m]} {published_curve(m, 'init', 'san')[1]:.4f} and {published_curve(m, 'init', 'san+mlp')[1]:.4f}"
            for m in NAMES
        ),
        ", ".join(f"{NAMES[m]} {number(a)} and {number(b)}" for m, (a, b) in mlps.items()),
        bool(all(b > 1.5 * a for a, b in mlps.values())),
        "The corollary allows MLPs to slow collapse; fresh ones do not. Both end at the floor in the same layer.",
    )


def albert_claims(table: "pd.DataFrame") -> Iterator[Claim]:
    read = published_curve("albert", "init", "san+skip")[12]
    right = curve(table, "init", "albert", "san+skip", "ids")
    trick = curve(table, "init", "albert", "san+skip, identity trick", "ids")
    yield Claim(
        "Fault: replacing ALBERT's two MLP maps by identities leaves activation, skip and norm in what is called "
        "attention + skips",
        "Dong et al., code",
        f"{read:.4f} after layer 12",
        f"{trick.iloc[-1]:.3f} with the trick"
        + (f", {right.iloc[-1]:.3f} with the MLP removed" if len(right) else ""),
        bool(abs(trick.iloc[-1] - read) < 0.05),
        "The published value is that of a network with parts of the MLP in it; without them tokens are nearer to equal.",
    )
    rows = table[(table.kind == "init") & (table.layer == 0)]
    spread = rows.groupby(["model", "inputs", "seed"]).value.agg(lambda values: values.max() - values.min()).max()
    theirs = [published_curve("bert", "init", variant)[0] for variant in ("san", "san+mlp", "san+skip", "transformer")]
    yield Claim(
        "Fault: the published variants have weights drawn anew for each, so their curves start at different values",
        "Dong et al., code",
        f"BERT's four curves start at {min(theirs):.3f} to {max(theirs):.3f}",
        f"largest difference of two variants at the input: {spread:.2g}",
        bool(spread > 1e-3 if rows.as_published.any() else spread == 0),
        "Here all variants of a seed are one model." if not rows.as_published.any() else "As published.",
    )


def rate_claims(table: "pd.DataFrame") -> Iterator[Claim]:
    from ..measure import collapse_rate

    expected = {
        "BERT": "doubly_exponential", "ALBERT": "doubly_exponential", "XLNet": "geometric",
        "BERT, causal": "geometric", "XLNet, causal": "geometric",
    }  # fmt: skip
    words = {"doubly_exponential": "doubly exponentially", "geometric": "by a constant factor a layer"}
    for model, kind in expected.items():
        values = curve(table, "rate", model, "san")
        rate = collapse_rate(values.tolist(), floor=4.4e-16)
        theorem = kind == "doubly_exponential"
        yield Claim(
            f"{model}: attention alone collapses {words['doubly_exponential']}",
            "Dong et al., Theorem 2.3" if model in ("BERT", "ALBERT") else "Dong et al., Theorem 2.3; the question is ours",
            "exponent 3" if theorem else "",
            f"fitted exponent {rate.exponent:.2f}, {words.get(rate.kind, rate.kind)} (mean factor 1/{1 / rate.factor:.3g}; "
            f"float64: {', '.join(number(value) for value in values[: min(5, rate.used + 1)])})",
            bool(rate.kind == "doubly_exponential"),
            "" if theorem else "The theorem is of maps that depend on content alone and see all tokens: with relative "
            "positions or a causal mask the residual behind a layer is linear in that before it, not cubic.",
        )  # fmt: skip
    slopes = table[table.kind == "exponent"].groupby("model", sort=False).exponent.mean()
    cubic, linear = slopes[slopes.index.isin(CUBIC)], slopes[~slopes.index.isin(CUBIC)]
    yield Claim(
        "One layer of attention cubes the residual: exponent over all families whose maps depend on content alone",
        "Dong et al., Theorem 2.2, one layer",
        "3",
        ", ".join(f"{name} {value:.2f}" for name, value in cubic.items()),
        bool(((cubic - 3).abs() < 0.03).all()),
    )
    yield Claim(
        "The same with a causal mask, relative or rotary positions: the contraction is linear",
        "ours",
        "",
        ", ".join(f"{name} {value:.2f}" for name, value in linear.items()),
        bool(((linear - 1).abs() < 0.05).all()),
    )
    yield Claim(
        "The norm behind attention plays no role for the rate",
        "Dong et al., Section 3, layer normalisation",
        "no role",
        f"exponent {slopes['BERT']:.3f} without it, {slopes['BERT, norm kept']:.3f} with it",
        bool(abs(slopes["BERT"] - slopes["BERT, norm kept"]) < 0.02),
        "At initialisation. The published argument takes the norm for a scaling of columns; it is one of rows, and later "
        "work has values with which it prevents collapse.",
    )


def theory_claims(table: "pd.DataFrame") -> Iterator[Claim]:
    rows = table[table.kind == "no values"]
    starts = rows[rows.layer == 0].set_index("seed").value
    drift = (rows.value - rows.seed.map(starts)).abs().max()
    yield Claim(
        "With skips there are weights for which no depth loses rank: value weights of zero",
        "Dong et al., Claim 3.1",
        "residual at least that of the input",
        f"differs by at most {drift:.1e} over {int(rows.layer.max())} layers (float32)",
        bool(drift < 1e-5),
    )
    bound = table[table.kind == "bounds"]
    names = ["published_bound", "published_bound_v1", "repaired_bound", "sharp_bound"]
    within = {name: bool((bound.measured <= bound[name]).all()) for name in names}
    first = bound[bound.layer == bound.layer.min()].mean(numeric_only=True)
    yield Claim(
        "The residual behind a layer is at most 4 gamma beta H / sqrt(d_qk) times the cube of that before it",
        "Dong et al., Theorem 2.3, layer by layer; with gamma = 1 in the first version",
        "",
        f"fresh BERT, layer 1: residual {first.residual:.3g} -> {first.measured:.3g}; bounds {first.published_bound:.2g} "
        f"(gamma {first.gamma:.2f}), {first.published_bound_v1:.2g} (gamma 1), {first.sharp_bound:.2g} (ours); violations in "
        f"{len(bound)} layers: {sum(int((bound.measured > bound[name]).sum()) for name in names)}",
        all(within.values()),
        "True, and vacuous: the bounds are above the residual that enters, though collapse is immediate. With gamma = 1 the "
        "bound is false in general: for 16,385 tokens there is a layer with at least 79.9 where it says 58.8.",
    )


def pretrained_claims() -> Iterator[Claim]:
    for model, name in NAMES.items():
        ends = {v: published_curve(model, "pretrained", v) for v in ("san", "san+mlp", "san+skip", "transformer")}
        shown = {v: f"{number(c[12])}" if 12 in c.index else "floor" for v, c in ends.items()}
        yield Claim(
            f"{name} pretrained: residual after layer 12 (attention alone, + MLPs, + skips, whole model)",
            FIGURE,
            ", ".join(shown.values()),
            "",
            None,
            RECOMPUTE.format(HUB[model]),
        )
    slower = {}
    for model, name in NAMES.items():
        pure, mlp = (published_curve(model, "pretrained", variant) for variant in ("san", "san+mlp"))
        both = [layer for layer in range(1, 13) if max(pure.get(layer, 0), mlp.get(layer, 0)) > 1e-6]
        slower[name] = (sum(mlp.get(layer, 2e-7) > pure.get(layer, 2e-7) for layer in both), len(both))
    yield Claim(
        "MLPs slow collapse down in pretrained models: layers in which attention + MLPs is above attention alone",
        "Dong et al., Corollary 3.2 and plot of residuals",
        "MLPs counteract collapse",
        ", ".join(f"{name} {a} of {b}" for name, (a, b) in slower.items()) + " (of the published values themselves)",
        bool(all(a > b / 2 for a, b in slower.values())),
        "Weights were trained with skips, so this may say more about taking them away than about MLPs.",
    )


def checkpoint_claims(table: "pd.DataFrame") -> Iterator[Claim]:
    rows = table[table.kind == "checkpoint"]
    if not len(rows):
        return
    shown = {variant: part.set_index("layer").value for variant, part in rows.groupby("variant", sort=False)}
    ends = ", ".join(f"{variant} {number(values.iloc[-1])}" for variant, values in shown.items())
    yield Claim(
        f"{rows.title.iloc[0]} on {rows.source.iloc[0]}: taking the skips away makes tokens equal, keeping them does not",
        FIGURE,
        "BERT pretrained: floor without skips, .310 whole",
        f"after layer {int(rows.layer.max())}: {ends} (input {number(shown['transformer'].iloc[0])})",
        bool(shown["san"].iloc[-1] < 1e-4 < 0.05 < shown["transformer"].iloc[-1]) if "san" in shown else None,
        "" if "san" in shown else "Its layers add attention in their own code: the skip cannot be taken away.",
    )
