"""The rate of one attention layer: the power of the residual before it that the residual behind it follows."""

import math
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# title -> model type, fields of its config, and what is done to the layer
LAYERS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "BERT": ("bert", {}, None),
    "BERT, norm kept": ("bert", {}, "behind the norm"),
    "BERT, causal mask": ("bert", {"is_decoder": True}, None),
    "RoBERTa": ("roberta", {}, None),
    "ELECTRA": ("electra", {}, None),
    "ALBERT": ("albert", {}, None),
    "DistilBERT": ("distilbert", {}, None),
    "RankEncoder": ("rank_encoder", {}, None),
    "ViT": ("vit", {}, None),
    "XLNet": ("xlnet", {}, None),
    "XLNet, relative positions zeroed": ("xlnet", {}, "no relative positions"),
    "XLNet, causal mask": ("xlnet", {"attn_type": "uni"}, None),
    "GPT-2 (causal)": ("gpt2", {}, None),
    "Llama (causal, rotary)": ("llama", {}, None),
    "Llama without its causal mask": ("llama", {}, "no mask"),
    "DeepSeek-V3 (causal, rotary)": ("deepseek_v3", {}, None),
}
# content alone decides about the logits of these, and every token reads every other
CUBIC = {"BERT", "BERT, norm kept", "RoBERTa", "ELECTRA", "ALBERT", "DistilBERT", "RankEncoder", "ViT",
         "XLNet, relative positions zeroed"}  # fmt: skip
LARGE, SMALL = 0.03, 0.003


def attention_exponent(title: str, shape: str, tokens: int, seed: int) -> float:
    """The slope of log residual of what the first layer's attention returns, against log residual of what enters it.

    3 is the cubic contraction of the theorem; 1 a constant factor. States are one row for all tokens, plus a small part
    that differs, in float64 (Llama's norms are float32 whatever the model is, which is why the small part is not smaller).
    """
    import torch

    from ..probe.architectures import layers_of
    from .subjects import fresh_model, inputs_of

    family, fields, change = LAYERS[title]
    model = fresh_model(family, shape, seed, "float64", **fields)
    batch = inputs_of(model.config, "ids", 1, tokens, seed)[0]
    if change == "no mask":
        batch["attention_mask"] = torch.zeros(1, 1, tokens, tokens, dtype=torch.float64)
    if change == "no relative positions":
        layers_of(model)[0].rel_attn.r.data.zero_()  # type: ignore[union-attr,operator]
    large, small = (residual_behind(model, batch, size, seed, change == "behind the norm") for size in (LARGE, SMALL))
    return math.log(large / small) / math.log(LARGE / SMALL)


def residual_behind(
    model: "PreTrainedModel", batch: "dict[str, torch.Tensor]", size: float, seed: int, normed: bool
) -> float:
    import torch

    from ..measure import composite_norm, residual
    from ..probe import ablate
    from ..probe.ablate import first
    from ..probe.architectures import family_of, layers_of, submodule

    family, layer = family_of(model), layers_of(model)[0]
    place = family.attention if family.sublayers is None else family.sublayers.attended
    module = submodule(layer, family.sublayers.attention_norm if normed and family.sublayers else place)
    assert module is not None
    seen: list[torch.Tensor] = []

    def enter(_, args, kwargs):
        given = args[0] if args else kwargs["hidden_states"]
        draw = torch.Generator().manual_seed(seed)
        shared = torch.randn(given.shape[-1], generator=draw, dtype=torch.float64)
        states = shared + size * torch.randn(given.shape, generator=draw, dtype=torch.float64)
        if args:
            return (states, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": states}

    def leave(_, args, output):
        seen.append(first(output))

    handles = [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]
    try:
        with torch.no_grad(), ablate(model, attention_skip=normed):
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    # XLNet's dropout sees the maps before it sees what attention returns; with shared or many layers the first pass counts
    states = seen[1] if family.maps == "dropout" and not normed else seen[0]
    states = states if family.batch_first else states.transpose(0, 1)
    return composite_norm(residual(states))[0].item()
