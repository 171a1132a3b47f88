"""Second moments of what meets a head on calibration texts, gathered batch by batch; no activation is kept."""

import inspect

import torch

from .calibration import real_keys
from .heads import LinearHeads, Sides
from .weighted import attention_weights, packed_size, paired_moment


class NoActivations(ValueError):
    """Nothing of the calibration reached an attention module."""


def precise(states: torch.Tensor) -> torch.Tensor:
    """float64, on the CPU where the device has none."""
    return states.to("cpu", torch.float64) if states.device.type == "mps" else states.double()


def projected(states: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """States (n, d), with a one for the bias, through the matrices (heads, d + 1, w) of all heads: (heads, n, w)."""
    heads, _, width = side.shape
    joined = side.transpose(0, 1).flatten(1)  # one large product is faster than one per head
    return (
        (torch.nn.functional.pad(precise(states), (0, 1), value=1.0) @ joined).view(-1, heads, width).transpose(0, 1)
    )


def even_weights(visible: torch.Tensor) -> torch.Tensor:
    """Rows (n, m) that spread one evenly over what they see."""
    return visible.double() / visible.sum(-1, keepdim=True)


class LayerMoments:
    """The moments of one attention module, over all its applications: call it with what the module is called with.

    The keys of each row are centred on the keys that the row sees, since softmax ignores what is constant along a row;
    their covariances are summed over rows, and queries are pooled over all texts. `query` is `sum_i x_i x_i^T`, (heads,
    x, x), and `key` is `sum_i Cov_i(y)`, (heads, y, y). With `paired`, the tensor that keeps each query beside the keys
    it meets, weighted by attention, is gathered as well.
    """

    def __init__(self, heads, sides: Sides, scale: float, causal: bool, where: str, paired: bool = False):
        self.heads, self.scale, self.causal, self.where = heads, scale, causal, where
        self.sides = sides
        count, x, y = sides.form.shape
        self.query = torch.zeros(count, x, x, dtype=torch.float64, device=sides.form.device)
        self.key = torch.zeros(count, y, y, dtype=torch.float64, device=sides.form.device)
        self.pairs: torch.Tensor | None = None
        if paired:
            # single precision: at the usual width of heads this is half the size of the model already
            sizes = count, packed_size(x), packed_size(y)
            self.pairs = torch.zeros(sizes, dtype=torch.float32, device=sides.form.device)
        self.rows = 0

    def check(self, states: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(states).all()):
            raise ValueError(
                f"the activations that enter {self.where} hold NaN or Inf on the calibration batches: the moments would be "
                "NaN too. Check the weights, or run the model in float32 or bfloat16."
            )
        return states

    def add_linear(self, states: torch.Tensor, memory: torch.Tensor, batch, cross: bool) -> None:
        """BERT and ALBERT: hidden states (batch, n, d) that ask, and those (batch, m, d) that are asked."""
        rows = real_keys(batch, False, tuple(states.shape[:2]))
        columns = real_keys(batch, cross, tuple(memory.shape[:2]))
        for example in range(len(states)):
            asking, asked = rows[example].nonzero()[:, 0], columns[example].nonzero()[:, 0]
            if not len(asking) or not len(asked):
                continue
            query = projected(self.check(states[example, asking.to(states.device)]), self.sides.query)
            key = projected(self.check(memory[example, asked.to(memory.device)]), self.sides.key)
            key = key - key.mean(1, keepdim=True)
            visible = torch.ones(len(asking), len(asked), dtype=torch.bool, device=key.device)
            if self.causal and not cross:
                visible = (asked <= asking[:, None]).to(key.device)
            self.add_rows(query)
            weights = even_weights(visible).to(key.device)
            mean = weights @ key
            self.key += key.mT @ (weights.sum(0)[:, None] * key) - mean.mT @ mean
            if self.pairs is not None:
                single = query.float(), key.float()
                paired_moment(*single, attention_weights(*single, self.scale, visible), self.pairs)

    def add_relative(
        self, states: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor | None, batch
    ) -> None:
        """XLNet: hidden states (n, batch, d), position codes (p, batch, d) and segment codes (n, n, batch, 2)."""
        length, count = states.shape[:2]
        real = real_keys(batch, False, (count, length))
        width = self.sides.form.shape[1] - 1
        hidden = states.shape[-1]
        content, position, segment = (
            self.sides.key[:, rows, place * width : (place + 1) * width]
            for place, rows in enumerate((slice(hidden), slice(hidden, 2 * hidden), slice(2 * hidden, None)))
        )
        for example in range(count):
            tokens = real[example].nonzero()[:, 0]
            if not len(tokens):
                continue
            inputs = self.check(states[tokens.to(states.device), example])
            self.add_rows(projected(inputs, self.sides.query))
            visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
            if self.causal:
                visible = visible.tril()
            codes = None if segments is None else precise(segments[:, :, example])[tokens][:, tokens]
            # the code of the distance i - j stands at n - i + j
            places = (length - tokens[:, None] + tokens[None, :]).clamp(max=len(positions) - 1)
            moment = entry_moment(even_weights(visible), places, codes, len(positions)).to(inputs.device)
            key = precise(inputs) @ content
            offset = precise(positions[:, example]) @ position
            blocks = (key - key.mean(1, keepdim=True), offset - offset.mean(1, keepdim=True), segment)
            entries = torch.cat(
                [
                    torch.nn.functional.pad(block, (place * width, (2 - place) * width))
                    for place, block in enumerate(blocks)
                ],
                dim=1,
            )
            self.key += entries.mT @ (moment @ entries)

    def add_rows(self, query: torch.Tensor) -> None:
        self.query += query.mT @ query
        self.rows += query.shape[1]

    def __call__(self, module, args, kwargs, batch) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if isinstance(self.heads, LinearHeads):
            memory = given.get("encoder_hidden_states")
            states = given["hidden_states"]
            self.add_linear(states, states if memory is None else memory, batch, memory is not None)
        else:
            self.add_relative(given["h"], given["r"], given["seg_mat"], batch)

    def finish(self) -> "LayerMoments":
        if not self.rows:
            raise NoActivations(
                f"no real token of the calibration reached {self.where}: every mask is zero"
                + (", or the batches have no `encoder_hidden_states`." if "cross" in self.where else ".")
            )
        if not bool((self.key.diagonal(dim1=-2, dim2=-1).sum() > 0).all()):
            raise ValueError(
                f"every row of logits in {self.where} is constant on the calibration batches: give texts of more than one "
                "token each."
            )
        return self


def entry_moment(
    weights: torch.Tensor, places: torch.Tensor, codes: torch.Tensor | None, positions: int
) -> torch.Tensor:
    """How often two of the vectors that make up XLNet's keys meet in one key, centred: (m + positions + 2) squared.

    The key of the pair (i, j) is the content of j, the position `places[i, j]` and a mix `codes[i, j]` of two segments.
    Between those vectors, the moment of all keys needs only these numbers, which no head changes: the weighted sum of
    outer products of the rows that select them, less that of their means in each row i.
    """
    tokens = len(weights)
    by_place = torch.zeros(tokens, positions, dtype=weights.dtype).scatter_add_(1, places, weights)
    mixed = weights[..., None] * (torch.zeros(tokens, tokens, 2) if codes is None else codes.cpu())
    content_place = torch.zeros(tokens, positions, dtype=weights.dtype).scatter_add_(1, places.T, weights.T)
    place_segment = torch.zeros(positions, 2, dtype=weights.dtype).index_add_(0, places.flatten(), mixed.flatten(0, 1))
    content_segment = mixed.sum(0)
    moment = torch.cat(
        [
            torch.cat([weights.sum(0).diag(), content_place, content_segment], dim=1),
            torch.cat([content_place.T, by_place.sum(0).diag(), place_segment], dim=1),
            torch.cat([content_segment.T, place_segment.T, mixed.sum((0, 1)).diag()], dim=1),
        ]
    )
    means = torch.cat([weights, by_place, mixed.sum(1)], dim=1)
    return moment - means.T @ means
