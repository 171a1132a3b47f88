"""Where attention, skip, MLP and norm live in each family: one row a family, nothing else in the probe knows models."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.rank_bert.building import apply_qk_norm, unit_norm


@dataclass(frozen=True)
class ZeroInput:
    """The module gets zeros for one of its positional arguments."""

    module: str
    argument: int


@dataclass(frozen=True)
class PassInput:
    """The module returns one of its positional arguments as it came."""

    module: str
    argument: int = 0


@dataclass(frozen=True)
class ZeroOutput:
    """The module returns zeros."""

    module: str


@dataclass(frozen=True)
class Idle:
    """The module gets one token of each text: whatever it makes of it goes nowhere, so there is no need for more."""

    module: str


@dataclass(frozen=True)
class Feed:
    """The target gets what the source returned last, instead of a sum that the layer makes of it."""

    source: str
    target: str


@dataclass(frozen=True)
class Return:
    """The target returns what the source returned last, through `function` if there is one: all else between is gone."""

    source: str
    target: str
    function: str | None = None


class Values(NamedTuple):
    """How a layer reads and writes: (groups * v, hidden) and (hidden, heads * v) as in `y = x W^T + b`, with biases."""

    value: torch.Tensor
    value_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None


class MLP(NamedTuple):
    """The two maps of an MLP, (inner, hidden) and (hidden, inner), and the function between them."""

    up: torch.Tensor
    down: torch.Tensor
    activation: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sublayers:
    """Where the two sums of a layer can be seen: what attention and MLP add to the stream, and the norms beside them."""

    attended: str
    attention_norm: str
    updated: str
    mlp_norm: str
    values: Callable[[Any], Values]
    # None where the MLP is a product of two maps, which has no Lipschitz constant
    mlp: Callable[[Any], MLP] | None
    # the output projection, whose argument holds the heads side by side; None where no module makes it
    projection: str | None
    pre_norm: Callable[[Any], bool] = lambda layer: False
    # the norm of the base model behind its last layer
    final_norm: str | None = None
    # a norm without bias inside the values, which gives each token a scale
    value_norm: str | None = None


Edit = ZeroInput | PassInput | ZeroOutput | Idle | Feed | Return
SWITCHES = ("attention_skip", "mlp", "mlp_skip", "norm")


@dataclass(frozen=True)
class Family:
    """One row of the table. Paths are relative to the base model (`layers`) or to a layer (all others)."""

    name: str
    model_types: tuple[str, ...]
    layers: str
    attention: str
    edits: dict[str, tuple[Edit, ...]]
    # XLNet's layers work on (n, batch, d) and return a tuple
    batch_first: bool = True
    # where the maps are: an item of what the attention module returns, or what enters its dropout first
    maps: str = "output"
    causal: Callable[[Any], bool] = lambda config: getattr(config, "is_decoder", False)
    # W_Q and W_K of every head, each (heads, hidden, width), of an attention module
    query_key: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]] = lambda attention, config: linear_heads(
        attention.query, attention.key, config
    )
    # how an attention module outside of transformers' interface shows its queries and keys: puts hooks on a stack
    logits: Callable[[Any, Callable, ExitStack], None] | None = None
    applications: Callable[[PreTrainedModel], list[int]] | None = None
    # None where a layer is no sum of heads that are linear in the stream
    sublayers: Sublayers | None = None
    # what a base model makes of its last states (batch, n, d) for heads that read one vector a text
    pool: Callable[[Any, torch.Tensor], torch.Tensor] = lambda base, states: base.pooler(states)
    # what the logits know besides the content of two tokens
    positions: str | None = None
    notes: dict[str, str] = field(default_factory=dict)


def bert_like(name: str, *model_types: str) -> Family:
    return Family(
        name=name,
        model_types=model_types,
        layers="encoder.layer",
        attention="attention.self",
        edits={
            "attention_skip": (ZeroInput("attention.output", 1),),
            "mlp": (Idle("intermediate"), PassInput("output", 1)),
            "mlp_skip": (ZeroInput("output", 1),),
            "norm": (PassInput("attention.output.LayerNorm"), PassInput("output.LayerNorm")),
        },
        sublayers=Sublayers(
            attended="attention.output.dense",
            attention_norm="attention.output.LayerNorm",
            updated="output.dense",
            mlp_norm="output.LayerNorm",
            values=lambda layer: linear_values(layer.attention.self.value, layer.attention.output.dense),
            mlp=lambda layer: MLP(
                layer.intermediate.dense.weight, layer.output.dense.weight, layer.intermediate.intermediate_act_fn
            ),
            projection="attention.output.dense",
        ),
    )


def pre_norm(
    name: str, *model_types: str, layers: str, attention: str, mlp: str, norms: tuple[str, str],
    values: Callable[[Any], Values] | None = None, lipschitz: Callable[[Any], MLP] | None = None,
    projection: str | None = None, final_norm: str | None = None, value_norm: str | None = None, **row,
) -> Family:  # fmt: skip
    """Families that add to the stream before they normalise it: no module stands between an addition and the next."""
    reason = "the layer adds attention to the stream in its own code, with no module to hook between"
    sublayers = values and Sublayers(
        attended=attention,
        attention_norm=norms[0],
        updated=mlp,
        mlp_norm=norms[1],
        values=values,
        mlp=lipschitz,
        projection=projection,
        pre_norm=lambda layer: True,
        final_norm=final_norm,
        value_norm=value_norm,
    )
    return Family(
        name=name,
        model_types=model_types,
        layers=layers,
        attention=attention,
        edits={"mlp": (Idle(mlp), ZeroOutput(mlp)), "norm": tuple(PassInput(norm) for norm in norms)},
        notes={"attention_skip": reason, "mlp_skip": reason},
        sublayers=sublayers,
        **row,
    )


def linear_heads(query: nn.Linear, key: nn.Linear, config) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads of two linear layers; grouped keys are repeated for the queries that share them."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    queries = query.weight.unflatten(0, (heads, -1)).transpose(1, 2)
    keys = key.weight.unflatten(0, (groups, -1)).transpose(1, 2)
    return queries, keys.repeat_interleave(heads // groups, dim=0)


def linear_values(value: nn.Linear, output: nn.Linear, scale: float = 1.0) -> Values:
    """The values of two linear layers; `scale` is what the heads are multiplied with before the second."""
    return Values(value.weight, value.bias, output.weight if scale == 1 else output.weight * scale, output.bias)


def xlnet_values(layer) -> Values:
    """XLNet's tensors are (hidden, heads, v), without biases."""
    attention = layer.rel_attn
    return Values(attention.v.flatten(1).t(), None, attention.o.flatten(1), None)


