"""Small models with logits that matter, for the tests of rank conversion."""

import torch
from testing_common import attention_modules, float_tensors, tiny_inputs


def trained_like(family, suffix="Model", **fields):
    """A tiny stock model in float64 with weights and biases large enough for logits that matter."""
    model = family.stock(suffix)(family.stock_config(**fields)).double().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def plain_inputs(family, suffix="Model"):
    """The padded batch without token types, which XLNet would add to its logits."""
    return {name: value for name, value in tiny_inputs(family, suffix).items() if name != "token_type_ids"}


def difference(model, other, batch) -> float:
    ours, theirs = (float_tensors(m(**batch)) for m in (model, other))
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def entries(model):
    """The tensors of the first attention module, in float64."""
    attention = attention_modules(model)[0] if hasattr(model.config, "head_geometry") else first_attention(model)
    return attention, {name: weight.detach().double() for name, weight in attention.named_parameters()}


def first_attention(model):
    names = ("attention.self", "attention", "rel_attn")
    return next(
        module for name, module in model.named_modules() if name.endswith(names) and hasattr(module, "query" if "rel" not in name else "q")
    )  # fmt: skip
