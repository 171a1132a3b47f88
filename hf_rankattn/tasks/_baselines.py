"""Results of predictors that cannot solve a task, as a scale for the results of models."""

from collections.abc import Callable, Iterator

import numpy as np

from ._building import Arrays, TaskBuilder
from ._metrics import IGNORED


# a baseline has few numbers to fit, so this is plenty
FIT_NUMBERS = 2**23
LARGEST_FIT = 4096


def task_baselines(builder: TaskBuilder, rows: int | None = None) -> dict[str, dict[str, float]]:
    """Baseline -> metric -> value, fitted on rows of the train split and measured on as many of the scored split."""
    train, test = (sample(builder, split, rows) for split in ("train", builder.scored_split))
    predictions = builder.baselines(train, test)
    return {baseline: builder.score(prediction, test["labels"]) for baseline, prediction in predictions}


def sample(builder: TaskBuilder, split: str, rows: int | None) -> Arrays:
    if rows is None:
        numbers = sum(array.size for array in builder.sample(split, 1).values())
        rows = min(LARGEST_FIT, max(64, FIT_NUMBERS // numbers))
    return builder.sample(split, rows if builder.endless else min(rows, builder.split_sizes()[split]))


def neighbor_baselines(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
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
    """The combination of features, with one weight for each, that is nearest to the train labels."""
    columns = [feature(train).ravel().astype(np.float64) for feature in features]
    gram = np.array([[a @ b for b in columns] for a in columns])
    weights = np.linalg.solve(gram, np.array([a @ train["labels"].ravel() for a in columns]))
    return sum(weight * feature(test) for weight, feature in zip(weights, features, strict=True))


def class_baselines(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The most frequent class: overall, at a position, of a token, and of a token at a position."""
    for name, use_token, use_position in (
        ("majority", False, False),
        ("position_only", False, True),
        ("own_token", True, False),
        ("own_token_and_position", True, True),
    ):
        seen, asked = (condition(rows, use_token, use_position) for rows in (train, test))
        yield name, most_frequent(seen, train["labels"], asked).reshape(test["labels"].shape)


def condition(rows: Arrays, use_token: bool, use_position: bool) -> np.ndarray:
    """One number for everything that a predictor may look at."""
    ids = rows["input_ids"]
    length = ids.shape[1]
    return ids * length * use_token + np.broadcast_to(np.arange(length), ids.shape) * use_position


def most_frequent(seen: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """For each asked condition its most frequent class, or the most frequent class overall for an unseen condition."""
    counted = labels != IGNORED
    seen, labels = seen[counted], labels[counted]
    classes = int(labels.max()) + 1
    overall = np.bincount(labels).argmax()
    table = np.bincount(seen * classes + labels, minlength=(int(asked.max()) + 1) * classes).reshape(-1, classes)
    return np.where(table.any(1), table.argmax(1), overall)[asked]
