"""Recurrent circle: two points on opposite arcs, each labelled with its position one step later."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ._baselines import fitted, own_token
from ._building import COLLAPSE, Arrays, TaskBuilder, TaskConfig, check_choice, check_count, points_feature
from ._metrics import NeighborError


ANGLES = ("grid", "uniform")


@dataclass
class CircleConfig(TaskConfig):
    """
    Args:
        num_positions (`int`, *optional*, defaults to 1000): Steps that make a whole turn; even.
        separation (`int`, *optional*, defaults to `num_positions / 2`):
            Steps between the two points. The original code used 499 of 1000, which are not quite opposite.
        radius (`float`, *optional*, defaults to 0.3): Radius of the circle.
        angles (`str`, *optional*, defaults to `"grid"`):
            First angle of train rows: `"grid"` (one row for each position of half a turn, in order) or `"uniform"`. The
            angles of validation and test rows are uniform.
    """

    num_examples: int | None = None
    num_eval_examples: int | None = 300
    num_positions: int = 1000
    separation: int | None = None
    radius: float = 0.3
    angles: str = "grid"

    def geometry_name(self) -> str:
        name = f"{self.angles}_n{self.num_positions}"
        return name if self.separation in (None, self.num_positions // 2) else f"{name}_s{self.separation}"

    def check(self) -> None:
        check_choice("angles", self.angles, ANGLES)
        self.num_positions = check_count("num_positions", self.num_positions, 4)
        half = self.num_positions // 2
        if self.num_positions % 2:
            raise ValueError(
                f"`num_positions` must be even, because one position is half a turn away from each position; got {self.num_positions}."
            )
        self.separation = check_count("separation", half if self.separation is None else self.separation, 1)
        if self.separation >= self.num_positions:
            raise ValueError(f"`separation` must be below num_positions={self.num_positions}, got {self.separation}.")
        self.num_examples = half if self.num_examples is None else self.num_examples
        super().check()
        if self.angles == "grid" and self.num_examples > half:
            raise ValueError(
                f"the grid has {half} train rows, and {self.num_examples} were asked for: give angles='uniform', or more "
                "positions."
            )
        self.radius = float(self.radius)
        if not 0 < self.radius < np.inf:
            raise ValueError(f"`radius` must be above 0 and finite, got {self.radius}.")


def circle_baselines(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """A step is a rotation, a linear map of the token itself: the last of these solves the task."""
    yield "zero", np.zeros_like(test["labels"])
    yield "own_token", fitted([own_token], train, test)
    rotation = np.linalg.lstsq(train["points"].reshape(-1, 2), train["labels"].reshape(-1, 2), rcond=None)[0]
    yield "own_token_linear_map", test["points"] @ rotation


class Circle(TaskBuilder):
    """Two points on opposite arcs of a circle, each labelled with its position one step later. A model whose attention
    collapses moves both to one point if it is applied to its own outputs again and again."""

    BUILDER_CONFIGS = [
        CircleConfig(),
        CircleConfig(separation=499),
        CircleConfig(angles="uniform", num_examples=10_000),
    ]
    metrics = (NeighborError,)
    baselines = staticmethod(circle_baselines)
    CITATION = COLLAPSE
    LABELS = (
        "Row i of the train split holds the positions i and i + separation of a circle, counter-clockwise from (radius, 0), "
        "and as `labels` the next position of each; the other splits start at uniform angles, not on the grid. Labels do "
        "not depend on the other point: the task tests whether repeated application keeps the two apart."
    )
    DIFFERENCES = (
        "The published code pairs positions that are 499 of 1000 steps apart and not quite opposite, so it has 499 rows whose "
        "arcs do not close. Here the two are opposite and there are 500 rows (the config with `s499` has the original "
        "distance). In the published code a model without skip connections keeps the one inside its layer, and the variant "
        "with skip connections adds the previous batch."
    )

    @property
    def endless(self) -> bool:  # type: ignore[override]
        return self.config.angles == "uniform"

    def columns(self):
        return {"points": points_feature(2, 2), "labels": points_feature(2, 2)}

    def draw(self, rng, rows, *, split, first):
        if split == "train" and self.config.angles == "grid":
            starts = np.arange(first, first + rows, dtype=np.float64)
        else:
            starts = rng.uniform(0, self.config.num_positions, size=rows)
        steps = starts[:, None] + np.array([0, self.config.separation])
        return {"points": self.positions(steps), "labels": self.positions(steps + 1)}

    def positions(self, steps: np.ndarray) -> np.ndarray:
        angles = steps * (2 * np.pi / self.config.num_positions)
        return (self.config.radius * np.stack([np.cos(angles), np.sin(angles)], axis=-1)).astype(np.float32)
