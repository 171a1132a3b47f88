"""Models, their inputs and parts of figures that the experiments on rank collapse share."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ... import models as models  # registers the rank models with the Auto classes
from ...files.batches import longest
from ...files.texts import package_text, utf8_text
from ...probe.survey import facts_of, load_checkpoint, load_tokenizer, random_batches, read_texts, text_batches
from ...tasks.memorization import words_of


Batch = dict[str, torch.Tensor]
AXIS = "relative residual (1: nothing shared, 0: all tokens equal)"
FLOOR = 2.4e-7  # of relative residuals in float32
SHAPES: dict[str, dict[str, int]] = {
    "smoke": {"hidden": 32, "layers": 3, "heads": 4, "inner": 64, "vocabulary": 500},
    "tiny": {"hidden": 128, "layers": 6, "heads": 4, "inner": 512, "vocabulary": 1000},
    "base": {"hidden": 768, "layers": 12, "heads": 12, "inner": 3072, "vocabulary": 30000},
}
# the config fields that hold the hidden size, layers, heads, inner size and vocabulary of a shape, if there is one
BERT_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
OTHER_FIELDS: dict[str, tuple[str, ...]] = {
    "xlnet": ("d_model", "n_layer", "n_head", "d_inner", "vocab_size"),
    "distilbert": ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size"),
    "gpt2": ("n_embd", "n_layer", "n_head", "", "vocab_size"),
    "vit": (*BERT_FIELDS[:4], ""),
}
# model type -> its further config fields; one for each row of the table of architectures
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "electra": {},
    "albert": {},
    "xlnet": {},
    "rank_encoder": {"norm": "layer", "position": "additive", "input_norm": True},
    "distilbert": {},
    "vit": {"image_size": 128, "patch_size": 16},
    "gpt2": {"bos_token_id": 0, "eos_token_id": 0},
    "llama": {},
    "deepseek_v3": {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
}


def config_fields(family: str, size: Mapping[str, int]) -> dict[str, Any]:
    """The config fields of a family at a size."""
    hidden, width = size["hidden"], size["hidden"] // size["heads"]
    names = OTHER_FIELDS.get(family, BERT_FIELDS)
    fields = {name: value for name, value in zip(names, size.values(), strict=True) if name} | FAMILIES[family]
    if family in ("electra", "albert"):
        fields["embedding_size"] = hidden if family == "electra" else min(128, hidden)
    if family == "deepseek_v3":
        fields |= {"num_key_value_heads": size["heads"], "first_k_dense_replace": size["layers"]}
        fields |= {"q_lora_rank": hidden // 2, "kv_lora_rank": hidden // 4, "v_head_dim": width}
        fields |= {"qk_nope_head_dim": width, "qk_rope_head_dim": max(4, width // 2)}
    return fields


def fresh_model(
    family: str, shape: str, seed: int, dtype: str = "float32", layers: int | None = None, **fields: Any
) -> PreTrainedModel:
    """A model in evaluation mode whose random weights depend on the seed alone; `layers` replaces those of the shape."""
    torch.manual_seed(seed)
    size = SHAPES[shape] | ({"layers": layers} if layers else {})
    config = AutoConfig.for_model(family, **(config_fields(family, size) | fields))
    model = AutoModel.from_config(config, dtype=torch.float32)
    return (model.double() if dtype == "float64" else model).eval()


def inputs_of(config: Any, kind: str, examples: int, length: int, seed: int) -> list[Batch]:
    """One batch of random inputs (`kind` "ids"), or of the package's text, for a model without a tokenizer.

    Words of the text are numbered in alphabetical order: fresh embeddings do not depend on the numbering. Unlike random
    ids, words are repeated, some of them often.
    """
    if kind == "ids":
        return random_batches(config, examples, length, examples, seed)
    words = words_of(" ".join(package_text()))
    # 0 pads in most families
    numbers = {word: 1 + place % (config.vocab_size - 1) for place, word in enumerate(sorted(set(words)))}
    if examples * length > len(words):
        raise ValueError(f"the package's text has {len(words)} words, and {examples} x {length} were asked for.")
    ids = torch.tensor([numbers[word] for word in words[: examples * length]])
    return [{"input_ids": ids.view(examples, length)}]


def checkpoint_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """The cell parameters of a checkpoint, from the options of the command line; empty if no checkpoint is given."""
    text, dataset, name = (options.get(key) for key in ("text", "dataset", "checkpoint"))
    if not name:
        if text or dataset:
            option = "--text" if text else "--dataset"
            raise ValueError(f"{option} says what a checkpoint reads: give --checkpoint as well.")
        return {}
    if text and dataset:
        raise ValueError(f"give --text or --dataset, not both; got {text} and {dataset}.")
    found = {"checkpoint": str(name), "text": None, "text_digest": None, "dataset": dataset}
    if text:
        digest = hashlib.sha256(utf8_text(text).encode()).hexdigest()[:16]
        # another text under the same name is another cell
        found |= {"text": str(Path(text).resolve()), "text_digest": digest}
    return found


def checkpoint_inputs(
    parameters: Mapping[str, Any], examples: int, length: int, seed: int
) -> tuple[PreTrainedModel, list[Batch], dict[str, Any]]:
    """A checkpoint, batches of its inputs, and the facts of both, as in `rankattn measure`."""
    name, text = parameters["checkpoint"], parameters["text"]
    model = load_checkpoint(name)
    length = min(length, longest(model.config) or length)
    if getattr(model.config, "vocab_size", None) is None:
        if text or parameters["dataset"]:
            raise ValueError(f"{name} reads {model.main_input_name}, not text: leave --text and --dataset out.")
        batches, source = random_batches(model.config, examples, length, examples, seed), "random inputs"
    else:
        texts, source = read_texts(Path(text) if text else None, parameters["dataset"], examples=examples)
        batches = text_batches(load_tokenizer(name), texts, model.config, length, batch_size=examples)
    return model, batches, facts_of(model, name, False, source=source)


def layer_axis(axis: Axes, log: bool = True) -> None:
    """Layers on the horizontal axis; with `log`, a logarithmic axis whose grey band is the floor of float32."""
    axis.set_xlabel("layer (0: embeddings)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        axis.set(yscale="log", ylim=(FLOOR / 4, 2.0))
        axis.axhspan(FLOOR / 4, 4 * FLOOR, color="0.93", zorder=0)


def number(value: float) -> str:
    return f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def titled(figure: Figure, title: str, axes: Sequence[Axes], published: str | None = None, columns: int = 3) -> Figure:
    """The figure with a title and one legend below all panels: the labels of `axes` and one for the published curves."""
    figure.suptitle(title)
    entries = [entry for axis in axes for entry in zip(*axis.get_legend_handles_labels(), strict=True)]
    if published:
        line = Line2D([], [], color="0.4", marker="o", markerfacecolor="white", linewidth=0.8, markersize=4)
        entries.append((line, published))
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure
