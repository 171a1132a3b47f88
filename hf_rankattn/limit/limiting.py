"""Any model with fewer query-key directions or narrower values, its weights untouched: `limit_rank`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..families.architectures import attending_layers, base_of
from ..families.structure import choosing_tower
from ..files.running import Inputs, batches_of
from ..probe.batches import plain, real_tokens
from ..probe.read_weights import Layout, query_key, read_layouts
from ..probe.read_weights import values as weights_of_values
from ..probe.weights import present
from . import sharing, training
from .attaching import Fitting, entered, run_within
from .damage import KeyHead, Sloping, add_slopes, widths_by_damage
from .fitting import OBJECTIVES, Objective, Seen, fit_keys, fit_values
from .heads import HeadLimits, Widths
from .permanent import permanent
from .ranks import Budget, Request, budgets_of, check_request, widths_of_heads


Progress = Callable[[int, int], Any]


class RankLimit(nn.Module):
    """The projections that limit a model: a [`HeadLimits`] for each layer with attention.

    [`limit_rank`] and [`RankLimit.from_pretrained`] make it. It limits the model until `remove()` is called or a `with` block ends;
    `attach()` puts it back. Its parameters are those of the projections alone.
    """

    model: PreTrainedModel
    attached: ExitStack | None

    def __init__(
        self,
        model: PreTrainedModel,
        heads: Sequence[HeadLimits],
        tower: str | None = None,
        facts: Mapping[str, Any] = {},
    ):
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.tower, self.facts = tower, dict(facts)
        # in `__dict__`, because the model is no part of the limit
        self.__dict__.update(model=model, attached=None)

    def attach(self) -> "RankLimit":
        """Limit the model."""
        if self.attached is None:
            self.__dict__["attached"] = entered(self.model, list(self.heads), self.tower)
        return self

    def remove(self) -> None:
        """Restore the model."""
        if self.attached is not None:
            self.attached.close()  # type: ignore[union-attr,operator]
            self.__dict__["attached"] = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The whole model within the block."""
        attached = self.attached is not None
        self.remove()
        try:
            yield
        finally:
            if attached:
                self.attach()

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write the projections, their widths and a card to a folder, all or nothing."""
        return sharing.save(self, folder, overwrite)

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel, name: str | Path, revision: str | None = None) -> "RankLimit":
        """Limit a model by the projections in a folder or a Hub repository."""
        model = plain(model)
        heads, facts = sharing.read(model, name, revision)
        limit = cls(model, heads, facts["tower"], facts["facts"])
        # an offloaded model is on no device; projections follow the states that they get
        return (limit if model.device.type == "meta" else limit.to(model.device)).attach()

    def push_to_hub(self, repo_id: str, private: bool | None = None, token: bool | str | None = None, **commit) -> str:
        """Upload the limit with its card in one commit; `commit` as in `HfApi.upload_folder`."""
        return sharing.push(self, repo_id, private, token, **commit)

    def distil(
        self,
        batches: Inputs,
        steps: int,
        learning_rate: float = 1e-2,
        seed: int = 0,
        progress: Callable[[int, float], Any] = lambda step, loss: None,
    ) -> "RankLimit":
        """Train the projections alone for `steps` batches towards what the whole model returns.

        That is the distribution of the next token where the model has a vocabulary, else its last hidden states. `learning_rate` is
        relative to the size of each projection. `progress` is called with each step and its loss.
        """
        training.distil(self, batches, steps, learning_rate, seed, progress)
        self.facts["distil_steps"] = self.facts.get("distil_steps", 0) + steps
        return self

    def permanent(self) -> PreTrainedModel:
        """A model with narrower weights in place of the projections, of the families that [`convert_rank`] takes."""
        return permanent(self)

    def __enter__(self) -> "RankLimit":
        return self.attach()

    def __exit__(self, *error: object) -> None:
        self.remove()


@torch.inference_mode(False)  # fits take gradients, and caches ask projections for their versions
def limit_rank(
    model: PreTrainedModel,
    qk_rank: Request = None,
    v_head_dim: Request = None,
    *,
    calibration: Inputs,
    mean_rank: Budget = None,
    objective: Objective = "attention",
    tower: str | None = None,
    seed: int = 0,
    applied: bool = True,
    progress: Progress = lambda layer, layers: None,
) -> RankLimit:
    """Limit the query-key rank of a model, the width of its values, or both. Its weights do not change.

    Args:
        model: A model of any type whose attention uses transformers' attention interface.
        qk_rank (`int` or list, *optional*):
            The number of directions that each head keeps of its queries and keys: one number, a list with one for each layer with
            attention, or with a list for each of its key heads. They are projected after norms and rotary positions. `"auto"`
            spreads `mean_rank` over layers and key heads.
        v_head_dim (`int` or list, *optional*): The same for values, which are projected before attention mixes them.
        calibration: A batch, a list of batches or a DataLoader. All batches run as one.
        mean_rank (`float`, or two, *optional*):
            The mean width of all key heads where a width is `"auto"`. If both are, two numbers are two budgets, for queries and keys and
            for values, and one number is shared. Widths are chosen by what
            narrower heads do to the output of the model, to first order, which takes one more forward and one backward pass.
        objective (`str`, *optional*, defaults to `"attention"`):
            What is minimised for queries and keys: `"attention"` weights the change of each logit by the attention that it gets,
            `"logits"` weights all alike and has a closed form. Two others are baselines: `"components"` takes the principal
            components of keys and of values, and `"weights"` ignores the texts.
        tower (`str`, *optional*): One side of a model with several, as in [`measure_collapse`].
        seed (`int`, *optional*, defaults to 0): Determines which rows of the calibration the descent reads.
        applied (`bool`, *optional*, defaults to `True`):
            Limit each layer before the next one is fitted, and the model afterwards. If `False`, each layer is fitted to what reaches it in
            the whole model, and the model stays whole until `attach()` is called.
        progress (*optional*): Called with the number of layers that are fitted, and their number in all.

    The layers are fitted in their order, each on what reaches it through those that are limited already, in one forward pass.
    Key heads that several query heads share have one basis, fitted to all of these queries. A layer with the full width of both kinds runs as it
    is.

    Returns a [`RankLimit`], which is a context manager and a handle.

    Example:

    ```python
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> from hf_rankattn import limit_rank

    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)).eval()
    >>> batch = {"input_ids": torch.randint(50, (2, 16))}
    >>> whole = model(**batch).last_hidden_state
    >>> with limit_rank(model, qk_rank=2, calibration=batch):
    ...     limited = model(**batch).last_hidden_state
    >>> torch.equal(limited, whole), torch.equal(model(**batch).last_hidden_state, whole)
    (False, True)
    ```
    """
    model = plain(model)
    if objective not in OBJECTIVES:
        raise ValueError(f"`objective` must be one of {', '.join(OBJECTIVES)}, got {objective!r}.")
    if qk_rank is None and v_head_dim is None:
        raise ValueError(
            "give `qk_rank`, `v_head_dim` or both: a width, or a list with one for each layer with attention."
        )
    with choosing_tower(tower):
        numbers = attending_layers(model)
        for name, request in (("qk_rank", qk_rank), ("v_head_dim", v_head_dim)):
            check_request(name, request, len(numbers))
        batch = merged(model, calibration)
        real = real_tokens(model, batch)
        budgets = budgets_of(qk_rank, v_head_dim, mean_rank)
        if any(budgets):
            keys, values = chosen_widths(model, batch, real, budgets, tower, seed)
            qk_rank, v_head_dim = keys or qk_rank, values or v_head_dim
        layouts = (
            layouts_of(model, batch, needed=objective == "weights")
            if v_head_dim is not None or objective == "weights"
            else {}
        )

        def fit(place: int, seen: Seen) -> HeadLimits:
            found = fitted(place, seen, (qk_rank, v_head_dim), layouts.get(numbers[place]), objective, seed)
            progress(place + 1, len(numbers))
            return found

        fittings = [Fitting(place, fit, real, applied) for place in range(len(numbers))]
        run_within(model, fittings, batch, tower)
    facts = {"objective": objective, "calibration_tokens": fittings[0].tokens, "seed": seed}
    limit = RankLimit(model, [fitting.limit for fitting in fittings], tower, facts)
    return limit.attach() if applied else limit


def chosen_widths(
    model: PreTrainedModel,
    batch: Mapping[str, torch.Tensor],
    real: torch.Tensor | None,
    budgets: tuple[float | None, float | None, float | None],
    tower: str | None,
    seed: int,
) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    """The widths that the budget gives to each key head where "auto" is asked for."""
    slopings = slopings_of(model, batch, real, tower)
    keys, values = max(one.widths.qk for one in slopings), max(one.widths.value for one in slopings)
    for budget, most in zip(budgets, (keys, values, max(keys, values)), strict=True):
        if budget is not None and budget > most:
            raise ValueError(
                f"`mean_rank` is {budget}, and the heads have the width {most}: a limit must be at most that."
            )
    with entered(model, slopings, tower):
        add_slopes(model, slopings, batch, seed)
    return widths_by_damage([one.key_heads for one in slopings], budgets)


def slopings_of(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], real: torch.Tensor | None, tower: str | None = None
) -> list[Sloping]:
    """The key heads of each layer, fitted to the whole model, ready for the slopes of a loss."""
    numbers, layouts = attending_layers(model), layouts_of(model, batch, needed=False)
    found: list[Sloping] = []

    def factor(place: int, seen: Seen) -> HeadLimits:
        rows = value_weights(place, layouts.get(numbers[place]), seen.widths)[0]
        heads = [
            KeyHead(seen, group, None if rows is None else rows[seen.heads_of(group)]) for group in range(seen.groups)
        ]
        found.append(Sloping(seen.widths, heads))
        return HeadLimits.unlimited(seen.widths)

    run_within(model, [Fitting(place, factor, real) for place in range(len(numbers))], batch, tower)
    return found


def fitted(
    place: int,
    seen: Seen,
    requests: tuple[Request, Request],
    layout: Layout | None,
    objective: Objective,
    seed: int,
) -> HeadLimits:
    """The projections of one layer, at the place that it has among the layers with attention."""
    widths = seen.widths
    key_ranks = widths_of_heads("qk_rank", requests[0], place, widths.groups, widths.qk)
    value_widths = widths_of_heads("v_head_dim", requests[1], place, widths.groups, widths.value)
    keys = values = None
    pairs: list[Any] = [None] * widths.groups
    if set(key_ranks) != {widths.qk}:
        queries_keys = query_key(place, layout) if objective == "weights" and layout is not None else None
        for group, rank in enumerate(key_ranks):
            own = (
                None
                if queries_keys is None
                else (queries_keys[0][seen.heads_of(group)], queries_keys[1][seen.heads_of(group)])
            )
            pairs[group] = fit_keys(seen, group, rank, objective, seed, own)
        keys = joined([pair[0] for pair in pairs]), stacked([pair[1] for pair in pairs])
    if set(value_widths) != {widths.value}:
        output, read = value_weights(place, layout, widths)
        if read is None and objective == "weights":
            raise ValueError(f"the weights of the values of layer {place} cannot be read: choose another objective.")
        found = []
        for group, width in enumerate(value_widths):
            own_output = None if output is None else output[seen.heads_of(group)]
            own_read = None if read is None else read[group]
            found.append(fit_values(seen, group, width, objective, own_output, pairs[group], own_read))
        values = stacked([basis for basis, _ in found]), joined([back.mT for _, back in found]).mT
    return HeadLimits(widths, key_ranks, value_widths, keys, values).to(seen.query.device)


def stacked(bases: list[torch.Tensor]) -> torch.Tensor:
    """Matrices (..., w, r) of different ranks as one tensor, with zeros behind the smaller ones."""
    most = max(basis.shape[-1] for basis in bases)
    return torch.stack([nn.functional.pad(basis, (0, most - basis.shape[-1])) for basis in bases])


def joined(bases: list[torch.Tensor]) -> torch.Tensor:
    """The matrices (heads of a group, w, r) of all groups, (heads, w, r)."""
    return stacked(bases).flatten(0, 1).contiguous()


def layouts_of(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], needed: bool) -> dict[int, Layout]:
    """Where the weights of each layer are; empty for a model that does not run on numbers of rows, unless they are `needed`."""
    try:
        return read_layouts(model, dict(batch))
    except ValueError:
        if needed:
            raise
        return {}


def value_weights(
    place: int, layout: Layout | None, widths: Widths
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The rows (heads, d, v) by which heads write, and the weights (groups, hidden, v) of values; None where something else is
    between, such as a norm or a gate."""
    if layout is None or layout.output is None:
        return None, None
    with ExitStack() as stack:
        for module in dict.fromkeys([*layout.first, layout.output[0]]):
            stack.enter_context(present(module))
        try:
            found = weights_of_values(place, layout)
        except ValueError:
            return None, None
    output = found.output.detach().float().unflatten(1, (widths.heads, -1)).transpose(0, 1)
    return output, found.value.detach().float().unflatten(0, (widths.groups, -1)).mT


