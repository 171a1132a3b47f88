"""Texts from the package, from a file or from a dataset, as lists of strings."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints import data_source, one_line


if TYPE_CHECKING:
    from datasets import IterableDataset

KINDS = ("news", "documentation", "code", "terms")


def packaged(kind: str) -> list[str]:
    return paragraphs((files(__package__) / f"{kind}.txt").read_text(encoding="utf-8"))


def package_text() -> list[str]:
    """The paragraphs of the package's own text, about a hundred words each, on a hundred everyday subjects.

    >>> len(package_text()) >= 96
    True
    """
    return packaged("paragraphs")


def calibration_text() -> list[str]:
    """Texts of several kinds to calibrate a conversion on: 20 paragraphs of [`package_text`], and ten of each other kind.

    The other kinds are news, software documentation, Python code and legal terms. A conversion that is calibrated on prose
    alone loses more on them.

    >>> len(calibration_text())
    60
    """
    return [*package_text()[:20], *(text for kind in KINDS for text in packaged(kind))]


def file_text(file: str | Path) -> list[str]:
    """The paragraphs of a UTF-8 file, which can be none; raises a `ValueError` if the file cannot be read."""
    return paragraphs(utf8_text(file))


def without_overlap(texts: Iterable[str], others: Iterable[str], words: int = 8) -> list[str]:
    """The texts that share no sequence of `words` words with one of the `others`; a shorter text is one sequence.

    >>> without_overlap(["a b c d", "b c e", "x y"], ["z a b c", "x y"], words=3)
    ['b c e']
    """

    def sequences(text: str) -> set[tuple[str, ...]]:
        split = text.lower().split()
        return {tuple(split[start : start + words]) for start in range(max(len(split) - words, 0) + 1)}

    found = set().union(*map(sequences, others))
    return [text for text in texts if found.isdisjoint(sequences(text))]


def utf8_text(file: str | Path) -> str:
    try:
        if Path(file).exists() and not Path(file).is_file():  # opening a named pipe would wait for ever
            raise OSError("it is not a regular file")
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from error


def paragraphs(text: str) -> list[str]:
    """The parts between empty lines, or the lines if none is empty; each on one line.

    >>> paragraphs("one\\nbread\\n\\n\\ntwo"), paragraphs("one\\ntwo\\n")
    (['one bread', 'two'], ['one', 'two'])
    """
    parts = text.split("\n\n") if "\n\n" in text.strip() else text.splitlines()
    return [" ".join(part.split()) for part in parts if part.strip()]


def read_texts(
    text: Path | None = None,
    dataset: str | None = None,
    split: str = "test",
    column: str | None = None,
    examples: int = 32,
) -> tuple[list[str], str]:
    """At most `examples` texts that are not empty, and their source: a file, a dataset, or the package."""
    if text is not None and dataset is not None:
        raise ValueError("give a text file or a dataset, not both.")
    if examples < 1:
        raise ValueError(f"`examples` must be at least 1, got {examples}.")
    if text is not None:
        parts: Iterable[str] = file_text(text)
        source = Path(text).name
    elif dataset is not None:
        parts, source = dataset_texts(dataset, split, column), f"dataset {dataset}, {split}"
    else:
        parts, source = package_text(), "the package's own text"
    texts: list[str] = []
    for part in parts:
        if joined := " ".join(part.split()):
            texts.append(joined)
        if len(texts) == examples:
            break
    if not texts:
        raise ValueError(f"there is no text in {source}.")
    return texts, source


def dataset_texts(name: str, split: str, column: str | None) -> Iterator[str]:
    rows = stream_rows(name, split)
    with dataset_errors(name, split):
        strings = text_columns(rows)
    if not strings:
        raise ValueError(f"{name} has no text column: choose another dataset.")
    there_are = f"its text columns are {', '.join(strings)}"
    if column is None and len(strings) != 1:
        raise ValueError(f"give `column`, the column of {name} to read: {there_are}.")
    column = column or strings[0]
    if column not in strings:
        raise ValueError(f"{name} has no text column {column!r}: {there_are}.")
    with dataset_errors(name, split):
        yield from (row.get(column) or "" for row in rows)


@contextmanager
def dataset_errors(name: str, split: str) -> Iterator[None]:
    """Turn the errors of datasets, which have many types, into a `ValueError`."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"dataset {name}, split {split}, cannot be loaded: {one_line(error)}") from error


def stream_rows(name: str, split: str) -> "IterableDataset":
    """The rows of a split of a dataset, a folder or a Hub name, read lazily. Images and sounds are not decoded."""
    from datasets import load_dataset

    with dataset_errors(name, split):
        rows = load_dataset(data_source(name), split=split, streaming=True)
        # to decode an image, datasets would request it if it is named by URL
        return rows if rows.features is None else rows.decode(False)


def text_columns(rows: "IterableDataset") -> list[str]:
    """The columns of strings; in a format without types, such as CSV, those with a string in the first 100 rows."""
    from datasets import Value

    if rows.features is not None:
        features = rows.features.items()
        return [name for name, feature in features if isinstance(feature, Value) and "string" in feature.dtype]
    # rows of JSON lines can have different keys
    return list(dict.fromkeys(name for row in rows.take(100) for name, value in row.items() if isinstance(value, str)))
