"""Which rows of which weights a head reads and writes with, found by sending numbers of rows through the layers.

Layers keep queries, keys and values in one matrix or in three, by head or by kind, through latents or not. Here each linear
module of an attention module returns the numbers of its rows in place of its output. Attention then gets the number of a row in
every place of its queries, keys and values, whatever reshaped them in between. Norms pass their input, and the first token has
no rotation. Attention returns the numbers of its own outputs, which the output projection gets as its columns.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..families.architectures import attention_of, base_of, layers_of
from ..families.projections import QueryKey, Values
from ..families.stream import is_norm, tensors_in
from ..files.running import evaluating
from .batches import first_example, run
from .interface import Attended, showing_layers


LINEAR = (nn.Linear, Conv1D)
PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm"}


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of a linear module as (out, in)."""
    return module.weight.t() if isinstance(module, Conv1D) else module.weight  # type: ignore[return-value,operator]


@dataclass
class Layout:
    """The numbers of the rows of one layer: query (heads, r), key and value (groups, r), output (heads * v)."""

    first: dict[nn.Module, int] = field(default_factory=dict)
    # the numbers that a linear module got as its input, if it follows others, and the gain of a norm between
    inputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    gains: dict[int, float] = field(default_factory=dict)
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    output: tuple[nn.Module, torch.Tensor] | None = None

    def matrix(self, numbers: torch.Tensor) -> torch.Tensor:
        """The rows (..., in) with these numbers, multiplied through the linear modules before them."""
        ends = {module: first + len(weight_of(module)) for module, first in self.first.items()}
        rows = []
        for number in numbers.flatten().tolist():
            module = next((module for module, first in self.first.items() if first <= number < ends[module]), None)
            if module is None:
                raise ValueError(
                    "a layer gets keys or values from another layer: its weights cannot be read from it alone."
                )
            rows.append((module, number - self.first[module]))
        found: dict[nn.Module, torch.Tensor] = {}
        for module in dict.fromkeys(module for module, _ in rows):
            weight = weight_of(module).detach()
            if (before := self.inputs.get(module)) is not None:
                gain = torch.tensor([self.gains.get(number, 1.0) for number in before.tolist()]).to(weight)
                weight = (weight * gain) @ self.matrix(before).to(weight)
            found[module] = weight
        return torch.stack([found[module][row] for module, row in rows]).unflatten(0, numbers.shape)


class Products(TorchFunctionMode):
    """Finds queries, keys and values in the products of an attention module that does not call the interface."""

    def __init__(self, reader: "Reader"):
        super().__init__()
        self.reader = reader

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        layout, given = self.reader.running, list(tensors_in([*args, *kwargs.values()]))[-2:]
        # half precision has no room for the numbers
        numbered = [tensor.dtype in (torch.float32, torch.float64) and tensor.ndim in (3, 4) for tensor in given]
        product = getattr(func, "__name__", "") in PRODUCTS and len(given) == 2
        if not product or layout is None or self.reader.attended is not None or not all(numbered):
            return func(*args, **kwargs)
        if layout.query is None:
            self.reader.keep("query", by_head(given[0]), given[0].shape[-1])
            self.reader.keep("key", by_head(given[1].mT), given[0].shape[-1])
            if layout.query is None:
                return func(*args, **kwargs)
            return given[0].new_zeros(*given[0].shape[:-1], given[1].shape[-1], dtype=self.reader.dtype)
        values = by_head(given[1])
        self.reader.keep("value", values, values.shape[-1])
        if layout.value is None:
            return func(*args, **kwargs)
        shape = (*given[0].shape[:-1], given[1].shape[-1])
        heads = shape[1] if len(shape) == 4 else shape[0]
        return self.reader.outputs(heads, shape[-1]).unsqueeze(-2).to(given[0].device).expand(shape)


def by_head(numbers: torch.Tensor) -> torch.Tensor:
    """(batch, heads, n, r) from this shape or from (batch * heads, n, r), for a batch of one."""
    return numbers if numbers.ndim == 4 else numbers[None]


