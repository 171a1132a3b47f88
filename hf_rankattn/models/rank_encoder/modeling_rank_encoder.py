"""RankEncoder: the from-scratch encoder of the papers on attention rank, on real-valued tokens or on a vocabulary."""

import math
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, TokenClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..blocked_attention import blocked_attention
from ..rank_attention import (
    RankModelMixin,
    apply_qk_norm,
    init_temperature,
    project,
    rank_attention,
    set_heads,
    set_projections,
)
from .configuration_rank_encoder import RankEncoderConfig


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention that keeps its maps: (batch, heads, n, width) each -> (batch, n, heads, v_head_dim), maps."""
    logits = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    elif attention_mask is not None:
        logits = logits + attention_mask
    if module.hardmax:
        maps = nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(value.dtype)
    else:
        maps = nn.functional.softmax(logits, dim=-1)
    maps = nn.functional.dropout(maps, p=dropout, training=module.training)
    return torch.matmul(maps, value).transpose(1, 2).contiguous(), maps


class L2Norm(nn.Module):
    """Rows of one learned length. Not RMSNorm: no sqrt(d), and one scalar instead of a gain per channel."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = states if states.dtype == torch.float64 else states.float()
        inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps**2)
        return (wide * inverse).to(states.dtype) * self.scale.to(states.dtype)


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    if kind == "l2":
        return L2Norm(eps)
    if kind == "layer":
        return nn.LayerNorm(width, eps=eps)
    return nn.RMSNorm(width, eps=eps) if kind == "rms" else nn.Identity()


class RankEncoderAttention(nn.Module):
    """All heads of a layer in one module, however many there are."""

    def __init__(self, config: RankEncoderConfig, layer_idx: int):
        super().__init__()
        set_heads(self, config, layer_idx)
        width, bias = self.num_attention_heads * self.v_head_dim, config.attention_bias
        set_projections(self, config.hidden_size, bias)
        self.output = nn.Linear(width, config.hidden_size, bias=bias)
        # Transformers initialises module by module, so each projection carries its bounds: Xavier for the (3 d, d) matrix
        # of one ordinary layer, whatever the number of heads; biases start at zero.
        for projection in (self.query, self.key, self.value):
            projection.init_bounds = (math.sqrt(6 / (4 * config.hidden_size)), 0.0)
        self.output.init_bounds = (max(1 / config.hidden_size, 1 / width) ** 0.5, 0.0)
        mean_of_blocks = min(1.0, config.hidden_size / width)
        self.output_scale = mean_of_blocks if config.output_scale is None else float(config.output_scale)
        self.hardmax = config.attention == "hardmax"
        self.dropout = config.attention_probs_dropout_prob
        self.is_causal = False
        self.layer_idx = layer_idx

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        dropout = self.dropout if self.training else 0.0
        fused = self.config._attn_implementation == "sdpa" and not kwargs.get("output_attentions")
        fused = fused and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
        if fused and attention_mask is None and dropout == 0.0 and not self.hardmax:
            layers = self.query, self.key, self.value, self.output
            numbers = self.num_attention_heads, self.scaling, self.output_scale
            attended = blocked_attention(hidden_states, *layers, *numbers, self.log_temperature)
            if attended is not None:
                return attended, None
        query, key, value = states = [project(self, name, hidden_states) for name in ("query", "key", "value")]
        if self.hardmax:
            query, key = apply_qk_norm(self, query, key)
            joined, maps = eager_attention_forward(self, query, key, value, attention_mask, self.scaling, dropout)
            joined = joined.flatten(2)
        else:
            joined, maps = rank_attention(self, *states, attention_mask, dropout, eager_attention_forward, **kwargs)
        # scaling what enters, not what leaves, keeps the bias out of the mean
        return self.output(joined * self.output_scale), maps


class RankEncoderMLP(nn.Module):
    def __init__(self, config: RankEncoderConfig):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(hidden_states)))


