"""The bounds of the theory of rank collapse for each layer of a model, beside the measured values."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..families.architectures import attention_of, family_of, layers_of
from ..families.row import MLP
from ..files.running import Inputs
from ..measure import composite_norm, residual
from ..measure.norms import drop_rows, inf_norm, one_norm, working
from .batches import probing
from .frozen import FrozenAttention, FrozenStep, walk
from .paths import Guard, checked
from .tables import LongTable
from .weights import form_factors, present


SPREAD_LIMIT = 1.2564312086261697  # solves e^D = 1 + 2 D; the published proof needs D below it


def kappa(spread: torch.Tensor) -> torch.Tensor:
    """`(e^D - 1) / D + (e^2D - 1) / 2D`, in float64: 2 at D = 0, 4 at 0.7994, 16 at 1.9733.

    >>> kappa(torch.tensor([0.0, 0.7994, 1.9733]))
    tensor([ 2.0000,  4.0002, 16.0006], dtype=torch.float64)
    """
    spread = spread.double()
    tiny = spread < 1e-12
    safe = spread.masked_fill(tiny, 1)
    return torch.where(tiny, 2, torch.expm1(safe) / safe + torch.expm1(2 * safe) / (2 * safe))


def steepest(activation: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The largest slope of an activation, its Lipschitz constant; infinite where slopes are unbounded."""
    with torch.inference_mode(False), torch.enable_grad():
        points = torch.linspace(-40, 40, 160_001, dtype=torch.float64, requires_grad=True)
        (slopes,) = torch.autograd.grad(activation(points).sum(), points)
    slopes, near = slopes.abs(), points.detach().abs() <= 20
    inside, outside = slopes[near].max().item(), slopes[~near].max().item()
    # between two grid points a smooth slope can be higher by the square of their distance
    return math.inf if outside > 1.01 * inside else max(inside, outside) * (1 + 1e-6)


def lipschitz(mlp: MLP, skip: bool) -> float:
    """A Lipschitz constant in the composite norm of a row-wise MLP, with its skip if it has one."""
    product = steepest(mlp.activation) * (working(mlp.up).abs().t() @ working(mlp.down).abs().t())
    if skip:
        product.diagonal().add_(1)
    return composite_norm(product).item()


