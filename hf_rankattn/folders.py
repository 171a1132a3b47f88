"""Write a folder, or a file, as a whole or not at all."""

import os
import platform
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# ends names that nobody else would give; a lock on a network's disk may hold on one machine only
LEFTOVER = f".{zlib.crc32(platform.node().encode()):08x}.rankattn-unfinished"


@contextmanager
def fresh_folder(folder: str | Path, overwrite: bool, marker: str, what: str, word: str = "") -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and is gone when it does not.

    Args:
        folder: The folder to make. It must not exist, unless `overwrite` is given; then it is replaced at the end.
        overwrite: Whether an existing folder may be replaced.
        marker: A file that an existing folder must hold to be replaced: nobody's other files are deleted.
        what: What such a folder holds, for messages.
        word: What the text of the marker must contain, where a file of that name says little.
    """
    folder = Path(folder).resolve()
    check_replaceable(folder, overwrite, marker, what, word)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        staging, hold = new_staging(folder)
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
    """A hold on a folder, which the system lets go when the process ends, however it ends; None if there is none to be had."""
    if fcntl is None:
        return None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or the file system knows no locks
        os.close(handle)
        return None
    return handle


def new_staging(folder: Path) -> tuple[Path, int | None]:
    """A new folder beside `folder`, and the hold on it. It has the name of a leftover only when it is held."""
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    hold = lock(staging)
    if hold is not None:
        try:
            staging = staging.rename(staging.with_name(staging.name + LEFTOVER))
        except OSError:  # a name too long to be longer still: nobody will clean up, if it comes to that
            pass
    return staging, hold


def remove_leftovers(folder: Path) -> None:
    """Delete what runs for the same folder on this machine left beside it when they were killed."""
    unfinished = re.compile(re.escape(f".{folder.name}-") + r"[a-z0-9_]{8}" + re.escape(LEFTOVER))
    try:
        names = os.listdir(folder.parent)
    except OSError:  # one may write there, and not look
        return
    for name in filter(unfinished.fullmatch, names):
        hold = lock(folder.parent / name)
        if hold is not None:
            shutil.rmtree(folder.parent / name, ignore_errors=True)
            os.close(hold)


def publish(staging: Path, folder: Path) -> None:
    """Give `staging` its name, unless somebody else has taken it since the work began."""
    open_to_umask(staging)
    try:
        if folder.is_dir():  # POSIX would replace an empty folder in silence
            raise FileExistsError
        staging.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise
        raise ValueError(
            f"{folder} was made by another process meanwhile, and is left as it is: choose another folder, or pass "
            "overwrite=True (--overwrite)."
        ) from error


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which takes its place when the block ends well."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=path.suffix)
    os.close(handle)
    staging = Path(name)
    try:
        yield staging
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        staging.chmod(0o666 & ~current_umask())
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def open_to_umask(folder: Path) -> None:
    """Give a temporary folder, which is private, the mode that a new folder of the user's would have."""
    folder.chmod(0o777 & ~current_umask())


def current_umask() -> int:
    """The umask, which can be read by setting it only."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def check_replaceable(folder: Path, overwrite: bool, marker: str, what: str, word: str = "") -> None:
    if not folder.exists():
        return
    if not overwrite:
        raise ValueError(
            f"{folder} exists already: choose another folder, or pass overwrite=True (--overwrite) to replace it."
        )
    found = folder / marker
    if not found.is_file() or (word and word not in found.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(
            f"{folder} does not hold {what} (no such {marker}), so it is not replaced: choose another folder."
        )
    if folder == Path.cwd() or folder in Path.cwd().parents:
        raise ValueError(f"{folder} is the folder you work in, or above it: choose another folder.")


def replace_folder(staging: Path, folder: Path) -> None:
    """Put `staging` in the place of `folder`, which is deleted only when its successor stands."""
    staging.chmod(folder.stat().st_mode)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    old = aside / folder.name
    try:
        folder.rename(old)
    except BaseException:
        aside.rmdir()
        raise
    try:
        staging.rename(folder)
    except BaseException as error:
        try:
            old.rename(folder)
        except OSError:
            raise OSError(f"{folder} could not be replaced; what it held is in {old}.") from error
        aside.rmdir()
        raise
    shutil.rmtree(aside)
