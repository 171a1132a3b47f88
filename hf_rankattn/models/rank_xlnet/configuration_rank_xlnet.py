"""RankXLNet configuration: XLNet with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import XLNetConfig

from ..rank_attention import RankConfigMixin


@strict
class RankXLNetConfig(RankConfigMixin, XLNetConfig):
    r"""
    Configuration of a [`RankXLNetModel`]: every field of [`~transformers.XLNetConfig`], and the geometry of the heads.

    Args:
        qk_rank (`int`, *optional*, defaults to `d_model / n_head`):
            Query/key width of each head: the largest rank its bilinear form can have. A list gives one per layer. The
            position keys, the segment embedding and the three biases meet the same query, so they shrink with it.
        v_head_dim (`int`, *optional*, defaults to `d_model / n_head`):
            Value width of each head. When it is given, the heads need not divide the hidden size.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Unit-norm queries, content keys and position keys, with one learned log-temperature per head. The biases,
            which are added to the query, and the segment embedding stay free.
        qk_scale (`float`, *optional*, defaults to `qk_rank ** -0.5`):
            Factor on the logits.

    With all four left alone, the model is stock XLNet to the last bit, under the stock parameter names.

    Example:

    ```python
    >>> from hf_rankattn import RankXLNetConfig, RankXLNetModel

    >>> model = RankXLNetModel(RankXLNetConfig(qk_rank=16, n_layer=2))
    >>> model.layer[0].rel_attn.r.shape
    torch.Size([1024, 16, 16])
    ```"""

    model_type = "rank_xlnet"
    stock_model_type = "xlnet"
    keys_to_ignore_at_inference = ["mems", "hidden_states", "attentions"]

    def __post_init__(self, **kwargs):
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))  # before `d_head` is derived from them
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        super().validate_architecture()
        if self.d_head != self.d_model // self.n_head:
            raise ValueError(
                f"`d_head`={self.d_head} would be ignored: leave it out, and set `qk_rank` for the query/key width of a "
                "head and `v_head_dim` for its value width."
            )


__all__ = ["RankXLNetConfig"]
