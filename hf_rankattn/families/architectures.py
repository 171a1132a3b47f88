"""The table of architectures, one row each, and the lookups that all other folders use."""

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
from .row import Edit, Family, Feed, Idle, MLPPaths, PassInput, Return, ZeroInput, ZeroOutput, position_limit


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
        projections=LinearProjections(
            "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"
        ),
        mlp=MLPPaths("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn"),
        edits={
            "attention_skip": (ZeroInput("attention.output", 1),),
            "mlp": (Idle("intermediate"), PassInput("output", 1)),
            "mlp_skip": (ZeroInput("output", 1),),
            "norm": (PassInput("attention.output.LayerNorm"), PassInput("output.LayerNorm")),
        },
        **row,
    )


def post_norm(
    name: str,
    *model_types: str,
    attended: str,
    updated: str,
    norms: tuple[str, str],
    idle: str,
    edits: dict[str, tuple[Edit, ...]] | None = None,
    **row: Any,
) -> Family:
    """A family with a module between each sum and the next; `idle` is the start of the MLP, `edits` replace the usual ones."""
    usual: dict[str, tuple[Edit, ...]] = {
        "attention_skip": (Feed(attended, norms[0]),),
        "mlp": (Idle(idle), Return(norms[0], norms[1])),
        "mlp_skip": (Feed(updated, norms[1]),),
        "norm": (PassInput(norms[0]), PassInput(norms[1])),
    }
    return Family(
        name=name,
        model_types=model_types,
        attended=attended,
        updated=updated,
        attention_norm=norms[0],
        mlp_norm=norms[1],
        edits=usual | (edits or {}),
        **row,
    )


def pre_norm(name: str, *model_types: str, attention: str, norms: tuple[str, str], **row: Any) -> Family:
    """A family whose layers add to the stream in their own code, with no module between one sum and the next."""
    reason = "its layers add to the residual stream in their own code, with no module to hook between"
    return Family(
        name=name,
        model_types=model_types,
        attention=attention,
        attended=attention,
        updated="mlp",
        attention_norm=norms[0],
        mlp_norm=norms[1],
        norm="pre",
        edits={"mlp": (Idle("mlp"), ZeroOutput("mlp")), "norm": tuple(PassInput(norm) for norm in norms)},
        notes={"attention_skip": reason, "mlp_skip": reason},
        **row,
    )


def albert_groups(config) -> list[int]:
    per_group = config.num_hidden_layers / config.num_hidden_groups
    return [int(layer / per_group) for layer in range(config.num_hidden_layers)]


LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
TABLE = (
    bert_like("BERT", "bert", "rank_bert", rank_twin="RankBert", cross_attention="crossattention.self"),
    bert_like(
        "RoBERTa",
        "roberta",
        "xlm-roberta",
        # positions are counted from the one after the padding index
        longest=lambda config: config.max_position_embeddings - config.pad_token_id - 1,
    ),
    bert_like("ELECTRA", "electra"),
    post_norm(
        "ALBERT",
        *("albert", "rank_albert"),
        layers="encoder.albert_layer_groups.*.albert_layers",
        groups=albert_groups,
        attention="attention",
        attended="attention.output_dropout",
        updated="ffn_output",
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
        idle="ffn",
        projections=LinearProjections("attention.query", "attention.key", "attention.value", "attention.dense"),
        mlp=MLPPaths("ffn", "ffn_output", "activation"),
        edits={"identity_trick": (Idle("ffn"), Return("attention", "ffn_output", function="activation"))},
        pool=lambda base, states: base.pooler_activation(base.pooler(states[:, 0])),
        rank_twin="RankAlbert",
    ),
    post_norm(
        "XLNet",
        *("xlnet", "rank_xlnet"),
        layers="layer",
        attention="rel_attn",
        attended="rel_attn.dropout",
        updated="ff.dropout",
        norms=("rel_attn.layer_norm", "ff.layer_norm"),
        idle="ff.layer_1",
        projections=RelativeProjections("rel_attn"),
        mlp=MLPPaths("ff.layer_1", "ff.layer_2", "ff.activation_function"),
        # both streams are normed before the MLP of the first, so the last output of the norm is that of the other stream
        edits={"mlp": (Idle("ff.layer_1"), PassInput("ff"))},
        batch_first=False,
        maps="dropout",
        causal=lambda config: config.attn_type == "uni",
        num_heads="n_head",
        scale="scale",
        default_scale=lambda width: 1 / width**0.5,  # as XLNet computes it, to the last bit
        positions="relative positions",
        show_query_key=show_relative,
        rank_twin="RankXLNet",
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
        edits={
            "attention_skip": (PassInput("attention_skip", 1),),
            "mlp": (Idle("mlp"), PassInput("mlp_skip", 0), PassInput("mlp_norm")),
            "mlp_skip": (PassInput("mlp_skip", 1),),
            "norm": (PassInput("attention_norm"), PassInput("mlp_norm")),
        },
        longest=lambda config: None if config.position == "none" else position_limit(config),
        show_query_key=show_projected,
    ),
    post_norm(
        "DistilBERT",
        "distilbert",
        layers="transformer.layer",
        attention="attention",
        attended="attention",
        updated="ffn",
        norms=("sa_layer_norm", "output_layer_norm"),
        idle="ffn",
        projections=LinearProjections("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        mlp=MLPPaths("ffn.lin1", "ffn.lin2", "ffn.activation"),
    ),
    pre_norm(
        "ViT",
        "vit",
        layers="layers",
        attention="attention",
        norms=("layernorm_before", "layernorm_after"),
        final_norm="layernorm",
        projections=LinearProjections("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
        mlp=MLPPaths("mlp.fc1", "mlp.fc2", "mlp.activation_fn"),
    ),
    pre_norm(
        "GPT-2",
        "gpt2",
        layers="h",
        attention="attn",
        norms=("ln_1", "ln_2"),
        final_norm="ln_f",
        projections=FusedProjections("attn.c_attn", "attn.c_proj"),
        mlp=MLPPaths("mlp.c_fc", "mlp.c_proj", "mlp.act"),
        causal=lambda config: True,
    ),
    pre_norm(
        "Llama",
        *("llama", "qwen2", "qwen3", "mistral"),
        layers="layers",
        attention="self_attn",
        norms=LLAMA_NORMS,
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
        norms=LLAMA_NORMS,
        final_norm="norm",
        value_norm="self_attn.kv_a_layernorm",
        projections=LatentProjections("self_attn", "self_attn.o_proj"),
        causal=lambda config: True,
        positions="rotary positions",
    ),
)


def family_of(model: PreTrainedModel | PreTrainedConfig) -> Family:
    """The row of a model, or a `ValueError` that lists the rows there are."""
    model_type = getattr(getattr(model, "config", model), "model_type", None)
    for family in TABLE:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in TABLE for name in family.model_types))
    raise ValueError(f"no row for model type {model_type!r} ({type(model).__name__}); these have one: {known}.")


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model below its task head."""
    return getattr(model, model.base_model_prefix, model)


def layer_groups(model: PreTrainedModel) -> tuple[list[list[nn.Module]], list[int]]:
    """Groups of layers, and which group runs at each depth. Where layers are not shared, each is a group of its own."""
    family, base = family_of(model), base_of(model)
    if family.groups is None:
        groups = [[layer] for layer in submodule(base, family.layers)]
        return groups, list(range(len(groups)))
    outer, inner = family.layers.split(".*.")
    return [list(getattr(group, inner)) for group in submodule(base, outer)], family.groups(base.config)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layer module of each application in order: as long as the model is deep, also where modules are shared."""
    groups, order = layer_groups(model)
    return [layer for group in order for layer in groups[group]]


def attention_of(model: PreTrainedModel, layer: nn.Module) -> Any:
    """The attention module of a layer."""
    return submodule(layer, family_of(model).attention)
