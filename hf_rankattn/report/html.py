"""One self-contained HTML page from claims, tables and figures: no request, no script, a light and a dark theme."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..files.atomic import write_whole


if TYPE_CHECKING:
    from matplotlib.figure import Figure

GENERATOR = "hf_rankattn"
# svg_picture replaces this colour by that of the text around the drawing
INK = "#0b0c0d"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture:
    """A figure of the page: an `<img>` or `<svg>`, its caption, and whether it has the full width of the page."""

    markup: Markup
    caption: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: names of columns, rows of text, and a caption."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Grid] = ()
    pictures: Sequence[Picture] = ()
    commands: Sequence[str] = ()


def claims_grid(claims: Sequence[Mapping[str, Any]], caption: str = "") -> Grid:
    """The claims of a `claims.json`, one row each."""
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
    """A figure as an inline SVG, with [`INK`] in the colour of the text.

    `alt` is the text for readers who cannot see it. `name` is the prefix of ids, so it must be unique on the page.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    # HTML implies these namespaces; without them the page contains no address at all
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor")
    size = re.search(r'viewBox="[^"]*"', text)
    label = escape(alt)
    opening = f'<svg {size[0] if size else ""} role="img" aria-label="{label}"><title>{label}</title>'
    return Picture(Markup(re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)), caption)


def page_templates() -> Environment:
    """The templates of pages and drawings, which escape every text."""
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(loader=loader, undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def render_page(
    title: str, lead: str, sections: Sequence[Section], *, footer: Sequence[str] = (), kind: str = "report"
) -> str:
    """The page as text. All text of tables and paragraphs is escaped.

    `kind` is what wrote the page; [`check_writable`] reads it before a page is replaced.
    """
    template = page_templates().get_template("page.html")
    return template.render(title=title, lead=lead, sections=sections, footer=footer, generator=f"{GENERATOR} {kind}")


def write_page(text: str, path: str | Path, overwrite: bool = False) -> Path:
    """Write a page atomically. With `overwrite` it replaces an existing page of rankattn, and no other file."""
    path = Path(path)
    check_writable(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
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
    # opening a named pipe would wait for ever
    if path.exists() and not (path.is_file() and f'content="{GENERATOR}' in path.read_text("utf-8", "replace")[:2000]):
        raise ValueError(f"{path} was not written by rankattn, so it is not replaced: choose another file.")
