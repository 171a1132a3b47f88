"""The projections of one attention module, fitted to what the module gets on calibration texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..convert.factors import best_factors, root_of_moment, shared_factors, with_prior
from ..families.projections import QueryKey
from ..measure.threads import one_thread
from .heads import Widths


Objective = Literal["attention", "logits", "components", "weights"]
OBJECTIVES = ("attention", "logits", "components", "weights")
# the share of even weights under "attention": on other texts attention is on other keys
EVEN = 0.3
# rows of each text that the descent reads, and its steps
ROWS, STEPS = 128, 25
VALUE_ROUNDS = 60


@dataclass
class Seen:
    """What one attention module gets: queries (texts, heads, n, w), keys and values (texts, groups, n, ...), all in float32.

    `bias` (texts or 1, heads or 1, n, n) is added to the logits and is -inf where a token sees no key; `real` (texts, n) marks
    the tokens that are not padding.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    bias: torch.Tensor
    real: torch.Tensor
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # one logit for each head, of a key without a value

    @classmethod
    def of_call(
        cls,
        module: Any,
        query,
        key,
        value,
        mask,
        scaling: float,
        options: Mapping[str, Any],
        real: torch.Tensor | None,
    ) -> "Seen":
        texts, heads, n, _ = query.shape
        if key.shape[2] != n:
            raise ValueError(
                f"{type(module).__name__} has {n} queries and {key.shape[2]} keys on the calibration batch: only self-attention without "
                "a cache is limited."
            )
        if heads % key.shape[1]:
            raise ValueError(
                f"{type(module).__name__} has {heads} heads and {key.shape[1]} key heads, which do not divide them."
            )
        if real is None:
            real = torch.ones(texts, n, dtype=torch.bool, device=query.device)
        if tuple(real.shape) != (texts, n):
            raise ValueError(
                f"{type(module).__name__} attends in parts of {texts} x {n} tokens, and the batch has {tuple(real.shape)}: attention within "
                "windows of images is not limited."
            )
        if not all(bool(torch.isfinite(states).all()) for states in (query, key, value)):
            raise ValueError(
                f"the queries, keys or values of {type(module).__name__} hold NaN or Inf on the calibration batch. Check the weights, or "
                "run the model in float32 or bfloat16."
            )
        states = (query.float(), key.float(), value.float())
        return cls(
            *states,
            scaling,
            bias_of(module, mask, n, query.device, options),
            real.bool(),
            options.get("softcap"),
            None if options.get("s_aux") is None else options["s_aux"].float(),
        )

    @property
    def widths(self) -> Widths:
        return Widths(self.query.shape[1], self.groups, self.query.shape[-1], self.value.shape[-1])

    @property
    def groups(self) -> int:
        return self.key.shape[1]

    @property
    def shared(self) -> int:
        """The number of heads that share a key head."""
        return self.query.shape[1] // self.groups

    def heads_of(self, group: int) -> slice:
        return slice(group * self.shared, (group + 1) * self.shared)

    def bias_of(self, text: int, group: int) -> torch.Tensor:
        bias = self.bias[text if len(self.bias) > 1 else 0]
        return bias[self.heads_of(group)] if len(bias) > 1 else bias

    def maps(self, text: int, group: int, query: torch.Tensor | None = None, key: torch.Tensor | None = None):
        """The attention (heads of the group, n, n) of one text, 0 in rows of padding; `query` and `key` may be narrower."""
        query = self.query[text, self.heads_of(group)] if query is None else query
        key = self.key[text, group] if key is None else key
        logits = query @ key.mT * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        logits = logits + self.bias_of(text, group)
        if self.sinks is not None:
            sinks = self.sinks[self.heads_of(group)].view(-1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sinks], dim=-1)
        return logits.softmax(-1).nan_to_num()[..., : key.shape[-2]] * self.real[text][:, None]

    def weights(self, text: int, group: int, even: float) -> torch.Tensor:
        """The maps, mixed with equal weights over the keys that each row sees."""
        visible = (self.bias_of(text, group) > -torch.inf) & self.real[text] & self.real[text][:, None]
        equal = visible / visible.sum(-1, keepdim=True).clamp(min=1)
        return (1 - even) * self.maps(text, group) + even * equal


