"""A folder of results: one file for each finished cell, written whole or not at all, and one table of them all."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ...files.atomic import held, staged, write_whole
from .grid import Cell


if TYPE_CHECKING:
    import pandas as pd

logger = logging.get_logger(__name__)
MANIFEST = "experiment.json"


class ResultsNotWritable(ValueError):
    """A full disk, or a folder that may not be written: no later cell would fare better."""


def running_versions() -> dict[str, str]:
    """The versions on which the numbers of a run depend."""
    return {name: version(name) for name in ("hf_rankattn", "torch", "transformers", "numpy")}


class ResultFolder:
    """The results of one experiment at one scale.

    Args:
        folder: Made if it is not there.
        experiment: Its name.
        scale: `"smoke"`, `"laptop"` or `"paper"`.
        revision: Counts the times that the experiment changed what it computes. Rows of two revisions do not mix.
    """

    def __init__(self, folder: str | Path, experiment: str, scale: str, revision: int):
        self.folder = Path(folder)
        self.manifest = {"experiment": experiment, "scale": scale, "revision": revision, **running_versions()}

    @property
    def cells(self) -> Path:
        return self.folder / "cells"

    def work(self, cell: Cell) -> Path:
        """Where a cell keeps its checkpoints while it runs."""
        return self.folder / "work" / cell.id

    def open(self) -> None:
        """Make the folder, or make sure that its rows were computed by what is running now."""
        path = self.folder / MANIFEST
        with readable_errors(self.folder):
            self.cells.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(self.cells.iterdir()):
                    raise ValueError(f"{self.folder} holds cells but no {MANIFEST}: choose another --out.")
                write_whole(path, json.dumps(self.manifest, indent=2))
        found = read_json(path, dict, "a manifest of results")
        for name, running in self.manifest.items():
            if found.get(name) != running:
                raise ValueError(
                    f"the results in {self.folder} are of {name} {found.get(name)}, and {running} is running: numbers of "
                    "two versions are not mixed in one table. Choose another --out, or delete that folder."
                )

    def locked(self) -> AbstractContextManager[None]:
        """Keep a second sweep out of the folder for as long as this one works in it."""
        return held(
            self.folder, f"another process is filling {self.folder}: wait until it is done, or choose another --out."
        )

    def record(self, cell: Cell) -> list[dict[str, Any]] | None:
        """The rows of a finished cell, or None."""
        path = self.cells / f"{cell.id}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["parameters"] == dict(cell.parameters) and isinstance(found["rows"], list):
                return found["rows"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            pass
        # Rows are renamed into place when they are complete, so this is a damaged disk or somebody's edit.
        logger.warning(f"{path} cannot be read as the rows of its cell: the cell is run again.")
        return None

    def write(self, cell: Cell, rows: Sequence[dict[str, Any]]) -> None:
        record = {"parameters": dict(cell.parameters), "rows": list(rows)}
        with readable_errors(self.folder):
            write_whole(self.cells / f"{cell.id}.json", json.dumps(record, allow_nan=False, indent=1))

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if self.record(cell) is None]

    def table(self, cells: Sequence[Cell]) -> "pd.DataFrame":
        """All rows of these cells, in the order of the grid, whoever computed them when."""
        import pandas as pd

        rows = []
        for cell in cells:
            for row in self.record(cell) or []:
                rows.append({"cell": cell.id, **cell.parameters, **row})
        return pd.DataFrame(rows)

    def write_table(self, table: "pd.DataFrame") -> Path:
        path = self.folder / "table.parquet"
        with readable_errors(self.folder), staged(path) as staging:
            table.to_parquet(staging, index=False)
        return path


def read_json(path: Path, kind: type, what: str) -> Any:
    """What a JSON file of a results folder holds: a `dict` or a `list`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, kind):
            raise ValueError(f"it holds a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {what} ({error}): choose another --out.") from None
    return found


@contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsNotWritable(
            f"{folder} cannot be written: {error.strerror or error}. What was finished is intact: mend that, and the same "
            "command goes on from there."
        ) from error
