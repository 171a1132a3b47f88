"""A Gradio app, also for a Hugging Face Space, that shows attention lose rank: `python app.py`.

The families have random weights, so nothing is downloaded. If the environment variable RANKATTN_CHECKPOINT names a
folder with safetensors and a tokenizer, this checkpoint can be chosen too. Only `build_app` needs gradio.
"""

import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from transformers import AutoModel, AutoTokenizer, LlamaConfig, PreTrainedModel

import hf_rankattn as ra


TEXTS, TOKENS, WORDS, HIDDEN, MOST_LAYERS = 4, 32, 256, 64, 24
# wider weights than the usual 0.02, because the logits of so small a model would be nearly equal
SIZES = {"vocab_size": WORDS, "hidden_size": HIDDEN, "num_attention_heads": 4, "initializer_range": 0.09}
INNER = {"intermediate_size": 2 * HIDDEN}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "BERT": (ra.RankBertConfig, INNER),
    "ALBERT": (ra.RankAlbertConfig, {"embedding_size": HIDDEN, **INNER}),
    "XLNet": (ra.RankXLNetConfig, {"d_inner": 2 * HIDDEN}),
    "GPT-2": (ra.RankGPT2Config, {"n_inner": 2 * HIDDEN, "bos_token_id": 0, "eos_token_id": 0}),
    "Llama": (LlamaConfig, INNER),
}
CHECKPOINT, VARIABLE = "the checkpoint", "RANKATTN_CHECKPOINT"
LIMITED = ("Llama", CHECKPOINT)  # the rank is no field of their configs, so `limit_rank` limits it
PARTS = {"skips around attention": "attention_skip", "MLPs": "mlp"}
ABOUT = """# How attention loses rank
Attention replaces each token by a weighted mean of tokens. Remove the skip connections and the MLPs: do the tokens
become equal? Then make the heads narrow (a small query-key rank): how much rank do their attention maps have?"""
NOTE = f"""The families have random weights and read {TEXTS} rows of {TOKENS} random tokens. The causal mask of GPT-2
and Llama and the relative positions of XLNet give attention maps rank even if all tokens are equal."""


class Curves(NamedTuple):
    residual: list[float]  # relative residual at layer 0 (the embeddings) to the last layer
    map_rank: list[float]  # mean effective rank of the attention maps of layer 1 to the last layer
    content_free: float  # effective rank of a causal map that ignores content; 1 for models that are not causal