class Skip(nn.Module):
    """What a sublayer adds to the stream, or puts in its place. A module, so that a hook can take the skip away."""

    def __init__(self, use_skip: bool):
        super().__init__()
        self.use_skip = use_skip

    def forward(self, stream: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return stream + update if self.use_skip else update


class RankEncoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: RankEncoderConfig, layer_idx: int):
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        self.attention = RankEncoderAttention(config, layer_idx)
        self.attention_skip = Skip(config.use_skip)
        self.attention_norm = make_norm(config.norm, config.hidden_size, config.norm_eps)
        self.mlp = RankEncoderMLP(config) if config.use_mlp else None
        self.mlp_skip = Skip(config.use_skip) if config.use_mlp else None
        self.mlp_norm = make_norm(config.norm, config.hidden_size, config.norm_eps) if config.use_mlp else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        def attend(states):
            return self.attention(states, attention_mask, **kwargs)[0]

        hidden_states = self.sublayer(hidden_states, attend, self.attention_skip, self.attention_norm)
        if self.mlp is None:
            return hidden_states
        return self.sublayer(hidden_states, self.mlp, self.mlp_skip, self.mlp_norm)

    def sublayer(self, stream, update, skip, norm):
        if self.pre_norm:
            return skip(stream, self.dropout(update(norm(stream))))
        return norm(skip(stream, self.dropout(update(stream))))


class RankEncoderEmbeddings(nn.Module):
    """Tokens (batch, n, input_dim) or ids (batch, n) -> the stream (batch, n, hidden_size)."""

    def __init__(self, config: RankEncoderConfig):
        super().__init__()
        width = config.hidden_size - config.position_dim
        self.position = config.position
        if config.vocab_size is not None:
            self.tokens: nn.Module = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        elif config.input_map == "linear":
            self.tokens = nn.Linear(config.input_dim, width)
        elif config.input_map == "mlp":
            self.tokens = nn.Sequential(nn.Linear(config.input_dim, width), nn.GELU(), nn.Linear(width, width))
        else:
            self.tokens = nn.Identity()
        if self.position != "none":
            position_width = config.position_dim or config.hidden_size
            self.position_embeddings = nn.Parameter(torch.empty(config.max_position_embeddings, position_width))
        self.norm = make_norm(config.norm if config.input_norm else "none", config.hidden_size, config.norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.tokens(tokens)
        if self.position != "none":
            if states.shape[1] > len(self.position_embeddings):
                raise ValueError(
                    f"the sequence has {states.shape[1]} tokens, but the config has positions for "
                    f"max_position_embeddings={len(self.position_embeddings)}."
                )
            positions = self.position_embeddings[: states.shape[1]].to(states.dtype)
            if self.position == "additive":
                states = states + positions
            else:
                states = torch.cat([states, positions.expand(len(states), -1, -1)], dim=-1)
        return self.norm(states)


class RankEncoderPreTrainedModel(RankModelMixin, PreTrainedModel):
    """Base class of the encoders, with the papers' initialisation."""

    config: RankEncoderConfig
    base_model_prefix = "encoder"
    main_input_name = "points"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["RankEncoderLayer"]
    _can_record_outputs = {"hidden_states": RankEncoderLayer, "attentions": RankEncoderAttention}
    # the losses below are means over a batch, so Trainer has to divide by the steps that it accumulates
    accepts_loss_kwargs = False

    def encode(self, points, queries, input_ids, attention_mask, **kwargs) -> tuple[BaseModelOutput, torch.Tensor]:
        """The encoder's outputs, and the states that a head reads: of the queries where there are queries, else of all."""
        tokens = {"points": points, "queries": queries, "input_ids": input_ids, "attention_mask": attention_mask}
        outputs = self.encoder(**tokens, return_dict=True, **kwargs)
        states = outputs.last_hidden_state
        return outputs, states if queries is None else states[:, points.shape[1] :]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for the call of its interface in this file; it is in rank_attention.py

    @torch.no_grad()
    def _init_weights(self, module):
        """The papers' initialisation, drawn anew for every layer."""
        init_temperature(module)
        if isinstance(module, nn.Linear):
            torch_default = module.in_features**-0.5
            weight_bound, bias_bound = getattr(module, "init_bounds", (torch_default, torch_default))
            init.uniform_(module.weight, -weight_bound, weight_bound)
            if module.bias is not None:
                init.uniform_(module.bias, -bias_bound, bias_bound)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.padding_idx is not None:
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, RankEncoderEmbeddings) and module.position != "none":
            init.uniform_(module.position_embeddings, -1.0, 1.0)
        elif isinstance(module, L2Norm):
            init.ones_(module.scale)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)


