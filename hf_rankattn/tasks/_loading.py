"""Tasks by name: a task is a module of this folder without a leading underscore, and its class has the same name."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import datasets
import numpy as np

from ._baselines import task_baselines
from ._building import TaskBuilder
from ._stream import fresh_stream


# module -> class; one builder in each module, since datasets names its caches after modules
TASKS = {
    module.name: "".join(word.capitalize() for word in module.name.split("_"))
    for module in iter_modules([str(Path(__file__).parent)])
    if not module.name.startswith("_")
}


def task_class(name: str) -> type[TaskBuilder]:
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}.")
    return getattr(import_module(f".{name}", __package__), TASKS[name])


def task_builder(
    name: str, config: str | None = None, *, cache_dir: str | Path | None = None, **parameters: Any
) -> TaskBuilder:
    """The `datasets` builder of a task.

    >>> builder = task_builder("farthest_neighbor", dim=16, num_points=8)
    >>> builder.config.name, builder.model_arguments()
    ('d16_n8', {'input_dim': 16})
    >>> {column: array.shape for column, array in builder.sample("test", 5).items()}
    {'points': (5, 8, 16), 'labels': (5, 8, 16)}
    """
    return task_class(name)(cache_dir, config_name=config, **parameters)


def load_task(
    name: str,
    split: str | None = None,
    streaming: bool = False,
    *,
    config: str | None = None,
    cache_dir: str | Path | None = None,
    num_proc: int | None = None,
    **parameters: Any,
) -> datasets.Dataset | datasets.DatasetDict | datasets.IterableDataset | datasets.IterableDatasetDict:
    """Load a synthetic task, as tensors whose columns are the arguments of the models' `forward`.

    Args:
        name (`str`): `"farthest_neighbor"`, `"nearest_neighbor"`, `"biased_nearest_neighbor"`, `"sorting"`,
            `"convex_hull"`, `"memorization"`, `"circle"`, `"token_retrieval"` or `"associative_recall"`.
        split (`str`, *optional*): `"train"`, `"validation"`, `"test"`, or a slice in the notation of datasets; without it, a
            dictionary of all three.
        streaming (`bool`, *optional*, defaults to `False`):
            Whether to draw rows while they are read, with nothing on disk. The train split then never ends: the rows of the
            map-style split come first, and then new ones without end. Validation and test are the same rows as map-style, as
            is the train split of `memorization` and of the grid of `circle`, which have no other rows.
        config (`str`, *optional*): A named config; the papers' main setting by default.
        cache_dir (*optional*): Folder of the cache of map-style rows; by default the cache of datasets.
        num_proc (`int`, *optional*): Processes that prepare map-style rows. The rows do not depend on it.
        **parameters: Parameters of the task that replace those of the config: `dim`, `num_points`, `num_examples`, `seed`, ...

    >>> from hf_rankattn import load_task
    >>> stream = load_task("farthest_neighbor", "train", streaming=True, dim=16, num_points=8)
    >>> row = next(iter(stream))
    >>> row["points"].shape, row["labels"].shape
    (torch.Size([8, 16]), torch.Size([8, 16]))
    """
    builder = task_builder(name, config, cache_dir=cache_dir, **parameters)
    if streaming:
        return load_stream(builder, split)
    builder.download_and_prepare(num_proc=num_proc)
    return builder.as_dataset(split=split).with_format("torch")


def load_stream(builder: TaskBuilder, split: str | None) -> datasets.IterableDataset | datasets.IterableDatasetDict:
    """The rows of a builder, drawn while they are read: the train split never ends if the task has more rows. Without a split,
    all three."""
    if split is None:
        return datasets.IterableDatasetDict({name: load_stream(builder, name) for name in builder.split_sizes()})
    if split == "train" and builder.endless:
        return fresh_stream(builder, split)
    return builder.as_streaming_dataset(split=split).with_format("torch")


def baselines(
    name: str, config: str | None = None, *, rows: int | None = None, **parameters: Any
) -> dict[str, dict[str, float]]:
    """Metrics of the baselines of a task: fitted on rows of the train split, measured on as many of the test split.

    Args:
        name (`str`): The task.
        config (`str`, *optional*): Its config.
        rows (`int`, *optional*): Number of rows; by default up to 4,096, fewer if they are large.
        **parameters: Parameters of the task, as in [`load_task`].

    Returns:
        `dict`: baseline -> metric -> value.

    >>> measured = baselines("nearest_neighbor", dim=8, num_points=2)
    >>> round(measured["zero"]["neighbor_error"], 3), round(measured["mean_pool"]["neighbor_error"], 3)
    (1.0, 0.5)
    """
    return task_baselines(task_builder(name, config, **parameters), rows)


def score(task: str, predictions: Any, references: Any, points: Any = None) -> dict[str, float]:
    """All metrics of a task; without `points`, those that need them are left out."""
    return task_class(task).score(predictions, references, points)


def trainer_metrics(task: str) -> Callable[[Any], dict[str, float]]:
    """A `compute_metrics` for `Trainer`: the metrics of a task, from the logits or the vectors that a model predicts.

    The accuracy of neighbours needs the points, which `Trainer` passes on with `include_for_metrics=["inputs"]`.
    """
    builder = task_class(task)

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        predictions, references = np.asarray(evaluated.predictions), np.asarray(evaluated.label_ids)
        if predictions.ndim > references.ndim:
            predictions = predictions.argmax(-1)
        return builder.score(predictions, references, getattr(evaluated, "inputs", None))

    return compute_metrics
