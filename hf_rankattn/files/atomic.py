"""Atomic writes: a folder or a file is written whole, or not at all; and folders that one process at a time may fill."""

import os
import platform
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

# Suffixes of hidden folders beside a result. They name the machine, as a lock on a network disk can hold on one machine
# only.
MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"
LEFTOVER = f".{MACHINE}.rankattn-unfinished"  # a new result that is being written
REPLACED = f".{MACHINE}.rankattn-replaced"  # holds the old result while the new one takes its name
# names of the temporary files of `staged`, which a killed process leaves
UNFINISHED = re.compile(r"\..+(\.\w+)-[0-9a-f]{8}\1")
LOCK = ".lock"


def is_own_file(path: Path, folder: Path) -> bool:
    """Whether `path` is a regular file inside `folder` (resolved), or a link of the Hub cache to its blobs."""
    roots = (folder, folder.parent.parent / "blobs") if folder.parent.name == "snapshots" else (folder,)
    target = Path(os.path.realpath(path))  # `resolve` raises a RuntimeError for a loop of links
    return target.is_file() and any(root in target.parents for root in roots)


@contextmanager
def fresh_folder(folder: str | Path, overwrite: bool, marker: str, what: str, word: str = "") -> Iterator[Path]:
    """A temporary folder that replaces `folder` at the end of the block, or is deleted if the block fails.

    With `overwrite` an existing folder is replaced, if it holds a file `marker` that contains `word`, so that no other
    files are deleted. `what` names the content of such a folder in messages.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder, overwrite, marker, what, word)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for hidden in abandoned(folder, LEFTOVER):
            shutil.rmtree(hidden, ignore_errors=True)
        staging, hold = new_hidden(folder, LEFTOVER)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made: {error}.") from error
    try:
        yield staging
        if overwrite and folder.exists():
            check_replaceable(folder, overwrite, marker, what, word)
            replace_folder(staging, folder)
        else:
            publish(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        if hold is not None:
            os.close(hold)


def lock(folder: Path) -> int | None:
    """A lock on a folder, which the system releases when the process ends; None if it is locked or cannot be locked."""
    if fcntl is None:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is locked, or the file system has no locks
        os.close(handle)
        return None
    return handle


def new_hidden(folder: Path, suffix: str) -> tuple[Path, int | None]:
    """A new folder beside `folder`, and the lock on it. Only a locked folder gets the suffix."""
    hidden = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    hidden.mkdir()
    hold = lock(hidden)
    if hold is not None:
        with suppress(OSError):  # the name is too long: if the process is killed, this folder must be removed by hand
            hidden = hidden.rename(hidden.with_name(hidden.name + suffix))
    return hidden, hold


def abandoned(folder: Path, suffix: str) -> Iterator[Path]:
    """The hidden folders beside `folder` that killed processes of this machine left, each locked while it is used."""
    pattern = re.compile(re.escape(f".{folder.name}-") + r"[a-z0-9_]{8}" + re.escape(suffix))
    try:
        names = os.listdir(folder.parent)
    except OSError:  # no such folder, or one that may not be listed
        return
    for name in filter(pattern.fullmatch, names):
        hold = lock(folder.parent / name)
        if hold is not None:
            try:
                yield folder.parent / name
            finally:
                os.close(hold)


def finish_replacement(folder: Path, marker: str | None = None, word: str = "") -> None:
    """Clean up after a process that was killed while it replaced `folder`.

    If `folder` is missing, the old result is restored. If `folder` is complete (it holds the `marker`), the old result is
    deleted. Otherwise both are kept.
    """
    for hidden in abandoned(folder, REPLACED):
        old = hidden / folder.name
        try:
            if not old.exists():  # killed before the old result was moved, or after it was deleted
                hidden.rmdir()
            elif not folder.exists():
                old.rename(folder)
                hidden.rmdir()
                logger.warning(f"{folder} is restored: a process was killed while it replaced this folder.")
            elif marker is not None and holds(folder, marker, word):
                shutil.rmtree(hidden)
                logger.warning(f"{hidden} is deleted: it held the old version of {folder}, which was replaced.")
            else:
                logger.warning(f"{old} is an old version of {folder}. Delete it if you do not need it.")
        except OSError as error:
            logger.warning(f"{hidden} was left by a process that was killed while it replaced {folder}: {error}.")


def publish(staging: Path, folder: Path) -> None:
    """Rename `staging` to `folder`, unless another process has made `folder` meanwhile."""
    readable_by_others(staging)
    try:
        if folder.is_dir():  # POSIX would replace an empty folder in silence
            raise FileExistsError
        staging.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise
        raise ValueError(
            f"{folder} was made by another process meanwhile: choose another folder, or replace it with overwrite=True."
        ) from error


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` at the end of the block, or is deleted if the block fails."""
    staging = path.with_name(f".{path.name}-{secrets.token_hex(4)}{path.suffix}")
    try:
        handle = os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except OSError as error:
        raise type(error)(error.errno, f"{path} cannot be written: {error.strerror}") from error
    mode = os.fstat(handle).st_mode & 0o777
    os.close(handle)
    try:
        yield staging
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        staging.chmod(mode)  # the block can replace the file
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with staged(path) as staging:
        staging.write_text(text, encoding="utf-8", newline="")


@contextmanager
def held(folder: Path, busy: str) -> Iterator[None]:
    """Keep other processes out of a folder of results, or raise a `ValueError` that says `busy`.

    The temporary files that a killed process left in the folder and in its subfolders are deleted.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(busy) from None
    try:
        for path in (*folder.iterdir(), *folder.glob("*/.*")):
            if UNFINISHED.fullmatch(path.name):
                path.unlink()
        yield
    finally:
        lock.release()


def readable_by_others(folder: Path) -> None:
    """Give the files in a new folder the permissions that the umask allows: safetensors writes files of mode 0600.

    The folder was made by `mkdir`, so its mode shows what the umask allows.
    """
    allowed = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o777 | allowed)


def holds(folder: Path, marker: str, word: str = "") -> bool:
    """Whether `folder` has a file `marker` that contains `word`."""
    found = folder / marker
    return found.is_file() and word in found.read_text(encoding="utf-8", errors="replace")


def check_replaceable(folder: Path, overwrite: bool, marker: str, what: str, word: str = "") -> None:
    """Refuse a folder that must not be written; the arguments are those of `fresh_folder`."""
    finish_replacement(folder, marker, word)
    if not folder.exists():
        return
    if not overwrite:
        raise ValueError(f"{folder} exists already: choose another folder, or replace it with overwrite=True.")
    if not holds(folder, marker, word):
        raise ValueError(f"{folder} does not hold {what} (no such {marker}) and is not replaced: choose another.")
    if folder == Path.cwd() or folder in Path.cwd().parents:
        raise ValueError(f"{folder} is or contains the working directory: choose another folder.")


def replace_folder(staging: Path, folder: Path) -> None:
    """Replace `folder` by `staging`. A process that is killed between the two renames leaves no `folder`;
    `finish_replacement` restores it.
    """
    readable_by_others(staging)
    staging.chmod(folder.stat().st_mode)
    hidden, hold = new_hidden(folder, REPLACED)
    old = hidden / folder.name
    try:
        try:
            folder.rename(old)
            staging.rename(folder)
        except BaseException as error:
            if old.exists():
                try:
                    old.rename(folder)
                except OSError:
                    raise OSError(f"{folder} could not be replaced; what it held is in {old}.") from error
            hidden.rmdir()
            raise
        shutil.rmtree(hidden)
    finally:
        if hold is not None:
            os.close(hold)
