"""Tasks as Parquet files with a card; `datasets.load_dataset` reads them without this package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pyarrow.parquet as pq
from huggingface_hub import DatasetCard, DatasetCardData, HfApi, constants
from huggingface_hub.errors import HFValidationError, HTTPError

from ..files.atomic import check_replaceable, fresh_folder
from ..files.checkpoints import one_line
from ..hub.cards import TEMPLATES
from ._baselines import task_baselines
from ._building import TaskBuilder
from ._loading import task_builder


FILE_BYTES = 500_000_000
SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}
# a folder must hold this file with this word to be replaced
MARK = {"marker": "README.md", "what": "data of a task", "word": "rank-attention-task"}


@dataclass
class MadeData:
    """The result of [`make_data`]: a folder, the rows of each split of each config, and the baselines on its card."""

    folder: str
    rows: dict[str, dict[str, int]]
    baselines: dict[str, dict[str, dict[str, float]]]
    pushed: str | None = None


def make_data(
    task: str,
    folder: str | Path,
    configs: Sequence[str] = (),
    *,
    push: str | None = None,
    overwrite: bool = False,
    license: str | None = None,
    progress: Callable[[int], Any] = lambda rows: None,
    **parameters: Any,
) -> MadeData:
    """Write a task as Parquet with a dataset card, in one atomic step.

    Args:
        task (`str`): Name of the task.
        folder: The folder to write. It must not exist, unless `overwrite` is given; then it is replaced at the end.
        configs (`Sequence[str]`, *optional*): Named configs, which become configs of the dataset; by default the main one.
        push (`str`, *optional*): A dataset repository of the Hub that also gets the files.
        overwrite (`bool`, *optional*, defaults to `False`): Whether an existing folder of such data may be replaced.
        license (`str`, *optional*): Licence of the data, for the card.
        progress (*optional*): Called with the number of new rows after each write.
        **parameters: Parameters of the task that replace those of the configs.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder, overwrite, **MARK)
    with TemporaryDirectory() as cache:  # a builder makes a folder for its cache, and nothing is cached here
        builders = [task_builder(task, config, cache_dir=cache, **parameters) for config in (configs or (None,))]
    names = [builder.config.name for builder in builders]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two of the configs have the same name {min(repeated)!r}: write them to separate folders.")
    repo = open_repository(push, names) if push else None
    with fresh_folder(folder, overwrite, **MARK) as staging:
        baselines = {builder.config.name: task_baselines(builder) for builder in builders}
        infos = [write_parquet(builder, staging, progress) for builder in builders]
        card_of(builders, infos, baselines, repo or folder.name, license).save(staging / "README.md")
    rows = {builder.config.name: builder.split_sizes() for builder in builders}
    return MadeData(str(folder), rows, baselines, upload(folder, repo, names) if repo else None)


