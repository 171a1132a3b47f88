"""The front door of the tasks."""

from importlib import import_module
from pathlib import Path
from typing import Any

import datasets

from .building import TaskBuilder
from .stream import fresh_stream


# module -> class; one builder a module, since datasets names its caches after modules
TASKS = {
    "farthest_neighbor": "FarthestNeighbor",
    "nearest_neighbor": "NearestNeighbor",
    "biased_nearest_neighbor": "BiasedNearestNeighbor",
    "sorting": "Sorting",
    "convex_hull": "ConvexHull",
    "memorization": "Memorization",
    "circle": "Circle",
    "token_retrieval": "TokenRetrieval",
}


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
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}.")
    builder = getattr(import_module(f".{name}", __package__), TASKS[name])
    return builder(cache_dir, config_name=config, **parameters)


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
            `"convex_hull"`, `"memorization"`, `"circle"` or `"token_retrieval"`.
        split (`str`, *optional*): `"train"`, `"validation"`, `"test"`, or a slice as datasets knows it; without it, a
            dictionary of all three.
        streaming (`bool`, *optional*, defaults to `False`):
            Whether to draw rows while they are read, with nothing on disk. The train split then never ends: after the rows
            of the map-style split come fresh ones, for ever. Validation and test are the same rows as map-style, as is the
            train split of `memorization` and of the grid of `circle`, which have no other rows.
        config (`str`, *optional*): A named config; the papers' main setting by default.
        cache_dir (*optional*): Where map-style rows are kept; by default where datasets keeps its own.
        num_proc (`int`, *optional*): Processes that prepare map-style rows. The rows do not depend on it.
        **parameters: Parameters of the task, over those of the config: `dim`, `num_points`, `num_examples`, `seed`, ...

    Example:

    ```python
    >>> from hf_rankattn import load_task

    >>> stream = load_task("farthest_neighbor", "train", streaming=True, dim=16, num_points=8)
    >>> row = next(iter(stream))
    >>> row["points"].shape, row["labels"].shape
    (torch.Size([8, 16]), torch.Size([8, 16]))
    ```"""
    builder = task_builder(name, config, cache_dir=cache_dir, **parameters)
    if streaming:
        return load_stream(builder, split)
    builder.download_and_prepare(num_proc=num_proc)
    return builder.as_dataset(split=split).with_format("torch")


def load_stream(builder: TaskBuilder, split: str | None) -> datasets.IterableDataset | datasets.IterableDatasetDict:
    if split is None:
        return datasets.IterableDatasetDict({name: load_stream(builder, name) for name in builder.split_sizes()})
    if split == "train" and builder.endless:
        return fresh_stream(builder, split)
    return builder.as_streaming_dataset(split=split).with_format("torch")
