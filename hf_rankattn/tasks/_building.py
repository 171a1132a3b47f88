"""The base classes of all tasks: checked parameters, blocks of rows with a seed each, and a cache key that follows the source."""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow as pa
from datasets.builder import Key
from datasets.features.features import Array2DExtensionType

from ..checks import whole
from ._metrics import TaskMetric
from ._sampling import Rng, random_generator


Arrays = dict[str, np.ndarray]
SPLITS = ("train", "validation", "test")
SHARDS = 16
# numbers in a block: large enough that seeding costs nothing, small enough to stay in the cache of a core
BLOCK_NUMBERS = 2**19
LARGEST_BLOCK = 4096

BENEFITS = """@misc{amsel2024benefits,
  title = {On the Benefits of Rank in Attention Layers},
  author = {Noah Amsel and Gilad Yehudai and Joan Bruna},
  year = {2024},
  eprint = {2407.16153},
  archivePrefix = {arXiv}
}"""
COLLAPSE = """@misc{dong2021attention,
  title = {Attention is Not All You Need: Pure Attention Loses Rank Doubly Exponentially with Depth},
  author = {Yihe Dong and Jean-Baptiste Cordonnier and Andreas Loukas},
  year = {2021},
  eprint = {2103.03404},
  archivePrefix = {arXiv}
}"""


def check_count(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    return whole(name, value, least, most=most)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}.")


@dataclass
class TaskConfig(datasets.BuilderConfig):
    """The parameters that every task has.

    Args:
        num_examples (`int`, *optional*): Rows of the train split.
        num_eval_examples (`int`, *optional*): Rows of the validation split, and of the test split.
        seed (`int`, *optional*, defaults to 0): Seed of all three splits; different seeds share no rows.
    """

    # the smallest value of each parameter that counts something
    LEAST: ClassVar[dict[str, int]] = {}
    name: str = ""
    # on the config and not on the builder: datasets ignores the version of a builder that has named configs
    version: datasets.Version | str | None = "1.0.0"
    num_examples: int | None = 10_000
    num_eval_examples: int | None = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        self.version = datasets.Version(str(self.version))
        self.name = self.name or self.geometry_name()
        super().__post_init__()

    @classmethod
    def parameters(cls) -> list[str]:
        """The names that a user may set."""
        fixed = {field.name for field in fields(datasets.BuilderConfig)}
        return [field.name for field in fields(cls) if field.name not in fixed]

    def geometry_name(self) -> str:
        """The name of the config, made of its parameters."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a ValueError that names the wrong parameter and the allowed values."""
        self.check_counts({"num_examples": 1, "num_eval_examples": 1, **self.LEAST})
        self.seed = check_count("seed", self.seed, 0, most=2**64 - 1)

    def check_counts(self, least: dict[str, int]) -> None:
        for name, smallest in least.items():
            setattr(self, name, check_count(name, getattr(self, name), smallest))

    def contents(self) -> dict[str, Any]:
        """Everything that the rows depend on, as JSON values."""
        return {name: getattr(self, name) for name in self.parameters()}

    def geometry(self) -> str:
        """Everything that the rows depend on, except their number and seed."""
        sizes = ("num_examples", "num_eval_examples", "seed")
        return json.dumps({name: value for name, value in self.contents().items() if name not in sizes})

    def cache_id(self) -> str:
        digest = hashlib.sha256(json.dumps(self.contents(), sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:12]}"