def bias_of(module: Any, mask: torch.Tensor | None, n: int, device, options: Mapping[str, Any]) -> torch.Tensor:
    """What a mask and position terms add to the logits, as floats with -inf."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    bias = torch.zeros(1, 1, n, n, device=device)
    if mask is None:
        if causal:
            bias = bias.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=device).tril(), -torch.inf)
    elif not isinstance(mask, torch.Tensor) or mask.ndim != 4:  # flex attention, flash attention
        raise ValueError(
            f"{type(module).__name__} gives its attention a {type(mask).__name__} of shape {tuple(mask.shape)} as its mask: load the model with "
            "attn_implementation='sdpa' or 'eager' to limit it."
        )
    elif mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask[..., :n], -torch.inf)
    else:
        mask = mask[..., :n].float()
        bias = mask.masked_fill(mask < -1e4, -torch.inf)  # the smallest number of float16 is -65504
    position = options.get("position_bias")
    return bias if position is None else bias + position.float()


def moments_of_logits(seen: Seen, group: int, even: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The second moment of the queries of a group, and the covariances of its keys under each row's weights, summed."""
    width = seen.key.shape[-1]
    query = torch.zeros(width, width, dtype=torch.float64, device=seen.key.device)
    key = torch.zeros_like(query)
    for text in range(len(seen.query)):
        asking = seen.query[text, seen.heads_of(group)][:, seen.real[text]].flatten(0, 1)
        query += (asking.mT @ asking).double()
        weights, keys = seen.weights(text, group, even), seen.key[text, group]
        keys = keys - keys[seen.real[text]].mean(0)  # less cancellation
        means = (weights @ keys).flatten(0, 1)
        key += (keys.mT @ (weights.sum((0, 1))[:, None] * keys) - means.mT @ means).double()
    return query, key