class RankEncoderModel(RankEncoderPreTrainedModel):
    """Returns the stream of all tokens; with `queries`, of the points and then of the queries."""

    def __init__(self, config: RankEncoderConfig):
        super().__init__(config)
        self.embeddings = RankEncoderEmbeddings(config)
        self.layers = nn.ModuleList([RankEncoderLayer(config, i) for i in range(config.num_hidden_layers)])
        last_norm = config.norm if config.norm_placement == "pre" else "none"
        self.norm = make_norm(last_norm, config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings.tokens

    def set_input_embeddings(self, value):
        self.embeddings.tokens = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        points: torch.FloatTensor | None = None,
        queries: torch.FloatTensor | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        r"""
        Args:
            points (`torch.FloatTensor` of shape `(batch, n, input_dim)`, *optional*): Real-valued tokens.
            queries (`torch.FloatTensor` of shape `(batch, m, input_dim)`, *optional*):
                Further points that read the others and are read by nobody, themselves included.
            input_ids (`torch.LongTensor` of shape `(batch, n)`, *optional*): Discrete tokens.
            attention_mask (`torch.Tensor` of shape `(batch, n)`, *optional*): 1 for tokens, 0 for padding.
        """
        tokens = check_inputs(self.config, points, queries, input_ids, attention_mask, kwargs)
        if input_ids is None:
            tokens = tokens.to(self.dtype)
            if attention_mask is not None:  # whatever stands in padding, NaN too, must not reach the others
                more = tokens.shape[1] - attention_mask.shape[1]
                real = nn.functional.pad(attention_mask.bool(), (0, more), value=True)
                tokens = tokens.masked_fill(~real[..., None], 0)
        states = self.embeddings(tokens)
        if queries is not None:
            if attention_mask is None:
                attention_mask = torch.ones(points.shape[:2], dtype=torch.long, device=points.device)
            attention_mask = nn.functional.pad(attention_mask, (0, queries.shape[1]))
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=states, attention_mask=attention_mask)
        for layer in self.layers:
            states = layer(states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(states))


def check_inputs(config, points, queries, input_ids, attention_mask, kwargs) -> torch.Tensor:
    """The tokens (points, then queries) or ids of one call, or a `ValueError` that names what is wrong."""
    for name in () if torch.compiler.is_compiling() else kwargs:
        if near := get_close_matches(name, ("points", "queries", "input_ids", "attention_mask", "labels"), cutoff=0.8):
            raise ValueError(f"`{name}` is not an input. Did you mean `{near[0]}`?")
    if config.vocab_size is not None:
        if input_ids is None or points is not None or queries is not None:
            raise ValueError(f"this encoder reads `input_ids` (vocab_size={config.vocab_size}), no points or queries.")
        if input_ids.ndim != 2:
            raise ValueError(f"`input_ids` must be (batch, n), got {tuple(input_ids.shape)}.")
        tokens = input_ids
    else:
        if points is None or input_ids is not None:
            raise ValueError(f"this encoder reads `points` (batch, n, {config.input_dim}): give those, no input_ids.")
        for name, given in (("points", points), ("queries", queries)):
            if given is not None and (given.ndim != 3 or given.shape[-1] != config.input_dim):
                raise ValueError(f"`{name}` must be (batch, n, {config.input_dim}), got {tuple(given.shape)}.")
        if queries is not None and len(queries) != len(points):
            raise ValueError(f"`queries` must be of the batch size of `points`, {len(points)}, got {len(queries)}.")
        tokens = points if queries is None else torch.cat([points, queries], dim=1)
    asked = tokens.shape[0], (tokens if queries is None else points).shape[1]
    if attention_mask is not None and tuple(attention_mask.shape) != asked:
        raise ValueError(f"`attention_mask` must be {asked} like the tokens, got {tuple(attention_mask.shape)}.")
    return tokens


