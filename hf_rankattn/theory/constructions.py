"""The constructions of the theory as models that can be run, saved and loaded.

All are `RankEncoderForPointRegression`. Those for the nearest neighbour read `points` and `queries` as the task
`nearest_neighbor` gives them, those for the farthest neighbour read `points` alone.
"""

import math
from typing import Any

import numpy as np
import torch

from ..models import RankEncoderConfig, RankEncoderForPointRegression
from .heads import optimal_weights, random_heads, spaced_heads
from .inputs import head_weights, positive, unit_heads, whole


def empty_model(**fields) -> RankEncoderForPointRegression:
    """A model without biases in which all weights are zero, except those of norms."""
    config = RankEncoderConfig(attention_bias=False, output_scale=1.0, **fields)
    model: Any = RankEncoderForPointRegression(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
    return model


@torch.no_grad()
def perfect_encoder(
    d: int, num_layers: int = 1, beta: float = 1e12, gain: float = 1e6
) -> RankEncoderForPointRegression:
    """The encoder of the papers, skips, norms and MLPs included, with weights that solve the farthest neighbour.

    Args:
        d (`int`): Dimension of the points.
        num_layers (`int`, *optional*, defaults to 1): Layers after the first pass on what they get.
        beta (`float`, *optional*, defaults to 1e12):
            The logits are -beta x_i.x_j. Points that are almost equally far are told apart only if it is large: the error
            falls like 1 / beta until rounding ends it.
        gain (`float`, *optional*, defaults to 1e6):
            Factor on the point that is found, beside which the skip vanishes when the norm makes their sum a unit vector.

    >>> model = perfect_encoder(8, num_layers=3)
    >>> points = torch.nn.functional.normalize(torch.randn(2, 5, 8), dim=-1)
    >>> farthest = points[torch.arange(2)[:, None], (points @ points.mT).argmin(-1)]
    >>> bool((model(points=points).logits - farthest).norm(dim=-1).max() < 1e-3)
    True
    """
    d, num_layers = whole("d", d, 2), whole("num_layers", num_layers, 1)
    beta, gain = positive("beta", beta), positive("gain", gain)
    if max(beta, gain) > 1e30:
        raise ValueError(f"`beta` and `gain` must fit into single precision, at most 1e30; got {beta} and {gain}.")
    model: Any = empty_model(input_dim=d, num_hidden_layers=num_layers, qk_scale=1.0)
    for name, factor in (("query", -beta), ("key", 1), ("value", 1), ("output", gain)):
        getattr(model.encoder.layers[0].attention, name).weight.copy_(factor * torch.eye(d))
    return model


@torch.no_grad()
def full_rank_head(d: int, beta: float = math.inf, farthest: bool = False) -> RankEncoderForPointRegression:
    """One full-rank head and nothing else: softmax(beta y.x), hard where beta is infinite.

    Args:
        d (`int`): Dimension of the points.
        beta (`float`, *optional*, defaults to infinity): Inverse temperature.
        farthest (`bool`, *optional*, defaults to `False`): Whether to look for the farthest point instead of the nearest.

    On two orthonormal points the error is [`~hf_rankattn.theory.soft_error`], which is zero for an infinite beta.
    """
    d, beta = whole("d", d, 2), positive("beta", beta)
    attention, scale = ("hardmax", 1.0) if math.isinf(beta) else ("softmax", beta)
    model: Any = bare_model(d, 1, qk_rank=d, attention=attention, qk_scale=scale)
    layer = model.encoder.layers[0].attention
    layer.query.weight.copy_((-1 if farthest else 1) * torch.eye(d))
    for part in (layer.key, layer.value, layer.output):
        part.weight.copy_(torch.eye(d))
    return model


def bare_model(d: int, num_heads: int, **fields) -> RankEncoderForPointRegression:
    """One layer of attention with values as wide as the points: no skip, norm or MLP."""
    fields |= {"use_skip": False, "use_mlp": False, "norm": "none"}
    return empty_model(input_dim=d, num_attention_heads=num_heads, v_head_dim=d, **fields)


@torch.no_grad()
def rank_one_layer(queries, keys, weights=None) -> RankEncoderForPointRegression:
    """One layer of hard rank-one heads that add up the points they pick, each times the weight of its head.

    Args:
        queries, keys (`(H, d)` arrays): Unit query and key directions.
        weights (`(H,)` array, *optional*): Weights of the heads; by default the best, of least expected error.

    On two orthonormal points the error is [`~hf_rankattn.theory.expected_error`] of the same arguments.
    """
    queries, keys = unit_heads(queries, keys)
    weights = optimal_weights(queries, keys) if weights is None else head_weights(weights, len(queries))
    count, d = queries.shape
    model: Any = bare_model(d, count, qk_rank=1, attention="hardmax", qk_scale=1.0)
    attention = model.encoder.layers[0].attention
    attention.query.weight.copy_(torch.from_numpy(queries))
    attention.key.weight.copy_(torch.from_numpy(keys))
    attention.value.weight.copy_(torch.eye(d).repeat(count, 1))
    # the weight stands in the output, so that large weights of both signs are summed by one product
    attention.output.weight.copy_(torch.kron(torch.from_numpy(weights)[None], torch.eye(d, dtype=torch.float64)))
    return model


def random_features(d: int, num_heads: int, seed: int, pairing: str = "independent") -> RankEncoderForPointRegression:
    """Random rank-one heads with optimal weights: [`rank_one_layer`] of [`~hf_rankattn.theory.random_heads`].

    >>> random_features(8, 64, seed=0).config.num_attention_heads
    64
    """
    return rank_one_layer(*random_heads(d, num_heads, seed, pairing))


def spaced_layer(num_heads: int, best_scalar: bool = False) -> RankEncoderForPointRegression:
    """Equally spaced heads of the plane, averaged, or times the best number: [`~hf_rankattn.theory.spaced_error`]."""
    queries, keys = spaced_heads(num_heads)
    scalar = 0.75 / (2 / 3 + 1 / (3 * num_heads**2)) if best_scalar else 1.0
    return rank_one_layer(queries, keys, np.full(num_heads, scalar / num_heads))


@torch.no_grad()
def majority_vote(d: int, num_heads: int, seed: int, num_queries: int = 1) -> RankEncoderForPointRegression:
    """Two layers of rank-one heads that find the nearest of two points by a vote, with skips and concatenated positions.

    Args:
        d (`int`): Dimension of the points.
        num_heads (`int`): Number of voters, random heads with q = k; an odd number has no ties.
        seed (`int`): Seed of the voters.
        num_queries (`int`, *optional*, defaults to 1): How many queries a row may have.

    A token is [x ; p ; m ; z]: the point, its name (+1 and -1 for the two points, 0 for queries), the vote and the answer.
    In the first layer each voter adds the name of its choice to m. In the second, heads with the query m and the key p pick
    the elected point and write it to z: one head with values of width d, cut into as many pieces as there are voters, as all
    layers have equally many heads. On two orthonormal points the error, averaged over voters, is
    [`~hf_rankattn.theory.majority_error`].

    >>> majority_vote(16, 161, seed=0).config.position
    'concatenated'
    """
    queries, _ = random_heads(d, num_heads, seed, "equal")
    piece = -(-d // num_heads)
    sizes = {"input_dim": d, "hidden_size": 2 * d + 2, "num_hidden_layers": 2, "num_attention_heads": num_heads}
    heads = {"qk_rank": 1, "v_head_dim": [1, piece], "qk_scale": 1.0, "attention": "hardmax"}
    plain = {"input_map": "linear", "use_mlp": False, "norm": "none"}
    positions = {"position_dim": d + 2, "max_position_embeddings": 2 + whole("num_queries", num_queries, 1)}
    model: Any = empty_model(**sizes, **heads, **plain, position="concatenated", **positions)
    name, vote, answer = d, d + 1, d + 2
    embeddings, (first, second) = model.encoder.embeddings, (layer.attention for layer in model.encoder.layers)
    embeddings.tokens.weight.copy_(torch.eye(d))
    embeddings.position_embeddings[:2, 0] = torch.tensor([1.0, -1.0])
    for part in (first.query, first.key):
        part.weight[:, :d].copy_(torch.from_numpy(queries))
    first.value.weight[:, name] = 1
    first.output.weight[vote] = 1
    used = -(-d // piece)
    second.query.weight[:used, vote] = 1
    second.key.weight[:used, name] = 1
    second.value.weight[:d, :d] = torch.eye(d)
    second.output.weight[answer:, :d] = torch.eye(d)
    model.head.weight[:, answer:] = torch.eye(d)
    return model
