"""RankXLNet configuration: XLNet with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import XLNetConfig

from ..rank_attention import RankConfigMixin


@strict
class RankXLNetConfig(RankConfigMixin, XLNetConfig):
    r"""
    The position keys, the segment embedding and the three biases are multiplied with the same query, so they have the width
    `qk_rank`, too. With `qk_norm`, the position keys have unit norm; the biases, which are added to the query, and the segment embedding are
    not normalised.

    >>> from hf_rankattn import RankXLNetConfig, RankXLNetModel
    >>> model = RankXLNetModel(RankXLNetConfig(qk_rank=16, n_layer=2))
    >>> model.layer[0].rel_attn.r.shape
    torch.Size([1024, 16, 16])
    """

    model_type = "rank_xlnet"
    stock_model_type = "xlnet"
    keys_to_ignore_at_inference = ["mems", "hidden_states", "attentions"]

    def validate_architecture(self):
        super().validate_architecture()
        if self.d_head != self.d_model // self.n_head:
            raise ValueError(
                f"`d_head`={self.d_head} would be ignored: leave it out, and set `qk_rank` for the query/key width of a "
                "head and `v_head_dim` for its value width."
            )


__all__ = ["RankXLNetConfig"]