class Reader:
    """Sends the numbers of rows through one forward pass, and keeps the layout of each layer."""

    def __init__(self, model: PreTrainedModel, stack: ExitStack):
        self.layouts: dict[int, Layout] = {}
        self.inside: set[nn.Module] = set()
        self.layer, self.dtype = -1, model.dtype
        self.running: Layout | None = None
        self.attended: torch.Tensor | None = None
        self.products: Products | None = None
        stack.callback(self.leave_attention, None, None, None)  # Ctrl-C leaves a module without its hooks
        for layer in dict.fromkeys(layers_of(model)):
            stack.callback(layer.register_forward_pre_hook(self.enter).remove)
            if (attention := attention_of(model, layer)) is None:
                continue
            stack.callback(attention.register_forward_pre_hook(self.enter_attention).remove)
            stack.callback(attention.register_forward_hook(self.leave_attention, always_call=True).remove)
            for module in layer.modules():
                if isinstance(module, LINEAR):
                    stack.callback(module.register_forward_pre_hook(self.before_linear).remove)
                    stack.callback(module.register_forward_hook(self.after_linear).remove)
            self.inside |= set(attention.modules())
            for module in filter(is_norm, attention.modules()):
                stack.callback(module.register_forward_hook(self.after_norm).remove)

    def enter(self, layer, args) -> None:
        self.layer += 1
        self.running, self.attended = Layout(), None
        self.layouts[self.layer] = self.running

    def enter_attention(self, module, args) -> None:
        self.products = Products(self)
        self.products.__enter__()

    def leave_attention(self, module, args, output) -> None:
        if self.products is not None:
            self.products.__exit__(None, None, None)
            self.products = None

    def before_linear(self, module, args) -> tuple | None:
        layout = self.running
        assert layout is not None
        row = args[0].reshape(-1, args[0].shape[-1])[0].detach()
        if args[0].dtype != torch.float64:
            return None
        if self.attended is None and whole(row):
            layout.inputs[module] = row.long()
        elif self.attended is not None and layout.output is None and is_order(row, len(self.attended)):
            layout.output = module, row.long() - 1
        return (args[0].to(module.weight.dtype), *args[1:])

    def after_linear(self, module, args, output) -> torch.Tensor | None:
        layout = self.running
        assert layout is not None
        if layout.output is not None and module is layout.output[0]:
            return torch.zeros_like(output)
        if self.attended is not None or module not in self.inside:
            return None
        first = 1 + sum(len(weight_of(other)) for other in layout.first)
        layout.first.setdefault(module, first)
        numbers = layout.first[module] + torch.arange(output.shape[-1], dtype=torch.float64, device=output.device)
        return numbers.expand_as(output)

    def after_norm(self, module, args, output) -> torch.Tensor:
        assert self.running is not None
        row = args[0].reshape(-1, args[0].shape[-1])[0]
        if args[0].dtype == torch.float64 and whole(row):
            # a norm without mean returns its gain for a row of ones
            if (weight := getattr(module, "weight", None)) is not None:
                gain = module.forward(torch.ones_like(row, dtype=weight.dtype)[None])[0].detach()
                self.running.gains |= dict(zip(row.long().tolist(), gain.tolist(), strict=True))
        return args[0]

    def look(self, layer: int, seen: Attended) -> torch.Tensor:
        width = seen.query.shape[-1]
        # fewer keys than queries are made of other states than those of the tokens
        names = ("query", "key", "value") if seen.key.shape[-2] == seen.query.shape[-2] else ("query",)
        for name in names:
            self.keep(name, getattr(seen, name), width)
        batch, heads, n, _ = seen.query.shape
        numbers = self.outputs(heads, seen.value.shape[-1]).to(seen.query.device)
        return numbers.expand(batch, n, *numbers.shape)

    def keep(self, name: str, states: torch.Tensor, width: int) -> None:
        """Keep the numbers in queries, keys or values (batch, heads, n, r) if they are whole up to a factor."""
        assert self.running is not None
        numbers = states[0, :, 0].double()
        factor = next((factor for factor in scales(name, width) if whole(numbers / factor)), None)
        if factor is not None:
            setattr(self.running, name, (numbers / factor).round().long())

    def outputs(self, heads: int, width: int) -> torch.Tensor:
        """The numbers (heads, v) that attention returns."""
        self.attended = 1 + torch.arange(heads * width, dtype=torch.float64)
        return self.attended.view(heads, width)


def scales(name: str, width: int) -> list[float]:
    """Factors that a layer may have put on its queries before its products."""
    return [1.0, width**-0.5, width**-0.25, width**0.5] if name == "query" else [1.0, width**-0.25]


def whole(numbers: torch.Tensor) -> bool:
    near = numbers.round()
    return bool(((numbers - near).abs() < 1e-3).all() & (near >= 1).all())


def is_order(row: torch.Tensor, count: int) -> bool:
    """Whether a row holds the numbers from 1 to `count` in some order."""
    return len(row) == count and row.double().sort().values.tolist() == list(range(1, count + 1))


def read_layouts(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> dict[int, Layout]:
    """The layout of every layer with attention, from one forward pass on the first example of a batch."""
    with evaluating(base_of(model)), ExitStack() as stack:
        reader = Reader(model, stack)
        stack.enter_context(showing_layers(model, reader.look, "none"))
        try:
            run(model, first_example(batch))
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"the weights of layer {reader.layer} were not found, because {type(model).__name__} does not run on numbers of "
                f"rows: {error}"
            ) from error
    return reader.layouts


def query_key(layer: int, layout: Layout) -> QueryKey:
    """W_Q and W_K of every head, each (heads, hidden, width); a `ValueError` if they were not found."""
    if layout.query is None or layout.key is None:
        raise ValueError(
            f"the query and key weights of layer {layer} were not found: something other than linear maps, norms and rotations "
            "is between the states and its attention."
        )
    queries, keys = layout.matrix(layout.query).mT, layout.matrix(layout.key).mT
    return queries, keys.repeat_interleave(len(queries) // len(keys), dim=0)


def values(layer: int, layout: Layout) -> Values:
    """The value and output weights, as in [`Values`]; a `ValueError` if they were not found."""
    if layout.value is None or layout.output is None:
        raise ValueError(
            f"the value and output weights of layer {layer} were not found: something other than linear maps is between the "
            "states, the maps and the stream, such as a gate."
        )
    read = [
        numbers for numbers in (layout.query, layout.key, layout.value, *layout.inputs.values()) if numbers is not None
    ]
    rows = sum(len(weight_of(module)) for module in layout.first)
    if len(torch.cat([numbers.flatten() for numbers in read]).unique()) < rows:
        # the number of a row is so large that a sigmoid of it is one, so a gate cannot be seen in the outputs
        raise ValueError(
            f"the output weights of layer {layer} are not all that it writes with: some rows of its linear maps are neither queries "
            "nor keys nor values, such as those of a gate."
        )
    module, columns = layout.output
    return Values(layout.matrix(layout.value.flatten()), None, weight_of(module).detach()[:, columns.argsort()], None)