def merged(model: PreTrainedModel, calibration: Inputs) -> dict[str, torch.Tensor]:
    """All batches as one, padded to the longest: each layer is fitted to all texts at once."""
    batches = list(batches_of(base_of(model), calibration))
    if len(batches) == 1:
        return batches[0]
    names = set(batches[0])
    if (
        strange := sorted(names.symmetric_difference(*batches[1:]))
        if any(set(batch) != names for batch in batches)
        else []
    ):
        raise ValueError(
            f"the calibration batches must have the same entries, and {', '.join(strange)} are not in all of them."
        )
    if (
        "input_ids" in names
        and "attention_mask" not in names
        and len({batch["input_ids"].shape[1] for batch in batches}) > 1
    ):
        batches = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]
    if "decoder_input_ids" in names and "decoder_attention_mask" not in names:
        batches = [
            {**batch, "decoder_attention_mask": torch.ones_like(batch["decoder_input_ids"])} for batch in batches
        ]
    if "position_ids" in names:
        raise ValueError(
            "the calibration batches run as one, and `position_ids` belong to one batch: leave them out, or give one batch."
        )
    found = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        if tensors[0].ndim == 2 and not tensors[0].is_floating_point():
            most = max(tensor.shape[1] for tensor in tensors)
            tensors = [nn.functional.pad(tensor, (0, most - tensor.shape[1])) for tensor in tensors]
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:3])
            raise ValueError(
                f"the calibration batches run as one, and their `{name}` have other shapes: {shapes}. Give one batch."
            )
        found[name] = torch.cat(tensors)
    return found