def write_parquet(builder: TaskBuilder, folder: Path, progress: Callable[[int], Any]) -> datasets.DatasetInfo:
    """Write the splits of one config to a folder of its name, with the Hub's file names; return its info."""
    info = builder.info.copy()
    info.config_name = builder.config.name
    info.splits = datasets.SplitDict(dataset_name=builder.dataset_name)
    target = folder / info.config_name
    target.mkdir()
    row_bytes = builder.table(builder.sample("train", 1)).nbytes
    for split, rows in builder.split_sizes().items():
        shards = builder.shards(rows, at_most=-(-rows * row_bytes // FILE_BYTES))
        written = 0
        for number, shard in enumerate(shards):
            path = target / f"{split}-{number:05d}-of-{len(shards):05d}.parquet"
            with open_parquet(path, builder) as writer:
                for _, table in builder._generate_tables(split, [shard]):
                    writer.write_table(table.cast(writer.schema))
                    written += table.nbytes
                    progress(len(table))
        info.splits.add(datasets.SplitInfo(split, num_bytes=written, num_examples=rows))
    info.dataset_size = sum(split.num_bytes for split in info.splits.values())
    info.download_size = sum(path.stat().st_size for path in target.iterdir())
    return info


def open_parquet(path: Path, builder: TaskBuilder) -> pq.ParquetWriter:
    """Split the bytes of floats: dictionaries, Parquet's default, make files of random floats larger."""
    floats = [name for name, feature in builder.columns().items() if isinstance(feature, datasets.Array2D)]
    encoding = {
        "use_dictionary": [f"{name}.list.element" for name in builder.columns() if name not in floats],
        "use_byte_stream_split": [f"{name}.list.element.list.element" for name in floats],
    }
    return pq.ParquetWriter(path, builder.info.features.arrow_schema, compression="zstd", **encoding)


def card_of(
    builders: list[TaskBuilder], infos: list[datasets.DatasetInfo], baselines: dict, repo_id: str, license: str | None
) -> DatasetCard:
    """The card of some configs of one task, with the metadata by which `load_dataset` finds splits and features."""
    sections = [
        {
            "name": builder.config.name,
            "parameters": shown_parameters(builder),
            "rows": builder.split_sizes(),
            "columns": {column: described(feature) for column, feature in builder.columns().items()},
            "baselines": baselines[builder.config.name],
            "model_arguments": builder.model_arguments(),
        }
        for builder in builders
    ]
    first, largest = builders[0], max(sum(builder.split_sizes().values()) for builder in builders)
    configs = []
    for name, builder in zip(baselines, builders, strict=True):
        files = [{"split": split, "path": f"{name}/{split}-*"} for split in builder.split_sizes()]
        default = {"default": True} if builder is first else {}
        configs.append({"config_name": name, **default, "data_files": files})
    data = DatasetCardData(
        license=license,
        pretty_name=repo_id.rsplit("/", 1)[-1],
        size_categories=[next((name for limit, name in SIZES.items() if largest < limit), "n>10M")],
        tags=["rank-attention", "rank-attention-task", "synthetic", first.task_name()],
        configs=configs,
        dataset_info=[info._to_yaml_dict() for info in infos],
    )
    return DatasetCard.from_template(
        data,
        template_path=str(TEMPLATES / "dataset_card.md"),
        task=first.task_name(),
        repo_id=repo_id,
        description=first.info.description,
        labels=first.LABELS,
        differences=first.DIFFERENCES,
        citation=first.CITATION,
        sections=sections,
    )


def shown_parameters(builder: TaskBuilder) -> dict[str, Any]:
    """Parameters of simple types; the card does not repeat the user's text."""
    values = {name: getattr(builder.config, name) for name in builder.config.parameters()}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float) and name != "texts"}


def described(feature: Any) -> str:
    if isinstance(feature, datasets.Array2D):
        return f"{feature.dtype}, {' x '.join(map(str, feature.shape))}"
    return f"{feature.feature.dtype}, {feature.length}"


def open_repository(repo: str, names: list[str]) -> str:
    """Check, before anything is drawn, that the repository can be written and that the new card hides no other config."""
    if constants.is_offline_mode():
        raise ValueError(f"nothing can be pushed to {repo!r} while HF_HUB_OFFLINE is set.")
    api = HfApi()
    try:
        repo = api.create_repo(repo, repo_type="dataset", exist_ok=True).repo_id
        if not api.file_exists(repo, "README.md", repo_type="dataset"):
            return repo
        path = api.hf_hub_download(repo, "README.md", repo_type="dataset")
    except (HTTPError, HFValidationError) as error:
        raise ValueError(f"{repo!r} cannot be written: {one_line(error)}") from error
    held = DatasetCard.load(path, ignore_metadata_errors=True).data.get("configs") or []
    if others := [entry["config_name"] for entry in held if entry["config_name"] not in names]:
        raise ValueError(
            f"{repo} has other configs, which a new card would hide: {', '.join(others)}. Write all of them in one call, or "
            "push to another repository."
        )
    return repo


def upload(folder: Path, repo: str, names: list[str]) -> str:
    try:
        commit = HfApi().upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=folder,
            commit_message=f"Upload {', '.join(names)}",
            delete_patterns=[f"{name}/*" for name in names],  # an earlier version may have more shards
        )
    except HTTPError as error:
        raise ValueError(f"{folder} is written, but could not be uploaded to {repo!r}: {one_line(error)}") from error
    return str(commit)
