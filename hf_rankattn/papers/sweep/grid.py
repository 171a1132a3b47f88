"""A grid of settings, cut into cells that are recognised again in another run."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One setting of an experiment: what is run in one go, by one process, and is done or not done.

    Args:
        parameters (`Mapping`): All that decides about the result, as JSON has it.
        cost (`float`, *optional*, defaults to 1.0): How long it takes beside others; dear cells are started first.
    """

    parameters: Mapping[str, Any]
    cost: float = field(default=1.0, compare=False)

    @property
    def id(self) -> str:
        """The same for the same parameters, in whatever order, run or release.

        >>> Cell({"rank": 4, "seed": 0}).id == Cell({"seed": 0, "rank": 4}, cost=2.0).id
        True
        """
        text = json.dumps(dict(self.parameters), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def grid(**axes: Any) -> Iterator[dict[str, Any]]:
    """Every combination of the axes, the last one running fastest; what is no list is the same in all of them.

    >>> list(grid(dim=16, rank=[16, 8]))
    [{'dim': 16, 'rank': 16}, {'dim': 16, 'rank': 8}]
    """
    values = [axis if isinstance(axis, list) else [axis] for axis in axes.values()]
    for combination in product(*values):
        yield dict(zip(axes, combination, strict=True))
