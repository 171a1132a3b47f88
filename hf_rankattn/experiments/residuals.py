"""How fast tokens become equal from layer to layer, with and without skips and MLPs, in fresh models and checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .grid import Cell, grid
from .layer_exponents import LAYERS
from .runner import Claim
from .subjects import FAMILIES, checkpoint_inputs, checkpoint_parameters, fresh_model, inputs_of


NAME = "residuals"
SHOWS = "relative residual by layer in four variants: BERT, ALBERT, XLNet, every other family, and any checkpoint"
REVISION = 1
OPTIONS = ("as_published", "checkpoint", "text", "dataset")

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"shape": "smoke", "family_shape": "smoke", "examples": 2, "length": 16, "deep": 6, "seeds": 1},
    "laptop": {"shape": "base", "family_shape": "tiny", "examples": 8, "length": 128, "deep": 24, "seeds": 2},
    "paper": {"shape": "base", "family_shape": "base", "examples": 32, "length": 128, "deep": 24, "seeds": 5},
}
PUBLISHED_FAMILIES = ["bert", "albert", "xlnet"]
TRICK: dict[str, dict[str, Any]] = {
    "san, identity trick": {"attention_skip": True, "mlp": "identity_trick"},
    "san+skip, identity trick": {"mlp": "identity_trick"},
}
# name -> model type, fields of its config: what attention alone does under each mask, in float64 for its floor is lower
RATES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("bert", {}),
    "BERT, causal": ("bert", {"is_decoder": True}),
    "ALBERT": ("albert", {}),
    "XLNet": ("xlnet", {}),
    "XLNet, causal": ("xlnet", {"attn_type": "uni"}),
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    draws = list(range(seeds or setting["seeds"]))
    sizes = {"examples": setting["examples"], "length": setting["length"]}
    common = {"as_published": bool(options.get("as_published")), "shape": setting["shape"], **sizes}
    found = [
        Cell({"kind": "init", **axis, **common}, cost=10.0)
        for axis in grid(model=PUBLISHED_FAMILIES, inputs=["ids", "text"], seed=draws)
    ]
    if checkpoint := checkpoint_parameters(options):
        found.append(Cell({"kind": "checkpoint", **checkpoint, **sizes, "seed": 0}, cost=5.0))
    if options.get("as_published"):
        return found
    shape, family_shape = {"shape": setting["shape"]}, {"shape": setting["family_shape"]}
    few = {"examples": min(2, setting["examples"]), "length": setting["length"]}
    found += [Cell({"kind": "rate", **axis, **shape, **few}, cost=4.0) for axis in grid(model=list(RATES), seed=draws)]
    found += [
        Cell({"kind": "family", **axis, **family_shape, **sizes}) for axis in grid(model=list(FAMILIES), seed=draws)
    ]
    # one layer is as wide as the others are in what is asked of it, so these are small at every scale
    found += [
        Cell({"kind": "exponent", **axis, "shape": "tiny", "length": 16})
        for axis in grid(model=list(LAYERS), seed=draws)
    ]
    found += [
        Cell({"kind": "no values", "model": "bert", "seed": seed, "layers": setting["deep"], **family_shape, **sizes})
        for seed in draws
    ]
    found += [Cell({"kind": "bounds", "model": "bert", "seed": seed, **shape, **few, "examples": 1}) for seed in draws]
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    kind = parameters["kind"]
    sizes: dict[str, Any] = {name: parameters.get(name) for name in ("examples", "length", "seed")}
    if kind == "exponent":
        from .layer_exponents import attention_exponent

        value = attention_exponent(parameters["model"], parameters["shape"], sizes["length"], sizes["seed"])
        return [{"variant": "san", "exponent": value}]
    if kind == "checkpoint":
        from ..survey import possible_variants

        model, batches, facts = checkpoint_inputs(parameters, **sizes)
        names = ("title", "model_type", "causal", "source", "precision_floor")
        return curves(model, batches, possible_variants(model), {name: facts[name] for name in names})
    if kind == "init":
        return initial_curves(parameters, sizes)
    if kind == "rate":
        family, fields = RATES[parameters["model"]]
        model = fresh_model(family, parameters["shape"], sizes["seed"], "float64", **fields)
        return curves(model, inputs_of(model.config, "ids", **sizes), ["san", "san+mlp"])
    if kind == "family":
        from ..probe.architectures import family_of
        from ..survey import possible_variants

        model = fresh_model(parameters["model"], parameters["shape"], sizes["seed"])
        family_row = family_of(model)
        facts = {"title": family_row.name, "causal": bool(family_row.causal(model.config))}
        return curves(model, inputs_of(model.config, "ids", **sizes), possible_variants(model), facts)
    if kind == "no values":
        return without_values(parameters, sizes)
    return bounds(parameters, sizes)


def initial_curves(parameters: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The four variants of one fresh model; as published, each of another one, and ALBERT's MLPs only half gone."""
    from ..probe.collapse import VARIANTS

    family, shape, seed = parameters["model"], parameters["shape"], parameters["seed"]
    variants: list[str] = list(VARIANTS)
    if not parameters["as_published"]:
        model = fresh_model(family, shape, seed)
        variants += list(TRICK) if family == "albert" else []
        return curves(model, inputs_of(model.config, parameters["inputs"], **sizes), variants)
    rows = []
    for place, variant in enumerate(variants):
        model = fresh_model(family, shape, 1000 * (place + 1) + seed)
        chosen = f"{variant}, identity trick" if family == "albert" and variant in ("san", "san+skip") else variant
        rows += curves(model, inputs_of(model.config, parameters["inputs"], **sizes), [chosen])
    return rows