@lru_cache(maxsize=1)
def checkpoint(folder: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    model, tokenizer = AutoModel.from_pretrained(folder, use_safetensors=True), AutoTokenizer.from_pretrained(folder)
    texts = ra.package_text()[:TEXTS]  # each has more than 32 tokens, so nothing is padded
    return model.double(), dict(tokenizer(texts, truncation=True, max_length=TOKENS, return_tensors="pt"))


def random_model(family: str, depth: int, **rank: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    kind, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModel.from_config(kind(num_hidden_layers=depth, **SIZES, **fields, **rank)).double()
    return model, {"input_ids": torch.randint(WORDS, (TEXTS, TOKENS))}


def curves(model: PreTrainedModel, batch: dict[str, Any], depth: int, removed: list[str]) -> Curves:
    with ra.ablate(model, **{PARTS[part]: True for part in removed}):
        states = ra.measure_collapse(model, batch, variants=["transformer"])
        maps = ra.measure_attention(model, batch, metrics="full").groupby(["metric", "layer"]).value.mean()
    residual = states[states.metric == "relative_residual"].groupby("layer").value.mean().tolist()
    rank, over = maps["effective_rank"].tolist(), maps.get("effective_rank_over_content_free")
    if depth > len(rank):
        raise ValueError(f"the model has {len(rank)} layers, got a depth of {depth}: choose at most {len(rank)}.")
    return Curves(residual[: depth + 1], rank[:depth], 1.0 if over is None else float(rank[0] / over.iloc[0]))


def measure(family: str, depth: int, qk_rank: int | None, removed: list[str]) -> tuple[Curves, Curves]:
    """The curves of what a person chose, and those of the whole model at its stock rank."""
    if depth not in range(1, MOST_LAYERS + 1):
        raise ValueError(f"the depth must be a whole number of layers from 1 to {MOST_LAYERS}, got {depth}.")
    if family not in LIMITED and qk_rank is not None and qk_rank > HIDDEN:
        raise ValueError(f"`qk_rank` must be at most {HIDDEN}, the width of this model, got {qk_rank}.")
    model, batch = random_model(family, depth) if family != CHECKPOINT else checkpoint(os.environ[VARIABLE])
    whole = curves(model, batch, depth, [])
    if qk_rank is None:
        return curves(model, batch, depth, removed), whole
    if family not in LIMITED:
        return curves(*random_model(family, depth, qk_rank=qk_rank), depth, removed), whole
    with ra.limit_rank(model, qk_rank, calibration=batch, objective="logits"):  # a closed form: fast
        return curves(model, batch, depth, removed), whole


def sentence(family: str, qk_rank: int | None, removed: list[str], seen: Curves) -> str:
    """What the figures show, in words."""
    first, last, rate = seen.residual[0], seen.residual[-1], ra.collapse_rate(seen.residual)
    faster = "become equal, faster with each layer"
    steady = f"become more alike, by a factor of about {1 / rate.factor:.2g} in each layer"
    other = "stay apart" if last > first / 2 else "become more alike"
    how = {"doubly_exponential": faster, "geometric": steady}.get(rate.kind, other)
    without = f" without its {' and '.join(removed)}" if removed else ""
    end = f"; a causal map that ignores content has {seen.content_free:.1f}" if seen.content_free > 1 else ""
    return (
        f"**In {family}{without}, with heads of {f'rank {qk_rank}' if qk_rank else 'the stock rank'}, the tokens {how}:** "
        f"the relative residual goes from {first:.1g} to {f'{last:.1g}' if last > 1e-15 else '0 up to rounding'} at "
        f"layer {len(seen.map_rank)}, and the rank of the attention maps goes from {seen.map_rank[0]:.1f} to "
        f"{seen.map_rank[-1]:.1f} (at most {TOKENS}{end})."
    )


def figure(name: str, chosen: Curves, whole: Curves) -> Figure:
    axes = Figure(figsize=(4.5, 3.6), dpi=150, layout="constrained").subplots()
    for curve, label, style in ((whole, "whole model, stock rank", "--"), (chosen, "your choice", "-")):
        values = getattr(curve, name)
        axes.plot(range(len(curve.residual))[-len(values) :], values, style, marker="o", label=label)
    if name == "residual":
        axes.set(yscale="log", title="Relative residual: 0 if all tokens are equal", xlabel="layer (0: embeddings)")
        axes.set_ylim(min(1e-2, *chosen.residual) / 3, 3)
    else:
        axes.set(title=f"Effective rank of attention maps, at most {TOKENS}", xlabel="layer")
        axes.set_ylim(0, 1.2 * max(*chosen.map_rank, *whole.map_rank))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.figure.legend(loc="outside lower center", ncols=2)
    return axes.figure


def build_app():
    import gradio as gr

    def show(family, depth, rank, removed):
        try:
            chosen, whole = measure(family, depth, rank, removed)
        except (ValueError, OSError) as error:  # transformers raises an OSError for a folder that it cannot read
            raise gr.Error(str(error), print_exception=False) from error
        seen = sentence(family, rank, removed, chosen)
        return seen, figure("residual", chosen, whole), figure("map_rank", chosen, whole)

    with gr.Blocks(title="How attention loses rank") as app:
        gr.Markdown(ABOUT)
        with gr.Row():
            with gr.Column():
                family = gr.Radio([*FAMILIES, *[CHECKPOINT] * (VARIABLE in os.environ)], value="BERT", label="Family")
                depth = gr.Slider(1, MOST_LAYERS, 6, step=1, label="Depth (layers)")
                rank = gr.Number(16, precision=0, label="Query-key rank of each head (stock: 16)")
                removed = gr.CheckboxGroup([*PARTS], value=[*PARTS], label="Remove")
                button = gr.Button("Measure", variant="primary")
            with gr.Column(scale=3):
                seen = gr.Markdown()
                with gr.Row():
                    plots = [gr.Plot(show_label=False), gr.Plot(show_label=False)]
        gr.Markdown(NOTE)
        gr.on([button.click, rank.submit, app.load], show, [family, depth, rank, removed], [seen, *plots])
    return app


if __name__ == "__main__":
    build_app().launch()