def gpt2_values(layer) -> Values:
    """GPT-2's values are the last third of one matrix (hidden, 3 hidden)."""
    attention, width = layer.attn, layer.attn.embed_dim
    return Values(
        attention.c_attn.weight[:, 2 * width :].t(),
        attention.c_attn.bias[2 * width :],
        attention.c_proj.weight.t(),
        attention.c_proj.bias,
    )


def gpt2_heads(attention, config) -> tuple[torch.Tensor, torch.Tensor]:
    """GPT-2 keeps queries, keys and values side by side in one matrix (hidden, 3 hidden)."""
    query, key, _ = attention.c_attn.weight.split(config.hidden_size, dim=1)
    return tuple(x.unflatten(1, (config.num_attention_heads, -1)).transpose(0, 1) for x in (query, key))  # type: ignore[return-value]


def latent_heads(attention, config) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek's queries and keys through their latents, the gains of the norms between folded in."""
    heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    if attention.q_lora_rank is None:
        queries = attention.q_proj.weight
    else:
        queries = (attention.q_b_proj.weight * attention.q_a_layernorm.weight) @ attention.q_a_proj.weight
    down = attention.kv_a_proj_with_mqa.weight
    up = attention.kv_b_proj.weight.unflatten(0, (heads, -1))[:, :nope] * attention.kv_a_layernorm.weight
    rotary = down[latent:].expand(heads, -1, -1)
    keys = torch.cat([up @ down[:latent], rotary], dim=1)
    return queries.unflatten(0, (heads, -1)).transpose(1, 2), keys.transpose(1, 2)