@dataclass
class PointRegressionOutput(ModelOutput):
    """The vectors that point regression predicts.

    Args:
        loss (`torch.FloatTensor`, *optional*): Mean squared distance to `labels`, returned if they are given.
        predictions (`torch.FloatTensor` of shape `(batch, n or m, output_dim)`): One vector per token, or per query.
        hidden_states, attentions (`tuple[torch.FloatTensor]`, *optional*): As in [`~transformers.modeling_outputs.BaseModelOutput`].
    """

    loss: torch.FloatTensor | None = None
    predictions: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None

    @property
    def logits(self) -> torch.FloatTensor | None:
        """`predictions`, under the name that transformers uses for the output of every head."""
        return self.predictions


class RankEncoderForPointRegression(RankEncoderPreTrainedModel):
    """Predicts a vector for each token (for each query, where there are queries)."""

    def __init__(self, config: RankEncoderConfig):
        super().__init__(config)
        self.encoder = RankEncoderModel(config)
        if config.output_dim is None:
            raise ValueError("point regression on a vocabulary needs `output_dim`, the width of what it predicts.")
        direct = config.input_map == "none" and config.vocab_size is None
        self.head = nn.Identity() if direct else nn.Linear(config.hidden_size, config.output_dim)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        points: torch.FloatTensor | None = None,
        queries: torch.FloatTensor | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.FloatTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> PointRegressionOutput:
        r"""
        Args:
            labels (`torch.FloatTensor` of shape `(batch, n or m, output_dim)`, *optional*):
                Target vectors. The loss is the squared distance, summed over the entries of a vector and averaged over
                the tokens that are not padding: predicting zero for unit vectors costs 1.
        """
        outputs, states = self.encode(points, queries, input_ids, attention_mask, **kwargs)
        predictions = self.head(states)[..., : self.config.output_dim]
        loss = None
        if labels is not None:
            if labels.shape != predictions.shape:
                raise ValueError(f"`labels` must be {tuple(predictions.shape)}, got {tuple(labels.shape)}.")
            errors = (predictions - labels.to(predictions.dtype)).square().sum(-1)
            if attention_mask is not None and queries is None:
                errors = errors[attention_mask.bool()]
            loss = errors.mean()
        return PointRegressionOutput(
            loss=loss, predictions=predictions, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class RankEncoderForTokenClassification(RankEncoderPreTrainedModel):
    """Predicts a class for each token (for each query, where there are queries)."""

    def __init__(self, config: RankEncoderConfig):
        super().__init__(config)
        self.encoder = RankEncoderModel(config)
        self.head = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        points: torch.FloatTensor | None = None,
        queries: torch.FloatTensor | None = None,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        r"""
        Args:
            labels (`torch.LongTensor` of shape `(batch, n or m)`, *optional*): Classes; -100 is left out of the loss.
        """
        outputs, states = self.encode(points, queries, input_ids, attention_mask, **kwargs)
        logits = self.head(states)
        loss = None
        if labels is not None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            loss = nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "PointRegressionOutput",
    "RankEncoderForPointRegression",
    "RankEncoderForTokenClassification",
    "RankEncoderModel",
    "RankEncoderPreTrainedModel",
]
