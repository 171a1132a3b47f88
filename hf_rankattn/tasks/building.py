"""What all tasks share: parameters that are checked, blocks of rows that are seeded one by one, a cache that is never stale."""

import hashlib
import json
import operator
import re
import shutil
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

from .generator_hash import generator_hash
from .sampling import Rng, random_generator


SPLITS = ("train", "validation", "test")
SHARDS = 16
# numbers in a block: large enough that seeding costs nothing, small enough to stay in the cache of a core
BLOCK_NUMBERS = 2**19
LARGEST_BLOCK = 4096


def check_count(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """`value` as an int from `least` to `most`, or a ValueError that names it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"`{name}` must be a whole number, got {value!r}.") from None
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    if value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value}.")
    return value


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}.")


@dataclass
class TaskConfig(datasets.BuilderConfig):
    """The parameters that every task has.

    Args:
        num_examples (`int`, *optional*): Rows of the train split.
        num_eval_examples (`int`, *optional*): Rows of the validation split, and of the test split.
        seed (`int`, *optional*, defaults to 0): Seed of all three; distinct seeds share no rows.
    """

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
        """What a config is called after its parameters."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a ValueError that says which parameter cannot be, and what can."""
        for name in ("num_examples", "num_eval_examples"):
            setattr(self, name, check_count(name, getattr(self, name), 1))
        self.seed = check_count("seed", self.seed, 0, most=2**64 - 1)

    def contents(self) -> dict[str, Any]:
        """All that decides about the rows, as JSON has it."""
        return {name: getattr(self, name) for name in self.parameters()}

    def geometry(self) -> str:
        """All that decides about the rows but how many there are and their seed."""
        sizes = ("num_examples", "num_eval_examples", "seed")
        return json.dumps({name: value for name, value in self.contents().items() if name not in sizes})

    def cache_id(self) -> str:
        digest = hashlib.sha256(json.dumps(self.contents(), sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:12]}"


class TaskBuilder(datasets.ArrowBasedBuilder):
    """A task: rows are drawn in blocks, each from a generator seeded by (seed, geometry, split, block).

    A subclass says what its columns are ([`columns`]) and how a block of rows is drawn ([`draw`]).
    """

    BUILDER_CONFIG_CLASS = TaskConfig
    CITATION: ClassVar[str] = ""
    # how the rows and their labels are made, for cards
    LABELS: ClassVar[str] = ""
    # where rows, labels or their use differ from the published code, and why
    DIFFERENCES: ClassVar[str] = ""
    # whether there are more rows than any split holds
    endless: ClassVar[bool] = True
    config: Any

    def __init__(self, cache_dir: str | Path | None = None, *, config_name: str | None = None, **kwargs):
        kwargs.setdefault("dataset_name", self.task_name())
        kwargs["hash"] = generator_hash(type(self)) + (kwargs.get("hash") or "")
        super().__init__(cache_dir=str(cache_dir) if cache_dir else None, config_name=config_name, **kwargs)

    @classmethod
    def task_name(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def _create_builder_config(self, config_name=None, custom_features=None, config_id=None, **parameters):
        """A named config with some parameters changed; unlike in datasets' own, checked, and named after what it is."""
        if custom_features is not None or config_id is not None:
            raise ValueError("the features and the cache of a task follow from its parameters: leave both away.")
        named = self.builder_configs
        base = named.get(config_name or self.DEFAULT_CONFIG_NAME)
        if base is None:
            raise ValueError(
                f"{self.task_name()} has no config {config_name!r}; it has {', '.join(named)}, and free parameters: "
                f"{', '.join(base_parameters(self))}."
            )
        given = {name: value for name, value in parameters.items() if value is not None}
        strangers = [name for name in given if name not in base.parameters()]
        if strangers:
            raise ValueError(
                f"{self.task_name()} has no parameter {strangers[0]!r}; it has {', '.join(base.parameters())}."
            )
        config = replace(base, **given)
        config.check()
        if given:
            config.name = config.geometry_name()
        return config, config.cache_id()

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(
            description=" ".join((type(self).__doc__ or "").split()),
            features=datasets.Features(self.columns()),
            citation=self.CITATION,
        )

    def columns(self) -> dict[str, Any]:
        """Column name -> feature; the names are arguments of the models' forward."""
        raise NotImplementedError

    def draw(self, rng: Rng, rows: int, *, split: str, first: int) -> dict[str, np.ndarray]:
        """Rows `first`, `first + 1`, ... of a split, column by column."""
        raise NotImplementedError

    def scratch_numbers(self) -> int:
        """Numbers for each row in the largest array that [`draw`] makes on its way, where that is not a column."""
        return 0

    def model_arguments(self) -> dict[str, Any]:
        """What a config of RankEncoder has to be told about the data: `RankEncoderConfig(**builder.model_arguments())`."""
        raise NotImplementedError

    def split_sizes(self) -> dict[str, int]:
        sizes = (self.config.num_examples, self.config.num_eval_examples, self.config.num_eval_examples)
        return dict(zip(SPLITS, sizes, strict=True))

    @cached_property
    def block_rows(self) -> int:
        """Rows of a block: a power of two that follows from the geometry alone."""
        numbers = sum(np.prod(shape_of(feature), dtype=int) for feature in self.columns().values())
        numbers = max(numbers, self.scratch_numbers())
        return max(1, min(LARGEST_BLOCK, 2 ** int(np.log2(max(1, BLOCK_NUMBERS // numbers)))))

    def block(
        self, split: str, number: int, rows: int | None = None, keys: tuple[int, ...] = ()
    ) -> dict[str, np.ndarray]:
        """The first `rows` of block `number` of a split; `keys` lead to blocks that no split holds.

        A block is always drawn whole: what is drawn second would come out otherwise after fewer rows of the first.
        """
        rng = random_generator(self.config.seed, self.task_name(), self.config.geometry(), split, *keys, number)
        drawn = self.draw(rng, self.block_rows, split=split, first=number * self.block_rows)
        return {name: array[:rows] for name, array in drawn.items()}

    def sample(self, split: str, rows: int) -> dict[str, np.ndarray]:
        """The first rows of a split as arrays, without a cache; where the task is endless, also more than the split has."""
        size = self.split_sizes()[split]
        if rows > size and not self.endless:
            raise ValueError(f"the {split} split has {size} rows, and there are no others; {rows} were asked for.")
        blocks = [
            self.block(split, first // self.block_rows, min(self.block_rows, rows - first))
            for first in range(0, rows, self.block_rows)
        ]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _split_generators(self, dl_manager) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"split": split, "shards": self.shards(rows)})
            for split, rows in self.split_sizes().items()
        ]

    def shards(self, rows: int, at_most: int = SHARDS) -> list[tuple[int, int]]:
        """Where each shard starts and stops: whole blocks, so that rows do not depend on who draws them."""
        blocks = -(-rows // self.block_rows)
        count = min(at_most, blocks)
        starts = [self.block_rows * (blocks * shard // count) for shard in range(count)]
        return list(zip(starts, [*starts[1:], rows], strict=True))

    def _generate_tables(self, split: str, shards: list[tuple[int, int]]) -> Iterator[tuple[Key, pa.Table]]:
        for shard, (start, stop) in enumerate(shards):
            for first in range(start, stop, self.block_rows):
                number, rows = first // self.block_rows, min(self.block_rows, stop - first)
                yield Key(shard, number), self.table(self.block(split, number, rows))

    def table(self, arrays: dict[str, np.ndarray]) -> pa.Table:
        columns = {name: arrow_column(arrays[name], feature) for name, feature in self.columns().items()}
        return pa.table(columns)

    def _download_and_prepare(self, dl_manager, verification_mode, **kwargs) -> None:
        # A killed preparation leaves its temporary folder, which datasets would fill up and rename: start from an empty one.
        for left_over in Path(self._output_dir).iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        super()._download_and_prepare(dl_manager, verification_mode, **kwargs)


def base_parameters(builder: TaskBuilder) -> list[str]:
    return builder.BUILDER_CONFIG_CLASS.parameters()


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