def latent_values(layer) -> Values:
    """DeepSeek's values through their latent, the gain of the norm between folded in."""
    attention = layer.self_attn
    latent, output = attention.kv_lora_rank, attention.o_proj
    up = attention.kv_b_proj.weight.unflatten(0, (attention.num_heads, -1))[:, attention.qk_nope_head_dim :]
    up = up.flatten(0, 1) * attention.kv_a_layernorm.weight
    down = attention.kv_a_proj_with_mqa
    bias = None if down.bias is None else up @ down.bias[:latent]
    return Values(up @ down.weight[:latent], bias, output.weight, output.bias)


def xlnet_logits(attention, record: Callable, stack: ExitStack) -> None:
    """XLNet's attention is its own: the content term, `q + r_w_bias` against k, (n, batch, heads, r) each."""
    core = attention.rel_attn_core
    normed = getattr(attention, "log_temperature", None) is not None
    shown = False

    def enter(*_):
        nonlocal shown
        shown = False

    def rel_attn_core(q_head, k_head_h, *args, **kwargs):
        nonlocal shown
        if shown:  # the second stream reads the keys of the first
            return core(q_head, k_head_h, *args, **kwargs)
        shown = True
        query, key = (unit_norm(q_head), unit_norm(k_head_h)) if normed else (q_head, k_head_h)
        query, key = ((query + attention.r_w_bias).permute(1, 2, 0, 3), key.permute(1, 2, 0, 3))
        record(query * attention.scale, key)
        return core(q_head, k_head_h, *args, **kwargs)

    stack.callback(attention.register_forward_pre_hook(enter).remove)
    attention.rel_attn_core = rel_attn_core
    stack.callback(delattr, attention, "rel_attn_core")


def encoder_logits(attention, record: Callable, stack: ExitStack) -> None:
    """RankEncoder's fused and hard attention do not go through the interface: its queries and keys are made again."""

    def show(module, args, kwargs):
        states = args[0] if args else kwargs["hidden_states"]
        query, key = (
            projection(states).unflatten(-1, (module.num_attention_heads, module.qk_rank)).transpose(1, 2)
            for projection in (module.query, module.key)
        )
        query, key = apply_qk_norm(module, query, key)
        record(query * module.scaling, key)

    stack.callback(attention.register_forward_pre_hook(show, with_kwargs=True).remove)


def albert_applications(model: PreTrainedModel) -> list[int]:
    """ALBERT runs the layers of a group again and again: which layer module each application uses."""
    config = model.config
    per_group = config.num_hidden_layers / config.num_hidden_groups
    groups = [int(i / per_group) for i in range(config.num_hidden_layers)]
    return [group * config.inner_group_num + inner for group in groups for inner in range(config.inner_group_num)]


