"""A small text written for this package, so that everything can be measured with no text at hand and no network."""

from importlib.resources import files


def package_text() -> list[str]:
    """The paragraphs of the package's own text, about a hundred words each, on a hundred everyday subjects.

    >>> len(package_text()) >= 96
    True
    """
    text = (files(__package__) / "paragraphs.txt").read_text(encoding="utf-8")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
