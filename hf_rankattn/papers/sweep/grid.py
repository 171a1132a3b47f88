"""A grid of settings, and its cells, which have the same id in every run."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One setting of an experiment, which one process runs.

    Args:
        parameters (`Mapping`): Everything on which the result depends, as JSON values.
        cost (`float`, *optional*, defaults to 1.0): Relative run time; expensive cells start first.
    """

    parameters: Mapping[str, Any]
    cost: float = field(default=1.0, compare=False)

    @property
    def id(self) -> str:
        """A hash of the parameters, which does not depend on their order.

        >>> Cell({"rank": 4, "seed": 0}).id == Cell({"seed": 0, "rank": 4}, cost=2.0).id
        True
        """
        text = json.dumps(dict(self.parameters), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def grid(**axes: Any) -> Iterator[dict[str, Any]]:
    """Every combination of the axes, where the last axis changes fastest; a value that is no list is a constant.

    >>> list(grid(dim=16, rank=[16, 8]))
    [{'dim': 16, 'rank': 16}, {'dim': 16, 'rank': 8}]
    """
    values = [axis if isinstance(axis, list) else [axis] for axis in axes.values()]
    for combination in product(*values):
        yield dict(zip(axes, combination, strict=True))
