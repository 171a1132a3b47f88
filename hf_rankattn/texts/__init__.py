"""A small text written for this package, so that everything can be measured with no text at hand and no network."""

from importlib.resources import files
from pathlib import Path


def package_text() -> list[str]:
    """The paragraphs of the package's own text, about a hundred words each, on a hundred everyday subjects.

    >>> len(package_text()) >= 96
    True
    """
    return paragraphs((files(__package__) / "paragraphs.txt").read_text(encoding="utf-8"))


def file_text(file: str | Path) -> list[str]:
    """The paragraphs of a UTF-8 file, or a `ValueError` where it is none; there may be none in it."""
    try:
        return paragraphs(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}") from error


def paragraphs(text: str) -> list[str]:
    """What stands between empty lines, or the lines where none is empty; each on one line.

    >>> paragraphs("one\\nbread\\n\\n\\ntwo"), paragraphs("one\\ntwo\\n")
    (['one bread', 'two'], ['one', 'two'])
    """
    parts = text.split("\n\n") if "\n\n" in text.strip() else text.splitlines()
    return [" ".join(part.split()) for part in parts if part.strip()]
