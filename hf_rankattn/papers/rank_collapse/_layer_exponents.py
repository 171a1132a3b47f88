"""The rate of collapse over all layers and in one layer, beside the theorems."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from ...families.architectures import family_of, layers_of
from ...families.projections import submodule
from ...measure import collapse_rate, composite_norm, residual
from ...measure.rate import FASTER
from ...probe import ablate
from ...probe.ablate import first
from ...report.plots import STYLES, new_figure
from ..drawing import BLUE
from ..sweep.judging import Claim, unpublished
from ._subjects import Batch, fresh_model, inputs_of, layer_axis, number


# title -> model type, config fields, change to the layer: layers whose exponent is measured
LAYERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BERT": ("bert", {}, ""),
    "BERT, norm kept": ("bert", {}, "after the norm"),
    "BERT, causal mask": ("bert", {"is_decoder": True}, ""),
    **{name: (name.lower(), {}, "") for name in ("RoBERTa", "ELECTRA", "ALBERT", "DistilBERT")},
    "RankEncoder": ("rank_encoder", {}, ""),
    **{name: (name.lower(), {}, "") for name in ("ViT", "XLNet")},
    "XLNet, relative positions zeroed": ("xlnet", {}, "no relative positions"),
    "XLNet, causal mask": ("xlnet", {"attn_type": "uni"}, ""),
    "GPT-2 (causal)": ("gpt2", {}, ""),
    "Llama (causal, rotary)": ("llama", {}, ""),
    "Llama without its causal mask": ("llama", {}, "no mask"),
    "DeepSeek-V3 (causal, rotary)": ("deepseek_v3", {}, ""),
}
# logits depend on content alone, and every token attends to every other
CUBIC = {"BERT", "BERT, norm kept", "RoBERTa", "ELECTRA", "ALBERT", "DistilBERT", "RankEncoder", "ViT"}
CUBIC |= {"XLNet, relative positions zeroed"}
LARGE, SMALL = 0.03, 0.003


def attention_exponent(title: str, shape: str, tokens: int, seed: int) -> float:
    """The slope of the log residual after the attention of the first layer against the log residual before it.

    3 is the cubic contraction of the theorem, 1 a constant factor. All tokens share one row, to which a small random part
    is added, in float64. The norms of Llama compute in float32, so the small part is not smaller.
    """
    family, fields, change = LAYERS[title]
    model = fresh_model(family, shape, seed, "float64", **fields)
    batch = inputs_of(model.config, "ids", 1, tokens, seed)[0]
    if change == "no mask":
        batch["attention_mask"] = torch.zeros(1, 1, tokens, tokens, dtype=torch.float64)
    if change == "no relative positions":
        layers_of(model)[0].rel_attn.r.data.zero_()  # type: ignore[union-attr,operator]
    large, small = (residual_after(model, batch, size, seed, change == "after the norm") for size in (LARGE, SMALL))
    return math.log(large / small) / math.log(LARGE / SMALL)


def residual_after(model: PreTrainedModel, batch: Batch, size: float, seed: int, normed: bool) -> float:
    """The residual of what the first layer's attention, or the norm after it, returns for nearly equal tokens."""
    family, layer = family_of(model), layers_of(model)[0]
    module = submodule(layer, family.attention_norm if normed else family.attended)
    assert module is not None
    seen: list[torch.Tensor] = []

    def enter(_, args, kwargs):
        given = args[0] if args else kwargs["hidden_states"]
        draw = torch.Generator().manual_seed(seed)
        shared = torch.randn(given.shape[-1], generator=draw, dtype=torch.float64)
        states = shared + size * torch.randn(given.shape, generator=draw, dtype=torch.float64)
        return ((states, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": states})

    entering = layer.register_forward_pre_hook(enter, with_kwargs=True)
    leaving = module.register_forward_hook(lambda _, args, output: seen.append(first(output)))
    with entering, leaving, torch.no_grad(), ablate(model, attention_skip=normed):
        model(**batch)
    # XLNet's dropout is applied to the maps before the output of attention; where layers are shared, the first pass counts
    states = seen[1] if family.maps == "dropout" and not normed else seen[0]
    states = states if family.batch_first else states.transpose(0, 1)
    return composite_norm(residual(states))[0].item()


def exponents_figure(table: pd.DataFrame) -> Figure:
    """Left: attention alone under each mask, in float64. Right: the exponent of one layer of each family."""
    figure, axes = new_figure(1, 2, 13.0, 5.4, width_ratios=[1.1, 1.0])
    left, right = axes[0]
    rates = table[(table.kind == "rate") & (table.variant == "san")]
    for (model, rows), (marker, line, colour) in zip(rates.groupby("model", sort=False), STYLES, strict=False):
        mean = rows.groupby("layer").value.mean().clip(lower=1e-16)
        left.plot(mean.index, mean, line, marker=marker, color=colour, label=model)
    layer_axis(left, log=False)
    left.set(yscale="log", ylim=(5e-17, 2.0), title="Attention alone, fresh weights, float64")
    left.axhspan(5e-17, 4.4e-15, color="0.93", zorder=0, label="within ten times the precision")
    left.legend(loc="upper right", bbox_to_anchor=(1.0, 0.8))
    exponents = table[table.kind == "exponent"]
    names = list(dict.fromkeys(exponents.model))[::-1]
    for place, name in enumerate(names):
        values = exponents[exponents.model == name].exponent
        right.plot(values, [place] * len(values), *(("o", BLUE) if values.mean() > 2 else ("s", "#b9770e")))
    right.set_yticks(range(len(names)), names, fontsize=8)
    xlabel = "exponent of one layer of attention\n(1: constant factor, 3: cubic)"
    right.set(xlim=(0.5, 3.5), xticks=[1, 2, 3], xlabel=xlabel, title="Power of the residual that one layer returns")
    figure.suptitle("Doubly exponential only where all tokens are seen and content alone decides")
    return figure


def rate_claims(table: pd.DataFrame) -> Iterator[Claim]:
    rates = table[(table.kind == "rate") & (table.variant == "san")]
    words = {"doubly_exponential": "doubly exponentially", "geometric": "by a constant factor a layer"}
    for model in ("BERT", "ALBERT", "XLNet", "BERT, causal", "XLNet, causal"):
        values = rates[rates.model == model].groupby("layer").value.mean()
        rate = collapse_rate(values.tolist(), floor=4.4e-16)
        theorem = model in ("BERT", "ALBERT")
        first = ", ".join(number(value) for value in values[: min(5, rate.used + 1)])
        why = (
            " The theorem is of maps that depend on content alone and see all tokens: with relative positions or a causal "
            "mask the residual behind a layer is linear in that before it, not cubic."
        )
        yield Claim(
            f"{model}: attention alone collapses doubly exponentially",
            "Dong et al., Theorem 2.3" + ("" if theorem else "; the question is ours"),
            "exponent 3" if theorem else "",
            f"fitted exponent {rate.exponent:.2f}, {words.get(rate.kind, rate.kind)} (mean factor 1/{1 / rate.factor:.3g}; "
            f"float64: {first})",
            rate.kind == "doubly_exponential",
            f"Required: a fitted exponent above {FASTER:g}.{'' if theorem else why}",
        )
    slopes = table[table.kind == "exponent"].groupby("model", sort=False).exponent.mean()
    cubic, linear = slopes[slopes.index.isin(CUBIC)], slopes[~slopes.index.isin(CUBIC)]
    yield Claim(
        "One layer of attention cubes the residual: exponent over all families whose maps depend on content alone",
        "Dong et al., Theorem 2.2, one layer",
        "3",
        ", ".join(f"{name} {value:.2f}" for name, value in cubic.items()),
        ((cubic - 3).abs() < 0.03).all(),
        "Required: within 0.03.",
    )
    yield unpublished(
        "The same with a causal mask, relative or rotary positions: the contraction is linear",
        ", ".join(f"{name} {value:.2f}" for name, value in linear.items()),
        ((linear - 1).abs() < 0.05).all(),
        "Required: within 0.05 of 1.",
    )
    without, kept = slopes["BERT"], slopes["BERT, norm kept"]
    yield Claim(
        "The norm behind attention plays no role for the rate",
        "Dong et al., Section 3, layer normalisation",
        "no role",
        f"exponent {without:.3f} without it, {kept:.3f} with it",
        abs(without - kept) < 0.02,
        "Required: within 0.02. At initialisation. The published argument takes the norm for a scaling of columns; it is one "
        "of rows, and later work has values with which it prevents collapse.",
    )


def theory_claims(table: pd.DataFrame) -> Iterator[Claim]:
    rows = table[table.kind == "no values"]
    drift = (rows.value - rows.seed.map(rows[rows.layer == 0].set_index("seed").value)).abs().max()
    yield Claim(
        "With skips there are weights for which no depth loses rank: value weights of zero",
        "Dong et al., Claim 3.1",
        "residual at least that of the input",
        f"differs by at most {drift:.1e} over {int(rows.layer.max())} layers (float32)",
        drift < 1e-5,
        "Required: below 1e-5.",
    )
    bound = table[table.kind == "bounds"]
    names = ["published_bound", "published_bound_v1", "repaired_bound", "sharp_bound"]
    violations = sum(int((bound.measured > bound[name]).sum()) for name in names)
    first = bound[bound.layer == bound.layer.min()].mean(numeric_only=True)
    yield unpublished(
        "The residual behind a layer is at most 4 gamma beta H / sqrt(d_qk) times the cube of that before it",
        f"fresh BERT, layer 1: residual {first.residual:.3g} -> {first.measured:.3g}; bounds {first.published_bound:.2g} "
        f"(gamma {first.gamma:.2f}), {first.published_bound_v1:.2g} (gamma 1), {first.sharp_bound:.2g} (ours); violations in "
        f"{len(bound)} layers: {violations}",
        (bound[names].ge(bound.measured, axis=0)).all(axis=None),
        "Required: no violation. The bounds are vacuous: they are above the residual that enters, though collapse is immediate. "
        "With gamma = 1 the bound is false in general: for 16,385 tokens there is a layer with at least 79.9 where it says 58.8.",
        "Dong et al., Theorem 2.3, layer by layer; with gamma = 1 in the first version",
    )
