"""Configuration of RankEncoder, the from-scratch encoder of the papers on attention rank."""

import math
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..rank_attention import RANK_FIELDS, RankConfigMixin


@strict
class RankEncoderConfig(RankConfigMixin, PreTrainedConfig):
    r"""
    Configuration of a [`RankEncoderModel`]: an encoder on real-valued tokens or on a vocabulary, in which every part
    that the papers switch on and off is a field.

    Args:
        input_dim (`int`, *optional*):
            Width of real-valued tokens (`points`). Exactly one of `input_dim` and `vocab_size` has to be given.
        vocab_size (`int`, *optional*):
            Size of the vocabulary of discrete tokens (`input_ids`).
        hidden_size (`int`, *optional*):
            Width of the residual stream. Defaults to `input_dim`, plus `position_dim` where positions are concatenated.
        num_hidden_layers (`int`, *optional*, defaults to 1): Number of layers.
        num_attention_heads (`int`, *optional*, defaults to 1): Number of heads, independent of the widths.
        qk_rank (`int`, *optional*, defaults to `hidden_size / num_attention_heads`):
            Query/key width of each head: the largest rank its bilinear form can have. A list gives one per layer.
        v_head_dim (`int`, *optional*, defaults to `hidden_size / num_attention_heads`): Value width of each head.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Unit-norm queries and keys, with one learned log-temperature per head.
        qk_scale (`float`, *optional*, defaults to `qk_rank ** -0.5`): Factor on the logits.
        output_scale (`float`, *optional*, defaults to `min(1, hidden_size / (num_attention_heads * v_head_dim))`):
            Factor on the output of an attention layer. The default makes a layer with k times the usual number of
            heads the mean of k ordinary layers, so that one learning rate serves all widths.
        attention (`str`, *optional*, defaults to `"softmax"`):
            `"softmax"`, or `"hardmax"` (each query takes its best key, the first on a tie; no gradient to the logits).
        attention_bias (`bool`, *optional*, defaults to `True`): Biases on the four projections of attention.
        position (`str`, *optional*, defaults to `"none"`):
            `"none"`, `"additive"` (learned, added to the tokens) or `"concatenated"` (learned, beside the tokens).
        position_dim (`int`, *optional*):
            Width of concatenated positions. Defaults to `hidden_size - input_dim`, or to `input_dim`.
        max_position_embeddings (`int`, *optional*, defaults to 512): Longest sequence where positions are used.
        norm (`str`, *optional*, defaults to `"l2"`):
            `"l2"` (unit length times one learned scalar, as in the papers), `"layer"`, `"rms"` or `"none"`.
        norm_placement (`str`, *optional*, defaults to `"post"`): `"post"` or `"pre"`.
        norm_eps (`float`, *optional*, defaults to 1e-6): Keeps the norm of a zero vector finite; above 0.
        use_skip (`bool`, *optional*, defaults to `True`): Skip connections around attention and around the MLP.
        use_mlp (`bool`, *optional*, defaults to `True`): Whether layers have an MLP (and the norm that goes with it).
        intermediate_size (`int`, *optional*, defaults to 2048): Width of the MLP.
        hidden_act (`str`, *optional*, defaults to `"relu"`): Activation of the MLP.
        input_map (`str`, *optional*, defaults to `"none"`):
            How points enter the stream: `"none"` (they are the stream), `"linear"`, or `"mlp"` (two layers, GELU). With
            a map, point regression reads its output through a linear layer too.
        input_norm (`bool`, *optional*, defaults to `False`): Whether the norm is applied to the embedded tokens.
        output_dim (`int`, *optional*, defaults to `input_dim`): Width of what point regression predicts.
        hidden_dropout_prob (`float`, *optional*, defaults to 0.0): Dropout on the output of each sublayer.
        attention_probs_dropout_prob (`float`, *optional*, defaults to 0.0): Dropout on the attention maps.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of the word embeddings.

    >>> from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression
    >>> config = RankEncoderConfig(input_dim=64, num_attention_heads=32, qk_rank=16, v_head_dim=16)
    >>> model = RankEncoderForPointRegression(config)
    """

    model_type = "rank_encoder"
    keys_to_ignore_at_inference = ["hidden_states", "attentions"]

    input_dim: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    output_scale: float | int | None = None
    attention: Literal["softmax", "hardmax"] = "softmax"
    attention_bias: bool = True
    position: Literal["none", "additive", "concatenated"] = "none"
    position_dim: int | None = None
    max_position_embeddings: int = 512
    norm: Literal["l2", "layer", "rms", "none"] = "l2"
    norm_placement: Literal["post", "pre"] = "post"
    norm_eps: float | int = 1e-6
    use_skip: bool = True
    use_mlp: bool = True
    intermediate_size: int = 2048
    hidden_act: str = "relu"
    input_map: Literal["none", "linear", "mlp"] = "none"
    input_norm: bool = False
    output_dim: int | None = None
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = None

    def own_fields(self):
        return (*RankEncoderConfig.__annotations__, *RANK_FIELDS)

    def __post_init__(self, **kwargs):
        if (self.input_dim is None) == (self.vocab_size is None):
            raise ValueError(
                f"give exactly one of `input_dim` (real-valued tokens) and `vocab_size` (discrete tokens), got "
                f"input_dim={self.input_dim} and vocab_size={self.vocab_size}."
            )
        if self.position != "concatenated":
            if self.position_dim:
                raise ValueError(f"`position_dim`={self.position_dim} needs position='concatenated'.")
            self.position_dim = 0
        elif self.position_dim is None:
            widened = self.hidden_size is not None and self.input_dim is not None and self.hidden_size > self.input_dim
            self.position_dim = self.hidden_size - self.input_dim if widened else self.input_dim
        if self.hidden_size is None:
            if self.input_dim is None or self.input_map != "none":
                raise ValueError("`hidden_size` has to be given unless points enter the stream as they are.")
            self.hidden_size = self.input_dim + self.position_dim
        if self.output_dim is None:
            self.output_dim = self.input_dim
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        super().validate_architecture()
        if self.num_hidden_layers < 1:
            raise ValueError(f"`num_hidden_layers` must be at least 1, got {self.num_hidden_layers}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {', '.join(sorted(ACT2FN))}; got {self.hidden_act!r}.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 0 and below 1, got {getattr(self, name)}.")
        if not self.norm_eps > 0:
            raise ValueError(f"`norm_eps` must be above 0, or a zero vector becomes NaN; got {self.norm_eps}.")
        if self.vocab_size and self.pad_token_id is not None and self.pad_token_id not in range(self.vocab_size):
            raise ValueError(f"`pad_token_id`={self.pad_token_id} is not below vocab_size={self.vocab_size}.")
        if self.output_scale is not None and not 0 < self.output_scale < math.inf:
            raise ValueError(f"`output_scale` must be a positive finite number, got {self.output_scale}.")
        if self.position == "concatenated" and not (self.position_dim and 0 < self.position_dim < self.hidden_size):
            raise ValueError(
                f"concatenated positions need 0 < position_dim < hidden_size, got position_dim={self.position_dim} and "
                f"hidden_size={self.hidden_size}."
            )
        if self.vocab_size is not None and self.input_map != "none":
            raise ValueError(f"`input_map`={self.input_map!r} maps points; a vocabulary has its embedding.")
        token_width = self.hidden_size - self.position_dim
        if self.input_dim is not None and self.input_map == "none" and token_width != self.input_dim:
            raise ValueError(
                f"points of width {self.input_dim} do not fit the residual stream: hidden_size={self.hidden_size} less "
                f"position_dim={self.position_dim} is {token_width}. Change a width, or set input_map='linear'."
            )
        if self.input_map == "none" and self.output_dim is not None and self.output_dim > self.hidden_size:
            raise ValueError(
                f"`output_dim`={self.output_dim} is wider than the stream, hidden_size={self.hidden_size}."
            )


__all__ = ["RankEncoderConfig"]
