"""What experiments measure that train nothing: fresh models of every family, a checkpoint, and what both read."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    Batch = dict[str, torch.Tensor]

SHAPES: dict[str, dict[str, int]] = {
    "smoke": {"hidden": 32, "layers": 3, "heads": 4, "inner": 64, "vocabulary": 500},
    "tiny": {"hidden": 128, "layers": 6, "heads": 4, "inner": 512, "vocabulary": 1000},
    "base": {"hidden": 768, "layers": 12, "heads": 12, "inner": 3072, "vocabulary": 30000},
}


def usual(hidden: int, layers: int, heads: int, inner: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "vocab_size": vocabulary,
    }  # fmt: skip


def deepseek(size: Mapping[str, int]) -> dict[str, Any]:
    width = size["hidden"] // size["heads"]
    return {
        **usual(**size), "num_key_value_heads": size["heads"], "q_lora_rank": size["hidden"] // 2,
        "kv_lora_rank": size["hidden"] // 4, "qk_nope_head_dim": width, "qk_rope_head_dim": max(4, width // 2),
        "v_head_dim": width, "first_k_dense_replace": size["layers"], "n_routed_experts": 2, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 1,
    }  # fmt: skip


# model type -> arguments of its config; one for each row of the table of architectures
FAMILIES: dict[str, Callable[[Mapping[str, int]], dict[str, Any]]] = {
    "bert": lambda size: usual(**size),
    "roberta": lambda size: usual(**size),
    "electra": lambda size: {**usual(**size), "embedding_size": size["hidden"]},
    "albert": lambda size: {**usual(**size), "embedding_size": min(128, size["hidden"])},
    "xlnet": lambda size: {
        "d_model": size["hidden"], "n_layer": size["layers"], "n_head": size["heads"], "d_inner": size["inner"],
        "vocab_size": size["vocabulary"],
    },
    "rank_encoder": lambda size: {**usual(**size), "norm": "layer", "position": "additive", "input_norm": True},
    "distilbert": lambda size: {
        "dim": size["hidden"], "n_layers": size["layers"], "n_heads": size["heads"], "hidden_dim": size["inner"],
        "vocab_size": size["vocabulary"],
    },
    "vit": lambda size: {
        **{name: value for name, value in usual(**size).items() if name != "vocab_size"}, "image_size": 128,
        "patch_size": 16,
    },
    "gpt2": lambda size: {
        "n_embd": size["hidden"], "n_layer": size["layers"], "n_head": size["heads"], "vocab_size": size["vocabulary"],
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": lambda size: usual(**size),
    "deepseek_v3": deepseek,
}  # fmt: skip


def fresh_model(
    family: str, shape: str, seed: int, dtype: str = "float32", layers: int | None = None, **fields: Any
) -> "PreTrainedModel":
    """A model with fresh weights, the same for the same seed, ready to be measured; `layers` deepens its shape."""
    import torch
    from transformers import AutoConfig, AutoModel

    from .. import models  # noqa: F401  so that the Auto classes know ours

    torch.manual_seed(seed)
    size = SHAPES[shape] | ({"layers": layers} if layers else {})
    config = AutoConfig.for_model(family, **(FAMILIES[family](size) | fields))
    model = AutoModel.from_config(config, dtype=torch.float32)
    return (model.double() if dtype == "float64" else model).eval()


def inputs_of(config: Any, kind: str, examples: int, length: int, seed: int) -> "list[Batch]":
    """One batch of random inputs, or of the package's own text, for a model that has no tokenizer.

    Text is cut into words, which are numbered by their alphabetical order: to fresh embeddings one numbering is as good as
    another, and what differs from random ids is that words come again, and how often.
    """
    from ..survey import random_batches

    if kind == "ids":
        return random_batches(config, examples, length, examples, seed)
    import torch

    from ..tasks.memorization import words_of
    from ..texts import package_text

    words = words_of(" ".join(package_text()))
    # 0 pads in most families
    numbers = {word: 1 + place % (config.vocab_size - 1) for place, word in enumerate(sorted(set(words)))}
    if examples * length > len(words):
        raise ValueError(f"the package's text has {len(words)} words, and {examples} x {length} were asked for.")
    ids = torch.tensor([numbers[word] for word in words[: examples * length]])
    return [{"input_ids": ids.view(examples, length)}]


def checkpoint_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """What decides about a measurement of a checkpoint, from the options of the command line: none if none is given."""
    text, dataset, name = (options.get(key) for key in ("text", "dataset", "checkpoint"))
    if not name:
        if text or dataset:
            raise ValueError(
                f"{'--text' if text else '--dataset'} says what a checkpoint reads: give --checkpoint as well."
            )
        return {}
    if text and dataset:
        raise ValueError(f"give --text or --dataset, not both; got {text} and {dataset}.")
    found = {"checkpoint": str(name), "text": None, "text_digest": None, "dataset": dataset}
    if text:
        try:
            digest = hashlib.sha256(Path(text).read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise ValueError(f"--text {text} cannot be read: {error.strerror or error}.") from error
        # another text under the same name is another cell
        found |= {"text": str(Path(text).resolve()), "text_digest": digest}
    return found


def checkpoint_inputs(
    parameters: Mapping[str, Any], examples: int, length: int, seed: int
) -> "tuple[PreTrainedModel, list[Batch], dict[str, Any]]":
    """A checkpoint, batches of what it reads, and the facts of both, all as `rankattn measure` has them."""
    from ..probe.batches import longest
    from ..survey import facts_of, load_checkpoint, load_tokenizer, random_batches, read_texts, text_batches

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
