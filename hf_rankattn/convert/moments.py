"""Second moments of the queries and keys of a head on calibration texts, gathered batch by batch."""

import torch
from torch.nn.functional import pad
from transformers.utils import logging

from ..families.slots import Slot
from .calibration import real_tokens
from .heads import Sides, in_blocks
from .own_rows import MaskedRows, Piece, RelativeRows, TextMoments
from .weighted import attention_weights, packed_size, paired_moment


logger = logging.get_logger(__name__)
# from this number of texts on (texts times applications for ALBERT), several texts share one moment, to bound memory
MOST_TEXTS = 1024
# causal rows and XLNet's rows have different keys and are stored; further rows enter only the starting point
MOST_ROWS = 2**14
AT_ONCE = 32


def precise(states: torch.Tensor) -> torch.Tensor:
    """float64, on the CPU if the device does not support it."""
    return states.to("cpu", torch.float64) if states.device.type == "mps" else states.double()


def projected(states: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """States (n, d), with a one for the bias, through the matrices (heads, d + 1, w) of all heads: (heads, n, w)."""
    heads, _, width = side.shape
    joined = side.transpose(0, 1).flatten(1)  # one large product is faster than one per head
    with_one = pad(precise(states), (0, 1), value=1.0)
    return (with_one @ joined).view(-1, heads, width).transpose(0, 1)


def even_weights(visible: torch.Tensor) -> torch.Tensor:
    """Rows (n, m) of equal weights over the visible keys, which sum to one."""
    return visible.double() / visible.sum(-1, keepdim=True)


class MixedMoments:
    """The second moment `sum_i z_i z_i^T` (heads, v, v) of the values that attention mixes for each real token."""

    def __init__(self, heads: int, width: int, slot: Slot, device):
        self.slot = slot
        self.moment = torch.zeros(heads, width, width, dtype=torch.float64, device=device)
        self.rows = 0

    def add(self, mixed: torch.Tensor, batch) -> None:
        """Takes mixed values (batch, n, heads * v)."""
        rows = real_tokens(batch, tuple(mixed.shape[:2]), self.slot.rows)
        real = precise(mixed[rows.to(mixed.device)]).unflatten(-1, (len(self.moment), -1)).transpose(0, 1)
        self.moment += real.mT @ real
        self.rows += real.shape[1]

    def finish(self) -> "MixedMoments":
        if not bool(torch.isfinite(self.moment).all()):
            raise ValueError(
                f"the values in {self.slot.where} hold NaN or Inf on the calibration batches. Check the weights, or run the "
                "model in float32 or bfloat16."
            )
        if not self.rows:
            raise ValueError(f"no real token of the calibration reached {self.slot.where}: every mask is zero.")
        return self


class LayerMoments:
    """The moments of the queries and keys of one attention block, over all its applications.

    The keys of each row are centred on the keys that the row sees, since softmax ignores a constant along a row; their
    covariances are summed over rows, and queries over all texts. `query` is `sum_i x_i x_i^T`, (heads, x, x), and `key` is
    `sum_i Cov_i(y)`, (heads, y, y). With an `objective`, `pieces` separate the texts; with `"attention"`, `pairs` hold the
    products of queries and keys, weighted by attention.
    """

    def __init__(self, sides: Sides, scale: float, slot: Slot, objective: str | None = None):
        self.scale, self.slot, self.where = scale, slot, slot.where
        self.apart = objective is not None
        self.texts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.text_rows: list[int] = []
        self.kept: list[Piece] = []
        self.seen_texts = self.kept_rows = 0
        self.sides = sides
        count, x, y = sides.form.shape
        self.query = torch.zeros(count, x, x, dtype=torch.float64, device=sides.form.device)
        self.key = torch.zeros(count, y, y, dtype=torch.float64, device=sides.form.device)
        self.pairs: torch.Tensor | None = None
        if objective == "attention":
            # single precision: at the usual width of heads this is half the size of the model
            sizes = count, packed_size(x), packed_size(y)
            self.pairs = torch.zeros(sizes, dtype=torch.float32, device=sides.form.device)
        self.rows = 0

    def check(self, states: torch.Tensor) -> torch.Tensor:
        if not bool(torch.isfinite(states).all()):
            raise ValueError(
                f"the activations that enter {self.where} hold NaN or Inf on the calibration batches. Check the weights, or "
                "run the model in float32 or bfloat16."
            )
        return states

    def add_linear(self, states: torch.Tensor, memory: torch.Tensor, batch) -> None:
        """Linear layers: the hidden states (batch, n, d) of queries, and those (batch, m, d) of keys."""
        rows = real_tokens(batch, tuple(states.shape[:2]), self.slot.rows)
        columns = real_tokens(batch, tuple(memory.shape[:2]), self.slot.keys)
        for example in range(len(states)):
            asking, asked = rows[example].nonzero()[:, 0], columns[example].nonzero()[:, 0]
            if not len(asking) or not len(asked):
                continue
            query = projected(self.check(states[example, asking.to(states.device)]), self.sides.query)
            key = projected(self.check(memory[example, asked.to(memory.device)]), self.sides.key)
            key = key - key.mean(1, keepdim=True)
            visible = torch.ones(len(asking), len(asked), dtype=torch.bool, device=key.device)
            if self.slot.causal:
                visible = (asked <= asking[:, None]).to(key.device)
            self.add_rows(query)
            weights = even_weights(visible).to(key.device)
            mean = weights @ key
            covariances = key.mT @ (weights.sum(0)[:, None] * key) - mean.mT @ mean
            self.key += covariances
            kind = torch.promote_types(states.dtype, torch.float32)
            if self.apart and self.slot.causal:
                self.keep(MaskedRows(query.to(kind), key.to(kind), visible))
            elif self.apart:
                self.keep_moments((query.mT @ query).to(kind), (covariances / len(asking)).to(kind), len(asking))
            if self.pairs is not None:
                single = query.float(), key.float()
                paired_moment(*single, attention_weights(*single, self.scale, visible), self.pairs)

    def add_relative(
        self, states: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor | None, batch
    ) -> None:
        """XLNet: hidden states (n, batch, d), position codes (p, batch, d) and segment codes (n, n, batch, 2)."""
        length, count = states.shape[:2]
        real = real_tokens(batch, (count, length))
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
            query = projected(inputs, self.sides.query)
            self.add_rows(query)
            visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
            if self.slot.causal:
                visible = visible.tril()
            codes = None if segments is None else precise(segments[:, :, example])[tokens][:, tokens]
            # the code of the distance i - j is at n - i + j
            places = (length - tokens[:, None] + tokens[None, :]).clamp(max=len(positions) - 1)
            # distances to padding alone are left out
            near = slice(int(places.min()), int(places.max()) + 1)
            places = places - near.start
            offset = precise(positions[near, example]) @ position
            moment = entry_moment(even_weights(visible), places, codes, offset.shape[1]).to(inputs.device)
            key = precise(inputs) @ content
            blocks = (key - key.mean(1, keepdim=True), offset - offset.mean(1, keepdim=True), segment)
            entries = in_blocks(blocks)
            self.key += entries.mT @ (moment @ entries)
            if self.apart:
                device, kind = query.device, torch.promote_types(states.dtype, torch.float32)
                q, k, r, s = (vectors.to(kind) for vectors in (query, *blocks))
                codes = None if codes is None else codes.to(device, kind)
                self.keep(RelativeRows(q, k, r, s, places.to(device), codes, visible.to(device)))

    def keep(self, piece: MaskedRows | RelativeRows) -> None:
        if self.kept_rows < MOST_ROWS:
            self.kept.append(piece)
            self.kept_rows += piece.query.shape[1]

    def keep_moments(self, query: torch.Tensor, key: torch.Tensor, rows: int) -> None:
        """Keep the summed query moment and the mean key covariance of the `rows` of a text.

        Above `MOST_TEXTS` texts, several texts share one place: their queries are summed, and their keys averaged.
        """
        place = self.seen_texts % MOST_TEXTS
        self.seen_texts += 1
        if place == len(self.texts):
            self.texts.append((query, key))
            self.text_rows.append(rows)
        else:
            self.text_rows[place] += rows
            old_query, old_key = self.texts[place]
            self.texts[place] = old_query + query, old_key + (key - old_key) * (rows / self.text_rows[place])

    def pieces(self) -> list[Piece]:
        """All stored rows; the moments of several texts are one piece."""
        if not self.kept:
            for start in range(0, len(self.texts), AT_ONCE):
                query, key = zip(*self.texts[start : start + AT_ONCE], strict=True)
                self.kept.append(TextMoments(torch.stack(query), torch.stack(key)))
            self.texts = []
        return self.kept

    def add_rows(self, query: torch.Tensor) -> None:
        self.query += query.mT @ query
        self.rows += query.shape[1]

    def finish(self) -> "LayerMoments":
        if not self.rows:
            raise ValueError(
                f"no real token of the calibration reached {self.where}: every mask is zero"
                + (", or the batches have no `encoder_hidden_states`." if self.slot.cross else ".")
            )
        if not bool((self.key.diagonal(dim1=-2, dim2=-1).sum() > 0).all()):
            raise ValueError(
                f"every row of logits in {self.where} is constant on the calibration batches: give texts of more than one "
                "token each."
            )
        if 0 < self.kept_rows < self.rows:
            logger.warning_once(
                f"the calibration has {self.rows} tokens: the factors are fitted to the rows of the first {self.kept_rows}; "
                "the others enter only the starting point. Give fewer texts to fit all rows."
            )
        return self


def entry_moment(
    weights: torch.Tensor, places: torch.Tensor, codes: torch.Tensor | None, positions: int
) -> torch.Tensor:
    """How often two of the vectors of XLNet's keys are in one key, centred: (m + positions + 2) squared.

    The key of the pair (i, j) is the content of j, the position `places[i, j]` and a mix `codes[i, j]` of two segments. The
    moment of all keys needs only these counts, which are the same for all heads: the weighted sum of outer products of the
    rows that select the vectors, less that of their means in each row i.
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
