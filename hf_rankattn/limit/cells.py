"""A folder of measurements: one small file for each, written whole or not at all, and used again under the same settings."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..files.atomic import LOCK, UNFINISHED, held, write_whole


logger = logging.get_logger(__name__)
MANIFEST, CELLS = "need.json", "cells"


class Cells:
    """The measurements in a folder, or in memory if there is no folder.

    `settings` are everything that a measurement depends on besides its own key. Those of other settings are refused, or deleted with
    `overwrite`.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any], overwrite: bool = False):
        self.folder = None if folder is None else Path(folder)
        self.settings, self.overwrite = dict(settings), overwrite
        self.kept: dict[str, Any] = {}

    @contextmanager
    def opened(self) -> Iterator["Cells"]:
        """Make the folder, or check that it holds measurements of the same settings, and keep other processes out of it."""
        if self.folder is None:
            yield self
            return
        try:
            others = strangers(self.folder) if self.folder.exists() else []
            if others and not (self.folder / MANIFEST).is_file():
                raise ValueError(f"{self.folder} holds {others[0]} and no {MANIFEST}: choose another folder.")
            (self.folder / CELLS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be made: {error.strerror or error}.") from error
        with held(self.folder, f"another process measures into {self.folder}: wait until it has ended."):
            self.check()
            yield self

    def check(self) -> None:
        assert self.folder is not None
        manifest = self.folder / MANIFEST
        found = read(manifest)
        if found is not None and found != self.settings and not self.overwrite:
            changed = [name for name in self.settings if found.get(name) != self.settings[name]]
            shown = "; ".join(f"{name} was {found.get(name)} and is {self.settings[name]}" for name in changed[:3])
            raise ValueError(
                f"{self.folder} holds measurements of other settings ({shown}): choose another folder, or replace them with "
                "overwrite=True."
            )
        if self.overwrite or found is None:
            # before the manifest is replaced, so that a killed process leaves no cell under other settings
            shutil.rmtree(self.folder / CELLS)
            (self.folder / CELLS).mkdir()
        write(manifest, self.settings)

    def get(self, key: str) -> Any:
        """The measurement of this key, or None."""
        if key not in self.kept and self.folder is not None:
            self.kept[key] = read(self.folder / CELLS / f"{key}.json")
        return self.kept.get(key)

    def put(self, key: str, value: Any) -> Any:
        self.kept[key] = value
        if self.folder is not None:
            write(self.folder / CELLS / f"{key}.json", value)
        return value


def strangers(folder: Path) -> list[str]:
    """Names in a folder that are not those of a process that was killed before it wrote its manifest."""
    names = {path.name for path in folder.iterdir()} - {CELLS, LOCK}
    return sorted(name for name in names if not UNFINISHED.fullmatch(name))


def write(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        # cells are renamed into place when they are complete: the disk is damaged, or somebody edited the file
        logger.warning(f"{path} cannot be read: it is measured again.")
        return None
