"""The table of architectures, one row each, and the lookups that all other folders use."""

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .projections import (
    FusedProjections,
    LatentProjections,
    LinearProjections,
    RelativeProjections,
    show_projected,
    show_relative,
    submodule,
)
from .row import Family, MLPPaths, position_limit
from .structure import self_attention, tower_of


def bert_like(name: str, *model_types: str, **row: Any) -> Family:
    return Family(
        name=name,
        model_types=model_types,
        layers="encoder.layer",
        attention="attention.self",
        attended="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        updated="output.dense",
        mlp_norm="output.LayerNorm",
        cross_attention="crossattention",
        projections=LinearProjections(
            "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"
        ),
        mlp=MLPPaths("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn"),
        **row,
    )


def pre_norm(name: str, *model_types: str, attention: str, **row: Any) -> Family:
    return Family(
        name=name, model_types=model_types, attention=attention, attended=attention, updated="mlp", norm="pre", **row
    )


def albert_groups(config) -> list[int]:
    per_group = config.num_hidden_layers / config.num_hidden_groups
    return [int(layer / per_group) for layer in range(config.num_hidden_layers)]


LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
TABLE = (
    bert_like("BERT", "bert", "rank_bert"),
    bert_like(
        "RoBERTa",
        *("roberta", "xlm-roberta", "camembert", "rank_roberta", "rank_xlm_roberta", "rank_camembert"),
        # positions are counted from the one after the padding index
        longest=lambda config: config.max_position_embeddings - config.pad_token_id - 1,
    ),
    bert_like("ELECTRA", "electra", "rank_electra"),
    Family(
        name="ALBERT",
        model_types=("albert", "rank_albert"),
        layers="encoder.albert_layer_groups.*.albert_layers",
        groups=albert_groups,
        attention="attention",
        attended="attention.output_dropout",
        updated="ffn_output",
        attention_norm="attention.LayerNorm",
        mlp_norm="full_layer_layer_norm",
        projections=LinearProjections("attention.query", "attention.key", "attention.value", "attention.dense"),
        mlp=MLPPaths("ffn", "ffn_output", "activation"),
        identity_trick=True,
        pool=lambda base, states: base.pooler_activation(base.pooler(states[:, 0])),
    ),
    Family(
        name="XLNet",
        model_types=("xlnet", "rank_xlnet"),
        layers="layer",
        attention="rel_attn",
        attended="rel_attn.dropout",
        updated="ff.dropout",
        attention_norm="rel_attn.layer_norm",
        mlp_norm="ff.layer_norm",
        projections=RelativeProjections("rel_attn"),
        mlp=MLPPaths("ff.layer_1", "ff.layer_2", "ff.activation_function"),
        batch_first=False,
        streams=2,
        maps="dropout",
        causal=lambda config: config.attn_type == "uni",
        num_heads="n_head",
        scale="scale",
        default_scale=lambda width: 1 / width**0.5,  # as XLNet computes it, to the last bit
        positions="relative positions",
        show_query_key=show_relative,
    ),
    Family(
        name="RankEncoder",
        model_types=("rank_encoder",),
        layers="layers",
        attention="attention",
        attended="attention",
        attention_norm="attention_norm",
        updated="mlp",
        mlp_norm="mlp_norm",
        norm="layer",
        final_norm="norm",
        projections=LinearProjections(
            "attention.query", "attention.key", "attention.value", "attention.output", "attention.output_scale"
        ),
        mlp=MLPPaths("mlp.up", "mlp.down", "mlp.activation"),
        longest=lambda config: None if config.position == "none" else position_limit(config),
        show_query_key=show_projected,
        fused=True,
        maps="output",
    ),
    Family(
        name="DistilBERT",
        model_types=("distilbert", "rank_distilbert"),
        layers="transformer.layer",
        attention="attention",
        attended="attention",
        updated="ffn",
        attention_norm="sa_layer_norm",
        mlp_norm="output_layer_norm",
        projections=LinearProjections("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        mlp=MLPPaths("ffn.lin1", "ffn.lin2", "ffn.activation"),
        num_heads="n_heads",
    ),
    pre_norm(
        "ViT",
        "vit",
        layers="layers",
        attention="attention",
        attention_norm="layernorm_before",
        mlp_norm="layernorm_after",
        final_norm="layernorm",
        projections=LinearProjections("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
        mlp=MLPPaths("mlp.fc1", "mlp.fc2", "mlp.activation_fn"),
        stock_width="head_dim",
    ),
    Family(
        name="ViT's relatives",
        model_types=(
            *("deit", "dinov2", "dinov2_with_registers", "ijepa"),
            *("vit_mae", "audio-spectrogram-transformer"),
        ),
        projections=LinearProjections("q_proj", "k_proj", "v_proj", "o_proj"),
        stock_width="head_dim",
    ),
    Family(
        name="BEiT",
        model_types=("beit",),
        projections=LinearProjections("q_proj", "k_proj", "v_proj", "o_proj"),
        stock_width="head_dim",
        positions="relative positions",
    ),
    Family(
        name="T5",
        model_types=("t5", "mt5", "umt5"),
        projections=LinearProjections("q", "k", "v", "o"),
        num_heads="n_heads",
        default_scale=lambda width: 1.0,
        stock_width="d_kv",
        positions="relative positions",
    ),
    pre_norm(
        "GPT-2",
        *("gpt2", "rank_gpt2"),
        layers="h",
        attention="attn",
        cross_attention="crossattention",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        final_norm="ln_f",
        projections=FusedProjections("attn.c_attn", "attn.c_proj"),
        mlp=MLPPaths("mlp.c_fc", "mlp.c_proj", "mlp.act"),
        causal=lambda config: True,
        num_heads="num_heads",
    ),
    pre_norm(
        "Llama",
        *("llama", "qwen2", "qwen3", "mistral"),
        layers="layers",
        attention="self_attn",
        **LLAMA_NORMS,
        final_norm="norm",
        projections=LinearProjections("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        causal=lambda config: True,
        positions="rotary positions",
    ),
    pre_norm(
        "DeepSeek-V3",
        "deepseek_v3",
        layers="layers",
        attention="self_attn",
        **LLAMA_NORMS,
        final_norm="norm",
        value_norm="self_attn.kv_a_layernorm",
        projections=LatentProjections("self_attn", "self_attn.o_proj"),
        causal=lambda config: True,
        positions="rotary positions",
    ),
)


def family_of(model: PreTrainedModel | PreTrainedConfig) -> Family:
    """The row of a model, or a `Family` with nothing but the name for a model whose structure is read."""
    model_type = getattr(getattr(model, "config", model), "model_type", None)
    for family in TABLE:
        if model_type in family.model_types:
            return family
    return Family(name=str(model_type), model_types=(str(model_type),))


def listed(model: PreTrainedModel, what: str) -> Family:
    """The row of a model in the table; a `ValueError` if `what` needs more than can be read off a structure."""
    family = family_of(model)
    if not family.layers:
        known = ", ".join(sorted(name for row in TABLE if row.layers for name in row.model_types))
        raise ValueError(
            f"{what} need a row in the table of architectures, and {family.name!r} has none; these have one: {known}."
        )
    return family


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model below its task head."""
    base = getattr(model, model.base_model_prefix, model)
    # in some base models, a part has the name that the base model has in models with a head
    main = getattr(model, "main_input_name", None)
    return base if base is model or main in inspect.signature(base.forward).parameters else model


def layer_groups(model: PreTrainedModel) -> tuple[list[list[nn.Module]], list[int]]:
    """Groups of layers, and which group runs at each depth. Where layers are not shared, each is a group of its own."""
    family, base = family_of(model), base_of(model)
    if family.groups is None:
        layers = submodule(base, family.layers) if family.layers else tower_of(base).layers
        groups = [[layer] for layer in layers]
        return groups, list(range(len(groups)))
    outer, inner = family.layers.split(".*.")
    return [list(getattr(group, inner)) for group in submodule(base, outer)], family.groups(base.config)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layer module of each application in order: as long as the model is deep, also where modules are shared."""
    groups, order = layer_groups(model)
    return [layer for group in order for layer in groups[group]]


def attention_of(model: PreTrainedModel, layer: nn.Module) -> Any:
    """The attention module of a layer; None for a layer without one."""
    family = family_of(model)
    return submodule(layer, family.attention) if family.attention else self_attention(layer)


def is_causal(model: PreTrainedModel) -> bool:
    """Whether tokens see only the tokens before them."""
    if (family := family_of(model)).layers:
        return bool(family.causal(model.config))
    found = [attention_of(model, layer) for layer in layers_of(model)]
    return any(bool(getattr(attention, "is_causal", False)) for attention in found)


def attending_layers(model: PreTrainedModel) -> list[int]:
    """The numbers of the layers with softmax attention; all but those of hybrids with state-space or linear layers."""
    return [number for number, layer in enumerate(layers_of(model)) if attention_of(model, layer) is not None]
