"""What predictors that cannot solve a task reach on it, so that a result can be judged."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .building import TaskBuilder
from .loading import task_builder
from .metrics import IGNORED, score


Arrays = dict[str, np.ndarray]
# a baseline has few numbers to fit, so this is plenty
FIT_NUMBERS = 2**23
LARGEST_FIT = 4096


def baselines(
    name: str, config: str | None = None, *, rows: int | None = None, **parameters: Any
) -> dict[str, dict[str, float]]:
    """Metrics of the baselines of a task: fitted on rows of the train split, measured on as many of the test split.

    Args:
        name (`str`): The task.
        config (`str`, *optional*): Its config.
        rows (`int`, *optional*): How many rows; by default up to 4,096, fewer where they are large.
        **parameters: Parameters of the task, as in [`load_task`].

    Returns:
        `dict`: baseline -> metric -> value.

    >>> measured = baselines("nearest_neighbor", dim=8, num_points=2)
    >>> round(measured["zero"]["neighbor_error"], 3), round(measured["mean_pool"]["neighbor_error"], 3)
    (1.0, 0.5)
    """
    return task_baselines(task_builder(name, config, **parameters), rows)


def task_baselines(builder: TaskBuilder, rows: int | None = None) -> dict[str, dict[str, float]]:
    task = builder.task_name()
    # what was memorized is scored where it was memorized
    held_out = "train" if task == "memorization" else "test"
    train, test = (sample(builder, split, rows) for split in ("train", held_out))
    predictors = {"convex_hull": hull_predictors, "circle": circle_predictors}.get(task, class_predictors)
    if task.endswith("_neighbor"):
        predictors = neighbor_predictors
    return {baseline: score(task, prediction, test["labels"]) for baseline, prediction in predictors(train, test)}


def sample(builder: TaskBuilder, split: str, rows: int | None) -> Arrays:
    if rows is None:
        numbers = sum(array.size for array in builder.sample(split, 1).values())
        rows = min(LARGEST_FIT, max(64, FIT_NUMBERS // numbers))
    if not builder.endless:
        rows = min(rows, builder.split_sizes()[split])
    return builder.sample(split, rows)


def neighbor_predictors(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """Zero, and the best multiples of: the token itself, the mean of the points, linear attention to them."""
    yield "zero", np.zeros_like(test["labels"])
    yield "own_token", fitted([own_token], train, test)
    if "queries" in train:
        yield "mean_pool", fitted([mean_pool], train, test)
    yield "own_token_and_mean_pool", fitted([own_token, mean_pool], train, test)
    yield "linear_attention", fitted([own_token, mean_pool, linear_attention], train, test)


def own_token(rows: Arrays) -> np.ndarray:
    return rows.get("queries", rows["points"])


def mean_pool(rows: Arrays) -> np.ndarray:
    return np.broadcast_to(rows["points"].mean(1, keepdims=True), rows["labels"].shape)


def linear_attention(rows: Arrays) -> np.ndarray:
    """Attention of full rank without its softmax: the sum of the points, each times its product with the token."""
    return (own_token(rows) @ np.swapaxes(rows["points"], 1, 2)) @ rows["points"]


def fitted(features: list[Callable[[Arrays], np.ndarray]], train: Arrays, test: Arrays) -> np.ndarray:
    """The combination of features, one number for each, that is nearest to the train labels."""
    columns = [feature(train).ravel().astype(np.float64) for feature in features]
    gram = np.array([[a @ b for b in columns] for a in columns])
    weights = np.linalg.solve(gram, np.array([a @ train["labels"].ravel() for a in columns]))
    return sum(weight * feature(test) for weight, feature in zip(weights, features, strict=True))


def circle_predictors(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """A step is a rotation, a linear map of the token itself: the last of these solves the task."""
    yield "zero", np.zeros_like(test["labels"])
    yield "own_token", fitted([own_token], train, test)
    flat = train["points"].reshape(-1, 2)
    rotation = np.linalg.lstsq(flat, train["labels"].reshape(-1, 2), rcond=None)[0]
    yield "own_token_linear_map", test["points"] @ rotation


def class_predictors(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The most frequent class: of all, at a position, of a token, and of a token at a position."""
    shape = test["labels"].shape
    for name, use_token, use_position in (
        ("majority", False, False),
        ("position_only", False, True),
        ("own_token", True, False),
        ("own_token_and_position", True, True),
    ):
        seen, asked = (condition(rows, use_token, use_position) for rows in (train, test))
        yield name, most_frequent(seen, train["labels"], asked).reshape(shape)


def condition(rows: Arrays, use_token: bool, use_position: bool) -> np.ndarray:
    """One number for all that a predictor may look at."""
    ids = rows["input_ids"]
    length = ids.shape[1]
    return ids * length * use_token + np.broadcast_to(np.arange(length), ids.shape) * use_position


def most_frequent(seen: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """For each asked condition the class it was most often seen with, or the most frequent class of all."""
    counted = labels != IGNORED
    seen, labels = seen[counted], labels[counted]
    classes = int(labels.max()) + 1
    overall = np.bincount(labels).argmax()
    table = np.bincount(seen * classes + labels, minlength=(int(asked.max()) + 1) * classes).reshape(-1, classes)
    best = np.where(table.any(1), table.argmax(1), overall)
    return best[asked]


def hull_predictors(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The most frequent class, and the best bound on the distance from the mean of the points."""
    majority = int(train["labels"].mean() > 0.5)
    yield "majority", np.full_like(test["labels"], majority)
    distance, asked = (np.linalg.norm(rows["points"] - mean_of(rows), axis=-1) for rows in (train, test))
    order = np.argsort(distance, axis=None)
    labels = train["labels"].ravel()[order]
    # right answers if all up to a place are called inside and all after it vertices
    right = np.concatenate([[0], np.cumsum(1 - labels)]) + np.concatenate([np.cumsum(labels[::-1])[::-1], [0]])
    bound = np.append(distance.ravel()[order], np.inf)[right.argmax()]
    yield "own_token_and_mean_pool", (asked >= bound).astype(np.int64)


def mean_of(rows: Arrays) -> np.ndarray:
    return rows["points"].mean(1, keepdims=True)