def curves(model, batches, variants: Sequence[str], facts: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """A row for each variant and layer: the relative residual over the examples."""
    from ..probe import ablate, measure_collapse
    from ..probe.collapse import VARIANTS

    switches: dict[str, dict[str, Any]] = {name: dict(parts) for name, parts in VARIANTS.items()} | TRICK
    rows = []
    for variant in variants:
        with ablate(model, **switches[variant]):
            table = measure_collapse(model, batches, ["transformer"])
        layers = table[table.metric == "relative_residual"].groupby("layer").value
        for layer, values in layers:
            rows.append(
                {
                    "variant": variant,
                    "layer": int(layer),
                    "value": float(values.mean()),
                    "low": float(values.quantile(0.05)),
                    "high": float(values.quantile(0.95)),
                    **(facts or {}),
                }  # fmt: skip
            )
    return rows


def without_values(parameters: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A deep model whose heads add nothing, which is as near to collapse after all its layers as before them."""
    from ..probe.architectures import layers_of

    model = fresh_model("bert", parameters["shape"], sizes["seed"], layers=parameters["layers"])
    for layer in layers_of(model):
        value = layer.attention.self.value  # type: ignore[union-attr]
        value.weight.data.zero_()  # type: ignore[union-attr,operator]
    return curves(model, inputs_of(model.config, "ids", **sizes), ["san+skip"])


def bounds(parameters: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The bounds of the theorems beside what is measured, for every layer of a fresh model."""
    from ..probe import layer_bounds

    model = fresh_model("bert", parameters["shape"], sizes["seed"])
    table = layer_bounds(model, inputs_of(model.config, "ids", **sizes))
    wide = table.pivot_table(index="layer", columns="metric", values="value", aggfunc="max")
    names = ("residual", "measured", "beta", "gamma", "kappa", "published_bound", "published_bound_v1", "sharp_bound",
             "repaired_bound", "lipschitz")  # fmt: skip
    return [
        {"layer": int(layer), **{name: float(row[name]) for name in names if name in row}}
        for layer, row in wide.iterrows()
    ]


def figures(table, scale: str):
    from ..report.collapse import (
        checkpoint_residuals_figure,
        exponents_figure,
        family_residuals_figure,
        initial_residuals_figure,
        pretrained_residuals_figure,
    )

    found = {f"residuals-init-{inputs}": initial_residuals_figure(table, inputs) for inputs in ("ids", "text")}
    found["residuals-pretrained"] = pretrained_residuals_figure()
    if (table.kind == "checkpoint").any():
        found["residuals-checkpoint"] = checkpoint_residuals_figure(table)
    if (table.kind == "family").any():
        found |= {"residuals-families": family_residuals_figure(table), "residuals-rates": exponents_figure(table)}
    return found


def claims(table, scale: str) -> Sequence[Claim]:
    from .residual_claims import residual_claims

    return residual_claims(table)