TABLE = (
    bert_like("BERT", "bert", "rank_bert"),
    bert_like("RoBERTa", "roberta", "xlm-roberta"),
    bert_like("ELECTRA", "electra"),
    Family(
        name="ALBERT",
        model_types=("albert", "rank_albert"),
        layers="encoder.albert_layer_groups.*.albert_layers",
        attention="attention",
        applications=albert_applications,
        pool=lambda base, states: base.pooler_activation(base.pooler(states[:, 0])),
        edits={
            "attention_skip": (Feed("attention.output_dropout", "attention.LayerNorm"),),
            "mlp": (Idle("ffn"), Return("attention", "full_layer_layer_norm")),
            "mlp_skip": (Feed("ffn_output", "full_layer_layer_norm"),),
            "norm": (PassInput("attention.LayerNorm"), PassInput("full_layer_layer_norm")),
            "identity_trick": (Idle("ffn"), Return("attention", "ffn_output", function="activation")),
        },
        sublayers=Sublayers(
            attended="attention.output_dropout",
            attention_norm="attention.LayerNorm",
            updated="ffn_output",
            mlp_norm="full_layer_layer_norm",
            values=lambda layer: linear_values(layer.attention.value, layer.attention.dense),
            mlp=lambda layer: MLP(layer.ffn.weight, layer.ffn_output.weight, layer.activation),
            projection="attention.dense",
        ),
    ),
    Family(
        name="XLNet",
        model_types=("xlnet", "rank_xlnet"),
        layers="layer",
        attention="rel_attn",
        batch_first=False,
        maps="dropout",
        causal=lambda config: config.attn_type == "uni",
        query_key=lambda attention, config: (attention.q.transpose(0, 1), attention.k.transpose(0, 1)),
        logits=xlnet_logits,
        edits={
            "attention_skip": (Feed("rel_attn.dropout", "rel_attn.layer_norm"),),
            "mlp": (Idle("ff.layer_1"), PassInput("ff")),
            "mlp_skip": (Feed("ff.dropout", "ff.layer_norm"),),
            "norm": (PassInput("rel_attn.layer_norm"), PassInput("ff.layer_norm")),
        },
        positions="relative positions",
        sublayers=Sublayers(
            attended="rel_attn.dropout",
            attention_norm="rel_attn.layer_norm",
            updated="ff.dropout",
            mlp_norm="ff.layer_norm",
            values=xlnet_values,
            mlp=lambda layer: MLP(
                layer.ff.layer_1.weight, layer.ff.layer_2.weight, layer.ff.activation_function
            ),
            projection=None,
        ),
    ),
    Family(
        name="RankEncoder",
        model_types=("rank_encoder",),
        layers="layers",
        attention="attention",
        logits=encoder_logits,
        edits={
            "attention_skip": (PassInput("attention_skip", 1),),
            "mlp": (Idle("mlp"), PassInput("mlp_skip", 0), PassInput("mlp_norm")),
            "mlp_skip": (PassInput("mlp_skip", 1),),
            "norm": (PassInput("attention_norm"), PassInput("mlp_norm")),
        },
        sublayers=Sublayers(
            attended="attention",
            attention_norm="attention_norm",
            updated="mlp",
            mlp_norm="mlp_norm",
            values=lambda layer: linear_values(
                layer.attention.value, layer.attention.output, layer.attention.output_scale
            ),
            mlp=lambda layer: MLP(layer.mlp.up.weight, layer.mlp.down.weight, layer.mlp.activation),
            projection="attention.output",
            pre_norm=lambda layer: layer.pre_norm,
            final_norm="norm",
        ),
    ),
    Family(
        name="DistilBERT",
        model_types=("distilbert",),
        layers="transformer.layer",
        attention="attention",
        query_key=lambda attention, config: linear_heads(attention.q_lin, attention.k_lin, config),
        edits={
            "attention_skip": (Feed("attention", "sa_layer_norm"),),
            "mlp": (Idle("ffn"), Return("sa_layer_norm", "output_layer_norm")),
            "mlp_skip": (Feed("ffn", "output_layer_norm"),),
            "norm": (PassInput("sa_layer_norm"), PassInput("output_layer_norm")),
        },
        sublayers=Sublayers(
            attended="attention",
            attention_norm="sa_layer_norm",
            updated="ffn",
            mlp_norm="output_layer_norm",
            values=lambda layer: linear_values(layer.attention.v_lin, layer.attention.out_lin),
            mlp=lambda layer: MLP(layer.ffn.lin1.weight, layer.ffn.lin2.weight, layer.ffn.activation),
            projection="attention.out_lin",
        ),
    ),
    pre_norm(
        "ViT", "vit", layers="layers", attention="attention", mlp="mlp", norms=("layernorm_before", "layernorm_after"),
        query_key=lambda attention, config: linear_heads(attention.q_proj, attention.k_proj, config),
        values=lambda layer: linear_values(layer.attention.v_proj, layer.attention.o_proj),
        lipschitz=lambda layer: MLP(layer.mlp.fc1.weight, layer.mlp.fc2.weight, layer.mlp.activation_fn),
        projection="attention.o_proj", final_norm="layernorm",
    ),
    pre_norm(
        "GPT-2", "gpt2", layers="h", attention="attn", mlp="mlp", norms=("ln_1", "ln_2"), causal=lambda config: True,
        query_key=lambda attention, config: gpt2_heads(attention, config), values=gpt2_values,
        lipschitz=lambda layer: MLP(layer.mlp.c_fc.weight.t(), layer.mlp.c_proj.weight.t(), layer.mlp.act),
        projection="attn.c_proj", final_norm="ln_f",
    ),
    pre_norm(
        "Llama", "llama", "qwen2", "qwen3", "mistral", layers="layers", attention="self_attn", mlp="mlp",
        norms=("input_layernorm", "post_attention_layernorm"), causal=lambda config: True,
        query_key=lambda attention, config: linear_heads(attention.q_proj, attention.k_proj, config),
        values=lambda layer: linear_values(layer.self_attn.v_proj, layer.self_attn.o_proj),
        projection="self_attn.o_proj", final_norm="norm", positions="rotary positions",
    ),
    pre_norm(
        "DeepSeek-V3", "deepseek_v3", layers="layers", attention="self_attn", mlp="mlp",
        norms=("input_layernorm", "post_attention_layernorm"), causal=lambda config: True,
        query_key=lambda attention, config: latent_heads(attention, config), positions="rotary positions",
        values=latent_values, value_norm="self_attn.kv_a_layernorm", projection="self_attn.o_proj", final_norm="norm",
    ),
)  # fmt: skip


