"""Attention maps of every family that can be measured, with fresh weights: how much rank before any training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell
from ..sweep.judging import Claim, judge
from ..sweep.tolerances import CLOSE


NAME = "families"
SHOWS = "rank of attention maps at random init, every family, with and without QK-norm, against content-free maps"
REVISION = 1
OPTIONS = ("checkpoint", "text", "dataset")

METRICS = ("numerical_rank", "effective_rank", "stable_rank", "participation_ratio", "argmax_coverage", "row_entropy")
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"layers": 1, "hidden": 64, "heads": 4, "n": 32, "examples": 1, "seeds": 1},
    "laptop": {"layers": 4, "hidden": 768, "heads": 12, "n": 128, "examples": 2, "seeds": 3},
    "paper": {"layers": 12, "hidden": 768, "heads": 12, "n": 512, "examples": 8, "seeds": 3},
}
# what a family calls its sizes, and what it needs besides
SIZES: dict[str, dict[str, str]] = {
    "xlnet": {"hidden": "d_model", "heads": "n_head", "layers": "n_layer", "inner": "d_inner"},
    "distilbert": {"hidden": "dim", "heads": "n_heads", "layers": "n_layers", "inner": "hidden_dim"},
    "gpt2": {"hidden": "n_embd", "heads": "n_head", "layers": "n_layer", "inner": "n_inner"},
}
COMMON = {
    "hidden": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers", "inner": "intermediate_size",
}  # fmt: skip
VOCABULARY = 8192
WITH_NORM = ("rank_bert", "rank_albert", "rank_xlnet", "rank_encoder")


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    from ...families.architectures import TABLE

    setting = SETTINGS[scale]
    found: list[dict[str, Any]] = []
    for family in TABLE:
        for model_type in family.model_types:
            # the rank twins are the stock models to the last bit where they have no norm
            norms = (
                [True] if model_type in WITH_NORM[:3] else [False, True] if model_type == "rank_encoder" else [False]
            )
            found += [
                {"family": family.name, "model_type": model_type, "qk_norm": qk_norm, "checkpoint": None}
                for qk_norm in norms
            ]
    shape = {name: setting[name] for name in ("layers", "hidden", "heads", "n", "examples")}
    many = range(seeds or setting["seeds"])
    made = [Cell({**model, **shape, "seed": seed}) for model in found for seed in many]
    if options.get("checkpoint"):
        given = {
            name: None if options.get(name) is None else str(options[name])
            for name in ("checkpoint", "text", "dataset")
        }
        shape = {name: setting[name] for name in ("n", "examples")}
        made.append(
            Cell({"family": "given", "model_type": None, "qk_norm": None, **given, **shape, "seed": 0}, cost=10)
        )
    return made


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """A row for each layer: the metrics, mean over heads and examples, and those of a map that looks at no content."""
    from ...probe import measure_attention, measure_logits
    from ...probe.survey import random_batches, token_counts

    if parameters["checkpoint"]:
        model, batches = checkpoint_inputs(parameters)
    else:
        model = fresh_model(parameters)
        batches = random_batches(
            model.config, parameters["examples"], parameters["n"], parameters["examples"], parameters["seed"]
        )
    maps = measure_attention(model, batches, "full").groupby(["layer", "metric"]).value.mean().unstack()
    spread = measure_logits(model, batches)
    spread = spread[spread.metric == "logit_std"].groupby("layer").value.mean()
    counts = [count for batch in batches for count in token_counts(model, batch)]
    tokens = sum(counts) / len(counts)
    causal = bool(family_causal(model))
    free = content_free_metrics(round(tokens), causal)
    return [
        {
            "layer": int(layer), "tokens": tokens, "causal": causal, "model": model.config.model_type,
            "logit_std": float(spread[layer]), **{name: float(row[name]) for name in METRICS},
            **{f"free_{name}": value for name, value in free.items()},
        }
        for layer, row in maps.iterrows()
    ]  # fmt: skip


def family_causal(model) -> bool:
    from ...families.architectures import family_of

    return family_of(model).causal(model.config)


def content_free_metrics(n: int, causal: bool) -> dict[str, float]:
    """The map that spreads each row evenly, over all tokens or over the past."""
    import torch

    from ...measure import spectral_metrics

    maps = torch.ones(n, n, dtype=torch.float64)
    maps = maps.tril() if causal else maps
    found = spectral_metrics(maps / maps.sum(-1, keepdim=True))
    return {name: found[name].item() for name in METRICS}


def fresh_model(parameters: Mapping[str, Any]):
    """The base model of a family with weights as it draws them: heads of 64 at laptop scale, as base models have."""
    import torch
    from transformers import AutoConfig, AutoModel

    model_type, hidden, heads = (parameters[name] for name in ("model_type", "hidden", "heads"))
    names = COMMON | SIZES.get(model_type.removeprefix("rank_"), {})
    fields: dict[str, Any] = {
        names["hidden"]: hidden, names["heads"]: heads, names["layers"]: parameters["layers"], names["inner"]: 2 * hidden,
    }  # fmt: skip
    if model_type == "vit":
        small = parameters["n"] < 64
        fields |= {"image_size": 48, "patch_size": 8} if small else {}
    else:
        fields["vocab_size"] = VOCABULARY
    if model_type in ("albert", "rank_albert"):
        fields["embedding_size"] = max(16, hidden // 6)
    if model_type == "electra":
        fields["embedding_size"] = hidden
    if model_type in ("llama", "qwen2", "qwen3", "mistral"):
        fields |= {"num_key_value_heads": heads, "head_dim": hidden // heads}
    if model_type == "deepseek_v3":
        width = hidden // heads
        fields |= {
            "num_key_value_heads": heads, "qk_nope_head_dim": width // 2, "qk_rope_head_dim": width // 2,
            "v_head_dim": width, "kv_lora_rank": hidden // 4, "q_lora_rank": hidden // 2,
            "first_k_dense_replace": parameters["layers"],
        }  # fmt: skip
    if model_type in WITH_NORM:
        fields["qk_norm"] = parameters["qk_norm"]
    torch.manual_seed(parameters["seed"])
    return AutoModel.from_config(AutoConfig.for_model(model_type, **fields)).eval()


def checkpoint_inputs(parameters: Mapping[str, Any]):
    from ...probe.survey import load_checkpoint, load_tokenizer, random_batches, read_texts, text_batches

    name, examples, n = (parameters[key] for key in ("checkpoint", "examples", "n"))
    model = load_checkpoint(name)
    if getattr(model.config, "vocab_size", None) is None:
        return model, random_batches(model.config, examples, n, examples, parameters["seed"])
    text = None if parameters["text"] is None else Path(parameters["text"])
    texts, _ = read_texts(text, None if text else parameters["dataset"], examples=examples)
    return model, text_batches(load_tokenizer(name), texts, model.config, n, examples)


def complete(table):
    """Names for figures."""

    def name(row):
        if row["family"] == "given":
            return f"{Path(row['checkpoint']).name} (weights given)"
        return f"{row['model_type']}{' + qk_norm' if row['qk_norm'] else ''}"

    return table.assign(name=table.apply(name, axis=1))


def figures(table, scale: str):
    from ._figures_models import families_figure

    return {"families": families_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    from ...report.plots import published_table

    first = table[(table.family != "given") & (table.layer == 0)]
    fresh = (
        first.groupby(["name", "model_type", "qk_norm", "causal"], sort=False).mean(numeric_only=True).reset_index()
    )
    plain = fresh[~fresh.qk_norm.astype(bool) & ~fresh.model_type.isin(["rank_encoder", "qwen3"])]
    encoders, decoders = plain[~plain.causal.astype(bool)], plain[plain.causal.astype(bool)]
    both = "; ".join(f"{row['name']} {row.stable_rank:.2f}" for _, row in plain.iterrows())
    found = [
        Claim(
            "At ordinary initialisation maps are nearly content-free: stable rank about 1 in encoders and 2 in decoders",
            "ours",
            "",
            both,
            bool((encoders.stable_rank < 1.5).all() and (decoders.stable_rank.between(1.7, 2.6)).all()),
            "Required: below 1.5, and 1.7 to 2.6. First layer. The barrier of 0.63 n is about sharp maps: fresh models have none.",
        ),
        Claim(
            "Causal maps have rank without content: those of fresh decoders are close to rows that spread evenly over the past",
            "ours",
            "",
            "; ".join(
                f"{row['name']} effective rank {row.effective_rank:.0f}, content-free {row.free_effective_rank:.0f}"
                for _, row in decoders.iterrows()
            ),
            bool((decoders.effective_rank / decoders.free_effective_rank).between(1 / CLOSE, CLOSE).all()),
            f"Required: the effective rank of such rows within a factor {CLOSE:g}. Content changes it by more where that fails.",
        ),
        Claim(
            "The barrier shows in initialised models: numerical rank (tolerance 0.01) and argmax coverage over n, first layer",
            "A Rank Perspective, initialised models",
            "0.63 n",
            "; ".join(
                f"{row['name']} {row.numerical_rank / row.tokens:.2f}, {row.argmax_coverage / row.tokens:.2f}"
                for _, row in plain.iterrows()
            ),
            bool(
                (plain[["numerical_rank", "argmax_coverage"]].div(plain.tokens, axis=0))
                .stack()
                .between(0.6, 0.66)
                .all()
            ),
            "Required: 0.60 to 0.66 for both, in every family. Their maps are soft, and what is counted depends on the tolerance.",
        ),
    ]
    earlier = published_table("random_init_maps").set_index("model")
    same = plain[plain.model_type.isin(earlier.index)].set_index("model_type")
    if scale != "smoke" and len(same):
        text, good = [], True
        for model, row in same.iterrows():
            before = earlier.loc[model]
            text.append(
                f"{model} {row.effective_rank:.1f}, {row.stable_rank:.2f} ({before.effective_rank:g}, {before.stable_rank:g})"
            )
            good &= abs(row.stable_rank / before.stable_rank - 1) < 0.1
        found.append(
            Claim(
                "The stable rank of fresh BERT, ViT, GPT-2 and Llama (first layer) is that of an earlier measurement",
                "ours",
                "",
                "; ".join(text),
                bool(good),
                "Required: within 10 %. Effective rank, then stable rank, in brackets those of the earlier measurement; Llama was narrower "
                "then (512), and its ranks move with that.",
            )
        )
    stock = fresh[~fresh.qk_norm.astype(bool)].groupby("model_type").mean(numeric_only=True)
    normed = fresh[fresh.qk_norm.astype(bool) | (fresh.model_type == "qwen3")]
    for model_type, row in normed.groupby("model_type", sort=False).mean(numeric_only=True).iterrows():
        # Qwen3 is Qwen2 with its queries and keys normed, in rows of root mean square 1
        other = {"qwen3": "qwen2", "rank_encoder": "rank_encoder"}.get(model_type, model_type.removeprefix("rank_"))
        ranks = first.pivot_table(index="seed", columns=["model_type", "qk_norm"], values="effective_rank")
        with_norm = ranks[model_type, model_type != "qwen3"]
        found.append(
            judge(
                "effective rank with the norm over that without", with_norm / ranks[other, False], 1, ratio=True
            ).claim(
                f"{other}: QK-norm{' as in qwen3' if other == 'qwen2' else ''} raises the rank of fresh maps",
                "ours",
                "",
                f"effective rank {stock.effective_rank[other]:.1f} to {row.effective_rank:.1f}, deviation of the logits "
                f"{stock.logit_std[other]:.2f} to {row.logit_std:.2f} (n {row.tokens:.0f})",
                "What the norm changes in a fresh model is the size of its logits.",
            )
        )
    return found
