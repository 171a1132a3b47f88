"""RankALBERT configuration: ALBERT with the query-key rank of a head as a field of its own."""

from huggingface_hub.dataclasses import strict
from transformers import AlbertConfig

from ..rank_attention import RankConfigMixin


@strict
class RankAlbertConfig(RankConfigMixin, AlbertConfig):
    r"""
    The layers of a group share their weights, so these four may differ by group, not by layer: a list gives one integer per
    group, and `per_layer_config` has to give all layers of a group the same values.

    >>> from hf_rankattn import RankAlbertConfig
    >>> config = RankAlbertConfig(num_hidden_layers=4, num_hidden_groups=2, qk_rank=[8, 16])
    >>> [config.head_geometry(layer).qk_rank for layer in range(4)]
    [8, 8, 16, 16]
    """

    model_type = "rank_albert"
    stock_model_type = "albert"

    def layers_of_group(self, group_idx: int) -> list[int]:
        """The layers that run with the weights of one group, counted as transformers counts them."""
        layers_per_group = self.num_hidden_layers / self.num_hidden_groups
        return [i for i in range(self.num_hidden_layers) if int(i / layers_per_group) == group_idx]

    def _layers_of_list_entry(self, num_entries: int) -> list[list[int]]:
        if num_entries != self.num_hidden_groups:
            raise ValueError(
                f"a list needs one integer per group, because the layers of a group share their weights: got "
                f"{num_entries} for num_hidden_groups={self.num_hidden_groups}."
            )
        return [self.layers_of_group(group) for group in range(num_entries)]

    def validate_architecture(self):
        super().validate_architecture()
        if not 1 <= self.num_hidden_groups <= max(self.num_hidden_layers, 1):
            raise ValueError(
                f"num_hidden_groups={self.num_hidden_groups} must lie between 1 and "
                f"num_hidden_layers={self.num_hidden_layers}."
            )
        for group in range(self.num_hidden_groups):
            layers = self.layers_of_group(group)
            if len({self.head_geometry(layer) for layer in layers}) > 1:
                raise ValueError(
                    f"layers {layers[0]} to {layers[-1]} are group {group} and share one set of weights, so "
                    "`per_layer_config` cannot give them different heads. Give all layers of the group the same values "
                    "(or a list such as `qk_rank=[8, 16]`, one integer per group), or raise `num_hidden_groups`."
                )


__all__ = ["RankAlbertConfig"]
