"""Attention maps of every family that can be measured, with fresh weights: how much rank before any training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ...families.architectures import TABLE, family_of
from ...measure import spectral_metrics
from ...probe import measure_attention, measure_logits
from ...probe.survey import token_counts
from ...report.plots import new_figure, published_table
from ..drawing import BLUE, DASHED, GREY, RED, log_ticks
from ..rank_collapse._subjects import checkpoint_inputs, checkpoint_parameters, inputs_of
from ..sweep.grid import Cell
from ..sweep.judging import Claim, judge, unpublished
from ..sweep.tolerances import CLOSE
from . import published


SHOWS = "rank of attention maps at random init, every family, with and without QK-norm, against content-free maps"
OPTIONS = ("checkpoint", "text", "dataset")

METRICS = ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "argmax_coverage", "row_entropy")
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"layers": 1, "hidden": 64, "heads": 4, "n": 32, "examples": 1, "seeds": 1},
    "laptop": {"layers": 4, "hidden": 768, "heads": 12, "n": 128, "examples": 2, "seeds": 3},
    "paper": {"layers": 12, "hidden": 768, "heads": 12, "n": 512, "examples": 8, "seeds": 3},
}
# the names of hidden size, heads, layers and inner size in a config
SIZES: dict[str, tuple[str, str, str, str]] = {
    "xlnet": ("d_model", "n_head", "n_layer", "d_inner"),
    "distilbert": ("dim", "n_heads", "n_layers", "hidden_dim"),
    "gpt2": ("n_embd", "n_head", "n_layer", "n_inner"),
}
COMMON = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
VOCABULARY = 8192
WITH_NORM = ("rank_bert", "rank_albert", "rank_xlnet", "rank_encoder")


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    shape = {name: setting[name] for name in ("layers", "hidden", "heads", "n", "examples")}
    made = []
    for family in TABLE:
        for model_type in family.model_types if family.layers else ():
            if model_type.startswith("rank_") and model_type not in WITH_NORM:
                continue  # its attention is that of one of these
            # without the norm, a rank twin equals its stock model to the last bit; the rank encoder has no stock model
            norms = [False] * (model_type not in WITH_NORM[:3]) + [True] * (model_type in WITH_NORM)
            for qk_norm in norms:
                model = {"family": family.name, "model_type": model_type, "qk_norm": qk_norm, "checkpoint": None}
                made += [Cell({**model, **shape, "seed": seed}) for seed in range(seeds or setting["seeds"])]
    if given := checkpoint_parameters(options):
        sizes = {"n": setting["n"], "examples": setting["examples"], "seed": 0}
        made.append(Cell({"family": "given", "model_type": None, "qk_norm": None, **given, **sizes}, cost=10))
    return made


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """A row for each layer: the metrics, mean over heads and examples, and those of a map that ignores content."""
    sizes = {"examples": parameters["examples"], "length": parameters["n"], "seed": parameters["seed"]}
    if parameters["checkpoint"]:
        model, batches, _ = checkpoint_inputs(parameters, **sizes)
    else:
        model = fresh_model(parameters)
        batches = inputs_of(model.config, "ids", **sizes)
    maps = measure_attention(model, batches, "full").groupby(["layer", "metric"]).value.mean().unstack()
    spread = measure_logits(model, batches)
    spread = spread[spread.metric == "logit_std"].groupby("layer").value.mean()
    counts = [count for batch in batches for count in token_counts(model, batch)]
    tokens = sum(counts) / len(counts)
    causal = bool(family_of(model).causal(model.config))
    about = {"tokens": tokens, "causal": causal, "model": model.config.model_type}
    free = {f"free_{name}": value for name, value in content_free_metrics(round(tokens), causal).items()}
    return [
        {"layer": int(layer), **about, "logit_std": float(spread[layer])}
        | {name: float(row[name]) for name in METRICS}
        | free
        for layer, row in maps.iterrows()
    ]


def content_free_metrics(n: int, causal: bool) -> dict[str, float]:
    """The map that spreads each row evenly, over all tokens or over the past."""
    maps = torch.ones(n, n, dtype=torch.float64)
    maps = maps.tril() if causal else maps
    found = spectral_metrics(maps / maps.sum(-1, keepdim=True))
    return {name: found[name].item() for name in METRICS}


def fresh_model(parameters: Mapping[str, Any]) -> PreTrainedModel:
    """A base model with weights as its family initialises them. At laptop scale heads have width 64."""
    model_type, hidden, heads, layers = (parameters[name] for name in ("model_type", "hidden", "heads", "layers"))
    width, names = hidden // heads, SIZES.get(model_type.removeprefix("rank_"), COMMON)
    fields: dict[str, Any] = dict(zip(names, (hidden, heads, layers, 2 * hidden), strict=True))
    if model_type != "vit":
        fields["vocab_size"] = VOCABULARY
    elif parameters["n"] < 64:
        fields |= {"image_size": 48, "patch_size": 8}
    embedded = {"albert": max(16, hidden // 6), "rank_albert": max(16, hidden // 6), "electra": hidden}
    if model_type in embedded:
        fields["embedding_size"] = embedded[model_type]
    if model_type in ("llama", "qwen2", "qwen3", "mistral"):
        fields |= {"num_key_value_heads": heads, "head_dim": width}
    if model_type == "deepseek_v3":
        fields |= {"num_key_value_heads": heads, "first_k_dense_replace": layers, "v_head_dim": width}
        fields |= {"qk_nope_head_dim": width // 2, "qk_rope_head_dim": width // 2}
        fields |= {"kv_lora_rank": hidden // 4, "q_lora_rank": hidden // 2}
    if model_type in WITH_NORM:
        fields["qk_norm"] = parameters["qk_norm"]
    torch.manual_seed(parameters["seed"])
    return AutoModel.from_config(AutoConfig.for_model(model_type, **fields)).eval()


def complete(table: pd.DataFrame) -> pd.DataFrame:
    """Names for figures."""

    def name(row):
        if row["family"] == "given":
            return f"{Path(row['checkpoint']).name} (weights given)"
        return f"{row['model_type']}{' + qk_norm' if row['qk_norm'] else ''}"

    return table.assign(name=table.apply(name, axis=1))


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """A line for each model, first and last layer, four measures, with those of a content-free map."""
    names = list(dict.fromkeys(table["name"]))[::-1]
    panels = {
        "effective_rank": "effective rank / n",
        "numerical_rank": "rank at tolerance 0.01 / n",
        "argmax_coverage": "argmax coverage / n",
        "stable_rank": "stable rank",
    }
    figure, axes = new_figure(1, 4, 15.0, 0.3 * len(names) + 2.2, sharey=True)
    first = table[table.layer == 0].groupby("name", sort=False).mean(numeric_only=True)
    deepest = table[table.layer == table.groupby("name").layer.transform("max")]
    last = deepest.groupby("name", sort=False).mean(numeric_only=True)
    earlier = published_table("random_init_maps").set_index("model").rename(columns={"n": "tokens"})
    earlier = earlier[earlier.index.isin(names) & (table.tokens.max() > 100)]
    free = first.rename(columns={f"free_{column}": column for column in panels} | dict.fromkeys(panels, ""))
    marks: list[tuple[pd.DataFrame, str, dict[str, Any]]] = [
        (first, "o", {"label": "first layer", "color": BLUE, "markersize": 6}),
        (free, "|", {"label": "content-free map", "color": "0.4", "markersize": 12, "markeredgewidth": 1.5}),
        (last, "s", {"label": "last layer", "color": BLUE, "markersize": 6, "markerfacecolor": "white"}),
        (earlier, "x", {"label": "earlier measurement, first layer", "color": RED, "markersize": 7}),
    ]
    for axis, (column, xlabel) in zip(axes[0], panels.items(), strict=True):
        for rows, marker, look in marks:
            share = rows[column] / (1 if column == "stable_rank" else rows.tokens)
            if len(rows):
                axis.plot(share, [names.index(name) for name in rows.index], marker, **look)
        axis.set_xlabel(xlabel)
        if column == "stable_rank":
            log_ticks(axis, [1, 2, 5, 10], base=10)
        else:
            axis.set_xlim(-0.02, 1.02)
            axis.axvline(0.632, **DASHED, label="0.63 n: free hard choice")
            axis.axvline(0.5, **GREY, linestyle=":", label="0.50 n: causal hard choice")
    axes[0, 0].set_yticks(range(len(names)), names, fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    one = table[table.family != "given"].iloc[0]
    figure.suptitle(
        f"Attention maps of fresh models: width {int(one.hidden)}, {int(one.heads)} heads, {int(one.layers)} layer(s), "
        f"{int(one.n)} random tokens (float32 maps)"
    )
    return {"families": figure}


def listed(rows: pd.DataFrame, describe: Callable[[Any], str]) -> str:
    return "; ".join(f"{row['name']} {describe(row)}" for _, row in rows.iterrows())


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    first = table[(table.family != "given") & (table.layer == 0)]
    names = ["name", "model_type", "qk_norm", "causal"]
    fresh = first.groupby(names, sort=False).mean(numeric_only=True).reset_index()
    normed = fresh.qk_norm.astype(bool)
    plain = fresh[~normed & ~fresh.model_type.isin(["rank_encoder", "qwen3"])]
    encoders, decoders = plain[~plain.causal.astype(bool)], plain[plain.causal.astype(bool)]
    shares = plain[["numerical_rank", "argmax_coverage"]].div(plain.tokens, axis=0)
    yield unpublished(
        "At ordinary initialisation maps are nearly content-free: stable rank about 1 in encoders and 2 in decoders",
        listed(plain, lambda row: f"{row.stable_rank:.2f}"),
        (encoders.stable_rank < 1.5).all() and decoders.stable_rank.between(1.7, 2.6).all(),
        "Required: below 1.5, and 1.7 to 2.6. First layer. The barrier of 0.63 n is about sharp maps: fresh models have none.",
    )
    yield unpublished(
        "Causal maps have rank without content: those of fresh decoders are close to rows that spread evenly over the past",
        listed(
            decoders,
            lambda row: f"effective rank {row.effective_rank:.0f}, content-free {row.free_effective_rank:.0f}",
        ),
        (decoders.effective_rank / decoders.free_effective_rank).between(1 / CLOSE, CLOSE).all(),
        f"Required: the effective rank of such rows within a factor {CLOSE:g}. Where the effective rank is larger, content adds the rest.",
    )
    yield published(
        "The barrier shows in initialised models: numerical rank (tolerance 0.01) and argmax coverage over n, first layer",
        "initialised models",
        "0.63 n",
        listed(plain, lambda row: f"{row.numerical_rank / row.tokens:.2f}, {row.argmax_coverage / row.tokens:.2f}"),
        shares.stack().between(0.6, 0.66).all(),
        "Required: 0.60 to 0.66 for both, in every family. Their maps are soft, and what is counted depends on the tolerance.",
    )
    earlier = published_table("random_init_maps").set_index("model")
    same = plain[plain.model_type.isin(earlier.index)].set_index("model_type")
    if scale != "smoke" and len(same):
        before = earlier.loc[same.index]
        yield unpublished(
            "The stable rank of fresh BERT, ViT, GPT-2 and Llama (first layer) is that of an earlier measurement",
            "; ".join(
                f"{model} {row.effective_rank:.1f}, {row.stable_rank:.2f} "
                f"({before.effective_rank[model]:g}, {before.stable_rank[model]:g})"
                for model, row in same.iterrows()
            ),
            ((same.stable_rank / before.stable_rank - 1).abs() < 0.1).all(),
            "Required: within 10 %. Effective rank, then stable rank, in brackets those of the earlier measurement; Llama was "
            "narrower then (512), and its ranks move with that.",
        )
    stock = fresh[~normed].groupby("model_type").mean(numeric_only=True)
    ranks = first.pivot_table(index="seed", columns=["model_type", "qk_norm"], values="effective_rank")
    with_norm = fresh[normed | (fresh.model_type == "qwen3")].groupby("model_type", sort=False)
    for model_type, row in with_norm.mean(numeric_only=True).iterrows():
        # Qwen3 is Qwen2 with its queries and keys normed, in rows of root mean square 1
        other = {"qwen3": "qwen2", "rank_encoder": "rank_encoder"}.get(model_type, model_type.removeprefix("rank_"))
        ratios = ranks[model_type, model_type != "qwen3"] / ranks[other, False]
        yield judge("effective rank with the norm over that without", ratios, 1, ratio=True).unpublished(
            f"{other}: QK-norm{' as in qwen3' if other == 'qwen2' else ''} raises the rank of fresh maps",
            "ours",
            f"effective rank {stock.effective_rank[other]:.1f} to {row.effective_rank:.1f}, deviation of the logits "
            f"{stock.logit_std[other]:.2f} to {row.logit_std:.2f} (n {row.tokens:.0f})",
            "What the norm changes in a fresh model is the size of its logits.",
        )
