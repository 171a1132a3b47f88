"""Claims, tables and figures to one page that needs nothing but itself: no request, no script, light and dark."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..files.atomic import staged


if TYPE_CHECKING:
    from matplotlib.figure import Figure

GENERATOR = "hf_rankattn"
# what is drawn in this colour takes that of the text around it
INK = "#0b0c0d"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture:
    """A figure that is part of the page.

    Args:
        markup: An `<img>` or an `<svg>`, from [`png_picture`] or [`svg_picture`].
        caption: What stands below it.
        wide: Whether it takes the width of the page, and not half of it.
    """

    markup: Markup
    caption: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: names of columns, rows of text, and what it is a table of."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Grid] = ()
    pictures: Sequence[Picture] = ()
    commands: Sequence[str] = field(default=())


def claims_grid(claims: Sequence[Mapping[str, Any]], caption: str = "") -> Grid:
    """Claims as the experiments write them to `claims.json`, a row each."""
    rows = []
    for claim in claims:
        verdict = claim["verdict"] + (f": {claim['why']}" if claim.get("why") else "")
        rows.append([claim["claim"], claim["measured"], claim["published"] or "-", claim["source"], verdict])
    return Grid(["claim", "here", "published", "source", "verdict"], rows, caption)


def png_picture(data: bytes, alt: str, caption: str = "", wide: bool = True) -> Picture:
    """A PNG file as part of the page, on a light card in either theme."""
    if not data.startswith(PNG_SIGNATURE):
        raise ValueError(f"the figure {alt!r} is not a PNG file.")
    source = "data:image/png;base64," + base64.b64encode(data).decode()
    return Picture(Markup('<img src="{}" alt="{}">').format(source, alt), caption, wide)


def svg_picture(figure: "Figure", alt: str, name: str, caption: str = "") -> Picture:
    """A figure as drawing inside of the page, whose ink is the colour of the text.

    Args:
        figure: What to draw.
        alt: What somebody needs to know who cannot see it.
        name: Unlike that of any other drawing on the page: ids are made of it.
        caption: What stands below it.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    # a page knows these namespaces without being told, and so holds no address at all
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor")
    size = re.search(r'viewBox="[^"]*"', text)
    label = escape(alt)
    opening = f'<svg {size[0] if size else ""} role="img" aria-label="{label}"><title>{label}</title>'
    return Picture(Markup(re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)), caption)


def render_page(
    title: str, lead: str, sections: Sequence[Section], *, footer: Sequence[str] = (), kind: str = "report"
) -> str:
    """The whole page as text; whatever is in tables and paragraphs appears as it is written, and never becomes HTML.

    Args:
        title: Of the window, and the first heading.
        lead: The paragraph below it.
        sections: In their order.
        footer: Lines of small print.
        kind: What made it, for those who later ask whether this page may be replaced.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return templates.get_template("page.html").render(
        title=title, lead=lead, sections=sections, footer=footer, generator=f"{GENERATOR} {kind}"
    )


def write_page(text: str, path: str | Path, overwrite: bool = False) -> Path:
    """Write a page as a whole or not at all; what exists is not replaced unasked, and nothing but a page is."""
    path = Path(path)
    check_writable(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged(path) as staging:
            staging.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def check_writable(path: Path, overwrite: bool) -> None:
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"--out is a page, so its name must end in .html, got {path}.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file.")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: choose another file, or add --overwrite.")
    if path.exists() and f'content="{GENERATOR}' not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise ValueError(f"{path} was not written by rankattn, so it is not replaced: choose another file.")