def folder_hash(folder: Path) -> str:
    """A hash of the Python files directly in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()};".encode())
    return digest.hexdigest()


class TaskBuilder(datasets.ArrowBasedBuilder):
    """A task: rows are drawn in blocks, each from a generator seeded by (seed, geometry, split, block).

    A subclass defines its named configs (`BUILDER_CONFIGS`), its columns ([`columns`], by default ids and their labels), how to
    draw a block of rows ([`draw`]), and its metrics and baselines.
    """

    BUILDER_CONFIG_CLASS = TaskConfig
    CITATION: ClassVar[str] = ""
    # how the rows and their labels are made, for cards
    LABELS: ClassVar[str] = ""
    # where rows, labels or their use differ from the published code, and why
    DIFFERENCES: ClassVar[str] = ""
    # whether there are more rows than the splits hold
    endless: ClassVar[bool] = True
    metrics: ClassVar[tuple[type[TaskMetric], ...]] = ()
    # the split that a trained model is scored on
    scored_split: ClassVar[str] = "test"
    # numpy promises equal random streams within one version only
    source_hash: ClassVar[str] = np.__version__ + folder_hash(Path(__file__).parent)
    config: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hash the Python files of the folder that defines the class, as part of the cache key.

        The files are read when the class is defined, so that a later edit does not label rows of the old code.
        """
        super().__init_subclass__(**kwargs)
        if configs := vars(cls).get("BUILDER_CONFIGS"):
            cls.BUILDER_CONFIG_CLASS = type(configs[0])
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file is None:
            raise ValueError(f"the task {cls.__name__} must be defined in a file: its cache key hashes the source.")
        parents = [base.source_hash for base in cls.__bases__ if issubclass(base, TaskBuilder)]
        text = " ".join([cls.__qualname__, folder_hash(Path(file).parent), *parents])
        cls.source_hash = hashlib.sha256(text.encode()).hexdigest()[:16]

    def __init__(self, cache_dir: str | Path | None = None, *, config_name: str | None = None, **kwargs):
        kwargs.setdefault("dataset_name", self.task_name())
        kwargs["hash"] = self.source_hash + (kwargs.get("hash") or "")
        super().__init__(cache_dir=str(cache_dir) if cache_dir else None, config_name=config_name, **kwargs)

    @classmethod
    def task_name(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @staticmethod
    def baselines(train: Arrays, test: Arrays) -> Iterator[tuple[str, np.ndarray]]:
        """Name and predictions for the test rows, of each predictor that cannot solve the task."""
        raise NotImplementedError

    @classmethod
    def score(cls, predictions: Any, references: Any, points: Any = None) -> dict[str, float]:
        """All metrics of the task; without `points`, those that need them are left out."""
        found: dict[str, float] = {}
        for metric in cls.metrics:
            more = {"points": points} if metric.more_inputs else {}
            if not more or points is not None:
                found |= metric.measure(predictions, references, **more)
        return found

    def _create_builder_config(self, config_name=None, custom_features=None, config_id=None, **parameters):
        """A named config with some parameters changed; unlike datasets' own, it is checked and named by its parameters."""
        if custom_features is not None or config_id is not None:
            raise ValueError("the features and the cache of a task follow from its parameters: leave both out.")
        known = self.BUILDER_CONFIG_CLASS.parameters()
        first = next(iter(self.builder_configs), None)  # the default, unless the task names another
        base = self.builder_configs.get(config_name or self.DEFAULT_CONFIG_NAME or first)
        if base is None:
            raise ValueError(
                f"{self.task_name()} has no config {config_name!r}; it has {', '.join(self.builder_configs)}, and free "
                f"parameters: {', '.join(known)}."
            )
        given = {name: value for name, value in parameters.items() if value is not None}
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{self.task_name()} has no parameter {unknown[0]!r}; it has {', '.join(known)}.")
        config = replace(base, **given)
        config.check()
        if given:
            config.name = config.geometry_name()
        return config, config.cache_id()

    def _info(self) -> datasets.DatasetInfo:
        description = " ".join((type(self).__doc__ or "").split())
        features = datasets.Features(self.columns())
        return datasets.DatasetInfo(description=description, features=features, citation=self.CITATION)

    def columns(self) -> dict[str, Any]:
        """Column name -> feature; the names are arguments of the models' forward."""
        ids = ids_feature(self.config.length)
        return {"input_ids": ids, "labels": ids}

    def draw(self, rng: Rng, rows: int, *, split: str, first: int) -> Arrays:
        """Rows `first`, `first + 1`, ... of a split, column by column."""
        raise NotImplementedError

    def scratch_numbers(self) -> int:
        """Numbers for each row in the largest temporary array of [`draw`], if it is larger than the columns."""
        return 0

    def model_arguments(self) -> dict[str, Any]:
        """The fields of a RankEncoder config that the data decide: `RankEncoderConfig(**builder.model_arguments())`."""
        return {"input_dim": shape_of(self.columns()["points"])[1]}

    def split_sizes(self) -> dict[str, int]:
        sizes = (self.config.num_examples, self.config.num_eval_examples, self.config.num_eval_examples)
        return dict(zip(SPLITS, sizes, strict=True))

    @cached_property
    def block_rows(self) -> int:
        """Rows of a block: a power of two that depends on the geometry alone."""
        numbers = sum(np.prod(shape_of(feature), dtype=int) for feature in self.columns().values())
        numbers = max(numbers, self.scratch_numbers())
        return max(1, min(LARGEST_BLOCK, 2 ** int(np.log2(max(1, BLOCK_NUMBERS // numbers)))))

    def block(self, split: str, number: int, rows: int | None = None, keys: tuple[int, ...] = ()) -> Arrays:
        """The first `rows` of block `number` of a split; `keys` select blocks outside of the splits.

        A block is always drawn whole: fewer rows of the first column would change the random numbers of the second.
        """
        rng = random_generator(self.config.seed, self.task_name(), self.config.geometry(), split, *keys, number)
        drawn = self.draw(rng, self.block_rows, split=split, first=number * self.block_rows)
        return {name: array[:rows] for name, array in drawn.items()}

    def sample(self, split: str, rows: int) -> Arrays:
        """The first rows of a split as arrays, without a cache; an endless task gives more rows than the split has."""
        size = self.split_sizes()[split]
        if rows > size and not self.endless:
            raise ValueError(f"the {split} split has only {size} rows, and {rows} were asked for.")
        step = self.block_rows
        blocks = [self.block(split, first // step, min(step, rows - first)) for first in range(0, rows, step)]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _split_generators(self, dl_manager) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"split": split, "shards": self.shards(rows)})
            for split, rows in self.split_sizes().items()
        ]

    def shards(self, rows: int, at_most: int = SHARDS) -> list[tuple[int, int]]:
        """First row and end of each shard: whole blocks, so that the rows do not depend on the number of processes."""
        blocks = -(-rows // self.block_rows)
        count = min(at_most, blocks)
        starts = [self.block_rows * (blocks * shard // count) for shard in range(count)]
        return list(zip(starts, [*starts[1:], rows], strict=True))

    def _generate_tables(self, split: str, shards: list[tuple[int, int]]) -> Iterator[tuple[Key, pa.Table]]:
        for shard, (start, stop) in enumerate(shards):
            for first in range(start, stop, self.block_rows):
                number, rows = first // self.block_rows, min(self.block_rows, stop - first)
                yield Key(shard, number), self.table(self.block(split, number, rows))

    def table(self, arrays: Arrays) -> pa.Table:
        return pa.table({name: arrow_column(arrays[name], feature) for name, feature in self.columns().items()})

    def _download_and_prepare(self, dl_manager, verification_mode, **kwargs) -> None:
        # A killed preparation leaves its temporary folder, and datasets would add to it and rename it: empty it first.
        for left_over in Path(self._output_dir).iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        super()._download_and_prepare(dl_manager, verification_mode, **kwargs)


def points_feature(count: int, dim: int) -> datasets.Array2D:
    return datasets.Array2D(shape=(count, dim), dtype="float32")


def ids_feature(length: int) -> datasets.List:
    return datasets.List(datasets.Value("int64"), length=length)


def shape_of(feature: datasets.Array2D | datasets.List) -> tuple[int, ...]:
    return feature.shape if isinstance(feature, datasets.Array2D) else (feature.length,)


def arrow_column(array: np.ndarray, feature: datasets.Array2D | datasets.List) -> pa.Array:
    """(rows, ...) numbers as one column of Arrow, without a copy."""
    values = pa.array(array.reshape(-1))
    if isinstance(feature, datasets.List):
        return pa.FixedSizeListArray.from_arrays(values, feature.length)
    rows, count, dim = array.shape
    inner = pa.ListArray.from_arrays(np.arange(rows * count + 1, dtype=np.int32) * dim, values)
    outer = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * count, inner)
    return pa.ExtensionArray.from_storage(Array2DExtensionType(feature.shape, feature.dtype), outer)