def components(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """The first principal components (w, rank) of rows (n, w), whose mean is not removed."""
    moment = (rows.mT @ rows).double()
    with one_thread(moment):
        return torch.linalg.eigh(moment).eigenvectors[:, -rank:].float()


def fit_keys(
    seen: Seen, group: int, rank: int, objective: Objective, seed: int, weights: QueryKey | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries' projections (heads of the group, w, rank) and the basis (w, rank) of the keys of one key head.

    `weights` are those of the heads of the group, (heads, hidden, w) each, for the objective "weights".
    """
    if objective == "components":
        basis = components(seen.key[:, group][seen.real], rank)
        return basis.expand(seen.shared, -1, -1), basis
    if objective == "weights":
        assert weights is not None
        query, key = weights[0].double().flatten(0, 1), weights[1][0].double()
        moments = query.mT @ query, key.mT @ key
    else:
        moments = moments_of_logits(seen, group, EVEN if objective == "attention" else 1.0)
    eye = torch.eye(seen.key.shape[-1], dtype=torch.float64, device=seen.key.device)[None]
    query_root, key_root = (root_of_moment(with_prior(moment.to(eye)[None], eye)) for moment in moments)
    best = best_factors(query_root, key_root, eye, rank)
    query, key = best.query[0].float(), best.key[0].float()
    queries = query.expand(seen.shared, -1, -1)
    if objective == "attention":
        queries, key = descend(seen, group, query, key, [query_root[0], key_root[0]], seed)
    # an orthonormal basis of the same keys: a cache in half precision loses least
    with one_thread(key):
        basis, triangle = torch.linalg.qr(key.double())
    return (queries.double() @ triangle.mT).float(), basis.float()


def descend(
    seen: Seen, group: int, query: torch.Tensor, key: torch.Tensor, roots: list[torch.Tensor], seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower the error of the logits of single rows, weighted by their attention, from the closed form for pooled rows.

    The error of a row is the variance of the change of its logits under its weights, since softmax ignores a constant along a
    row. It is lowered with L-BFGS in coordinates in which both pooled moments are the identity, on `ROWS` rows of each text.
    Each head of the group gets its own projection of queries; the basis of the keys is shared.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for text in range(len(seen.query)):
        rows = seen.real[text].nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)[:ROWS].to(rows.device)].sort().values
        asking = seen.query[text, seen.heads_of(group)][:, rows]
        keys = seen.key[text, group]
        texts.append((asking, keys, seen.weights(text, group, EVEN)[:, rows], asking @ keys.mT))
    to_query, to_key = (torch.linalg.pinv(root.mT).float() for root in roots)
    start = [root.mT.float() @ side for root, side in zip(roots, (query, key), strict=True)]
    left = start[0].expand(seen.shared, -1, -1).clone().requires_grad_()
    right = start[1].clone().requires_grad_()
    size = 0.0

    def error() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=key.device)
        with torch.enable_grad():
            ours, theirs = to_query @ left, to_key @ right
            for asking, keys, weights, logits in texts:
                change = ((asking @ ours) @ (keys @ theirs).mT - logits) * seen.scale
                weighted = weights * change
                total = total + (weighted * change).sum() - weighted.sum(-1).square().sum()
            total = total / size if size else total
            total.backward()
        return total.detach()

    optimizer = torch.optim.LBFGS(
        [left, right],
        max_iter=STEPS,
        history_size=10,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=1e-9,
    )
    size = max(float(error()), torch.finfo(torch.float32).tiny)
    optimizer.step(error)
    if not float(error()) <= 1:  # NaN too
        return query.expand(seen.shared, -1, -1), key
    return (to_query @ left).detach(), (to_key @ right).detach()


def fit_values(
    seen: Seen,
    group: int,
    width: int,
    objective: Objective,
    output: torch.Tensor | None,
    keys: tuple[torch.Tensor, torch.Tensor] | None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The basis (v, width) of the values of one key head, and the way back (heads of the group, width, v) of its heads.

    They minimise the squared error of what the heads write, for the rows `output` (heads of the group, d, v) of the output
    projection. `keys` are the projections of its queries and keys: values are mixed by the maps of the limited model. For the
    objective "weights" the values are those of isotropic states through `weights` (hidden, v).
    """
    v, device = seen.value.shape[-1], seen.value.device
    if objective == "components":
        basis = components(seen.value[:, group][seen.real], width)
        return basis, basis.mT.expand(seen.shared, -1, -1)
    moment = torch.zeros(seen.shared, v, v, dtype=torch.float64, device=device)
    if objective == "weights":
        assert weights is not None
        moment += (weights.mT @ weights).to(moment)
    else:
        for text in range(len(seen.query)):
            narrow: tuple[torch.Tensor, ...] = ()
            if keys is not None:
                narrow = (seen.query[text, seen.heads_of(group)] @ keys[0], seen.key[text, group] @ keys[1])
            mixed = seen.maps(text, group, *narrow) @ seen.value[text, group]
            moment += (mixed.mT @ mixed).double()
    eye = torch.eye(v, dtype=torch.float64, device=device).expand(seen.shared, -1, -1)
    roots = root_of_moment(with_prior(moment, eye))
    with one_thread(moment):
        rows = eye if output is None else torch.linalg.qr(output.to(moment), mode="r").R
    if seen.shared == 1:
        best = best_factors(roots, root_of_moment(rows.mT @ rows), eye[:1], width)
        value = torch.linalg.qr(best.query[0]).Q
    else:
        value = shared_factors(roots.cpu(), rows.cpu(), width, rounds=VALUE_ROUNDS)[0].to(moment)
    with one_thread(value):
        back = torch.linalg.lstsq((roots.mT @ value).cpu(), roots.mT.cpu(), driver="gelsd").solution
    return value.float(), back.to(device).float()