def head_norms(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """`||W_QK||_1`, `||W||_1` and `||W||_inf` of every head, (3, heads); factors (h, d, r), (h, d, v) and (h, v, d)."""
    rows = []
    for q, k, v, o in zip(query, key, value, output, strict=True):  # one d x d matrix at a time
        merged = v @ o
        rows.append(torch.stack([one_norm(q @ k.t()), one_norm(merged), inf_norm(merged)]))
    return torch.stack(rows, dim=1)


def logit_spread(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """D, gamma and `||E||_1` of the part E of the logits (batch, n, n) that depends on both tokens; (3, batch).

    D_i is the range of row i and D the largest of them; `gamma = sqrt(sum_i D_i max_i D_i) / (2 ||E||_1)` is the
    smallest number for which the last step of the published proof holds.
    """
    if mask is not None:
        real = mask.bool()
        logits = logits.masked_fill(~(real[:, :, None] & real[:, None, :]), 0)
        hidden = ~real[:, None, :]
        ranges = logits.masked_fill(hidden, -torch.inf).amax(-1) - logits.masked_fill(hidden, torch.inf).amin(-1)
    else:
        ranges = logits.amax(-1) - logits.amin(-1)
    largest = ranges.amax(-1)
    size = one_norm(logits)
    gamma = (ranges.sum(-1) * largest).sqrt() / (2 * size)
    return torch.stack([largest, gamma.nan_to_num(0.0), size])


class Bounds(Guard):
    """Reduces the attention of each layer to the quantities of the theory, and keeps only those."""

    def __init__(self, model: PreTrainedModel, mask: torch.Tensor | None):
        self.model, self.mask, self.family, self.layers = model, mask, family_of(model), layers_of(model)
        self.rows: list[dict[str, torch.Tensor]] = []
        self.notes: list[str] = []

    def step(self, step: FrozenStep, stream: torch.Tensor) -> None:
        self.arrive(stream)
        update = [step.attend(stream)] if isinstance(step, FrozenAttention) else []
        if isinstance(step, FrozenAttention):
            self.attention(step, stream, update[0])
        elif step.name.startswith("mlp"):
            layer, mlp = self.layers[len(self.rows) - 1], self.family.mlp
            with present(layer):
                value = math.nan if mlp is None else lipschitz(mlp.read(layer), step.skip)
            self.rows[-1]["lipschitz"] = torch.full_like(self.rows[-1]["measured"], value)
        self.expect(step, stream, update)

    def not_covered(self, attention: Any) -> str:
        """Why the theory does not cover a layer, or an empty string."""
        if self.family.causal(self.model.config):
            return "a causal mask"
        if self.family.positions is not None:
            return f"{self.family.positions} in the logits"
        if getattr(attention, "log_temperature", None) is not None:
            return "unit-norm queries and keys"
        return "hardmax" if getattr(attention, "hardmax", False) else ""

    def attention(self, step: FrozenAttention, stream: torch.Tensor, update: torch.Tensor) -> None:
        number = len(self.rows)
        layer = self.layers[number]
        attention = attention_of(self.model, layer)
        if not bool(torch.isfinite(drop_rows(stream, self.mask)).all()):
            raise ValueError(f"the states before layer {number} hold NaN or Inf. Check the weights of the model.")
        read = stream if step.before is None else step.before.apply_(stream.clone())
        left = residual(read, self.mask)
        query, key = (working(factor) for factor in form_factors(self.model, number, layer))
        width = step.values.output.shape[1] // step.heads
        value = step.values.value.unflatten(0, (-1, width)).transpose(1, 2)
        value = value.repeat_interleave(step.heads // len(value), dim=0)
        norms = head_norms(query, key, value, step.values.output.unflatten(1, (step.heads, -1)).permute(1, 2, 0))
        scale = self.scale(attention)
        self.notes.append(self.not_covered(attention))
        size = composite_norm(left)
        beta = (norms[0] * (norms[1] * norms[2]).sqrt()).max()
        row = {"residual": size, "measured": self.smallest(update), "beta": torch.full_like(size, beta.item())}
        row["floor"] = 100 * torch.finfo(self.model.dtype).eps * composite_norm(drop_rows(update, self.mask))
        if not self.notes[-1]:
            found = [
                logit_spread((left @ q) @ (left @ k).transpose(1, 2) * scale, self.mask)
                for q, k in zip(query, key, strict=True)
            ]
            row |= self.bounds(left, norms.double(), torch.stack(found, dim=1).double(), scale)
        if step.skip:
            row["skip_measured"] = self.smallest(stream + update)
            if not self.notes[-1]:
                stays = residual(stream, self.mask)
                parts = one_norm(stays) + row["bound_1"], inf_norm(stays) + row["bound_inf"]
                row["skip_bound"] = (parts[0] * parts[1]).sqrt()
        self.rows.append({name: values for name, values in row.items() if name not in ("bound_1", "bound_inf")})

    def scale(self, attention: Any) -> float:
        """The factor on the logits, usually 1 / sqrt(d_qk); NaN where each head has its own."""
        scale = getattr(attention, self.family.scale, None)
        return scale if isinstance(scale, int | float) else math.nan

    def smallest(self, states: torch.Tensor) -> torch.Tensor:
        """The smaller residual of mean and median: the theory bounds the smallest residual over all shared rows."""
        found = [composite_norm(residual(states, self.mask, center)) for center in ("mean", "median")]
        return torch.minimum(*found)

    def bounds(self, left, norms, logits, scale: float) -> dict[str, torch.Tensor]:
        """The bounds of one layer: its residual (batch, n, d), norms (3, heads), [`logit_spread`] (3, heads, batch)."""
        size, heads, (spread, gamma, logit_size) = composite_norm(left).double(), norms.shape[1], logits
        form, in_one, in_inf = norms[..., None]
        beta = (form * (in_one * in_inf).sqrt()).max()
        first_version = 4 * beta * heads * scale * size**3
        weights = form * scale * size**2  # bounds the logits from the weights alone
        tokens = left.shape[1] if self.mask is None else self.mask.bool().sum(-1)
        # a bound of the 1-norm distance of maps from a shared row: a column of n rows can be off by at most n
        nearest = torch.minimum(kappa(spread) * logit_size, torch.as_tensor(tokens).to(size))
        # a sum of heads is bounded in each of the two norms, because the composite norm has no triangle inequality
        one, inf = one_norm(left).double(), inf_norm(left).double()
        repaired = (kappa(spread) * weights * in_one).sum(0) * one, (weights * in_inf).sum(0) * inf
        sharp = (nearest * in_one).sum(0) * one, (2 * torch.tanh(spread / 4) * in_inf).sum(0) * inf
        return {
            "D": spread.amax(0),
            "gamma": gamma.amax(0),
            "kappa": kappa(spread.amax(0)),
            "published_bound": gamma.amax(0) * first_version,
            "published_bound_v1": first_version,
            "repaired_bound": (repaired[0] * repaired[1]).sqrt(),
            "sharp_bound": (sharp[0] * sharp[1]).sqrt(),
            "bound_1": sharp[0],
            "bound_inf": sharp[1],
        }


PROVED = ("published_bound", "published_bound_v1", "repaired_bound", "sharp_bound", "skip_bound")
BOUNDS = ("D", "gamma", "kappa", *PROVED)


def note_of(metric: str, value: float, row: dict[str, float], silent: str) -> str:
    """The caveat of a value, or an empty string."""
    if metric == "measured" and value <= row["floor"]:
        return "rounding: the tokens are equal up to the precision of the model"
    if silent and metric in BOUNDS:
        return f"does not apply: {silent}"
    if metric == "lipschitz" and math.isnan(value):
        return "does not apply: a gated MLP has no Lipschitz constant"
    if metric == "published_bound" and row["D"] > SPREAD_LIMIT:
        return f"does not apply: D is above {SPREAD_LIMIT:.3f}, where its proof ends"
    if metric == "published_bound_v1" and row["kappa"] > 16:
        return "does not apply: kappa is above 16, where it is not true for all layers"
    if metric in PROVED:
        return "" if value < row["residual"] else "vacuous: not below the residual of the input"
    return ""


@probing
def layer_bounds(model: PreTrainedModel, inputs: Inputs) -> pd.DataFrame:
    """The quantities of the theorem on rank collapse for every layer on given inputs, beside the measured values.

    Args:
        model: A model of a family in the table of architectures, whole or under [`ablate`].
        inputs: As in [`measure_collapse`], which has an example.

    X are the states that enter attention, R is their residual, and attention adds `sum_h P_h X W_h` to the stream. Metrics:
    `residual` of X about its mean row, and `measured`, the residual of the sum about its mean or its median, whichever is
    smaller, both in the composite norm; `beta`, the largest `||W_QK||_1 ||W||_{1,inf}` of a head; `D`, the largest range of
    a row of `R W_QK R^T / sqrt(d_qk)`; `gamma` as the published proof needs it; `kappa` of D. Bounds of `measured`:
    `published_bound`, `4 gamma beta H / sqrt(d_qk) ||R||^3`, and `published_bound_v1` with gamma = 1; `repaired_bound`, with
    kappa, which needs no condition on D; `sharp_bound`, the same with the logits instead of the norms of their weights, and
    never above the bound for any row-stochastic maps. Each bound but the second has a `..._looseness`, the bound over the
    measured value. `lipschitz` is the constant of the MLP with its skip: where no norm and no attention skip come between,
    a bound times this constant holds after the MLP. With a skip there are `skip_measured` and `skip_bound`, for the sum of
    stream and update. The factor of the model on its logits is used for `1 / sqrt(d_qk)`.

    Returns a long table with the columns `model, layer, example, metric, value, note`. The note is empty, or says that a
    bound is vacuous (not below the residual of the input), why it does not apply (a causal mask, relative or rotary
    positions, unit-norm queries, hardmax), or that the measured value is rounding; values that do not exist are NaN.
    """
    table = LongTable(model, "layer", "example")
    for batch, mask in table.batches(inputs):
        walker = Bounds(model, mask)
        walker.arrive(working(walk(model, batch, walker).last_hidden_state))
        checked(walker.error, model)
        for layer, (metrics, silent) in enumerate(zip(walker.rows, walker.notes, strict=True)):
            table.rows += layer_rows(metrics, silent, layer, table.offset)
    return table.finish()


def layer_rows(metrics: dict[str, torch.Tensor], silent: str, layer: int, offset: int) -> list[dict]:
    rows = []
    columns = {name: values.cpu().double().tolist() for name, values in metrics.items()}
    columns.setdefault("lipschitz", [1.0] * len(columns["measured"]))  # no MLP is the identity
    if silent:
        columns |= {name: [math.nan] * len(columns["measured"]) for name in BOUNDS if name != "skip_bound"}
    for name in ("published", "repaired", "sharp"):
        pairs = zip(columns[f"{name}_bound"], columns["measured"], strict=True)
        columns[f"{name}_looseness"] = [bound / value if value else math.inf for bound, value in pairs]
    for example in range(len(columns["measured"])):
        row = {name: values[example] for name, values in columns.items()}
        for metric, value in row.items():
            if metric == "floor":
                continue
            labels = {"layer": layer, "example": offset + example, "metric": metric, "value": value}
            rows.append({**labels, "note": note_of(metric, value, row, silent)})
    return rows