def family_of(model: PreTrainedModel | PreTrainedConfig) -> Family:
    """The row of a model, or a `ValueError` that lists the rows there are."""
    model_type = getattr(getattr(model, "config", model), "model_type", None)
    for family in TABLE:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in TABLE for name in family.model_types))
    raise ValueError(f"no row for model type {model_type!r} ({type(model).__name__}); these have one: {known}.")


def sublayers_of(model: PreTrainedModel) -> Sublayers:
    """Where the layers of a model add to the stream, or a `ValueError` that lists the families that show it."""
    family = family_of(model)
    if family.sublayers is None:
        known = ", ".join(row.name for row in TABLE if row.sublayers is not None)
        raise ValueError(
            f"the layers of {family.name} have no decomposition into heads here. There is one for {known}."
        )
    if model.config.chunk_size_feed_forward:
        raise ValueError("set config.chunk_size_feed_forward to 0 first: the MLP of a layer is seen as a whole.")
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError("cross-attention reads another stream: only models without it can be decomposed into paths.")
    return family.sublayers


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model below its task head."""
    return getattr(model, model.base_model_prefix, model)


def submodule(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path, or None where a part of the model is switched off."""
    module: Any = root
    for name in path.split("."):
        module = getattr(module, name)
        if module is None:
            return None
    return module


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layer module of each application, in order: as long as the model is deep, also where modules are shared."""
    family, base = family_of(model), base_of(model)
    if ".*." in family.layers:
        outer, inner = family.layers.split(".*.")
        modules = [layer for group in submodule(base, outer) for layer in getattr(group, inner)]  # type: ignore[union-attr]
    else:
        modules = list(submodule(base, family.layers))  # type: ignore[call-overload]
    if family.applications is None:
        return modules
    return [modules[index] for index in family.applications(base)]
