"""Hooks of mkdocs for `make docs`: files outside of docs/ that a page links to become pages of the site.

A link such as `../examples/run_points.py` is right where the pages are read in the repository. The site does not contain that file, so
it gets a page with the text of the file, and the link is changed while the site is built. The pages themselves stay as they are.
"""

import ast
import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from pymdownx.slugs import slugify


ROOT = Path(__file__).parent.parent
DOCS, SOURCE = "docs/", "source/"
# the target of a link: relative, and without the anchor
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|data:|#)([^)#\s]+)")
FIGURE = re.compile(r"^(!\[[^\]]*\]\(((?:../)?images/[^)]+)\))$", flags=re.MULTILINE)


def target_of(page: str, link: str) -> str:
    """The path in the repository that a link of a page leads to; both begin at the root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def in_site(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        return f"{SOURCE}{path}/index.md"
    return f"{SOURCE}{path}" if path.endswith(".md") else f"{SOURCE}{path}.md"


def in_repository(uri: str) -> str:
    """The file of the repository that a page of the site was made from."""
    if not uri.startswith(SOURCE):
        return DOCS + uri
    path = uri.removeprefix(SOURCE)
    return path if (ROOT / path).is_file() else path.removesuffix("/index.md").removesuffix(".md")


def fenced(text: str, language: str) -> str:
    fence = "`" * (3 + max((len(run) for run in re.findall(r"`{3,}", text)), default=0) // 3 * 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def notebook_page(text: str) -> str:
    """A notebook with the outputs that are stored in it."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(fenced(source, "python") if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", []):
            picture = output.get("data", {}).get("image/png")
            if picture:
                parts.append(f"![figure of the cell above](data:image/png;base64,{''.join(picture).strip()})")
            else:
                parts.append(fenced("".join(output.get("text", [])), "text"))
    return "\n\n".join(parts)


def folder_page(path: Path) -> str:
    """The files of a folder, with the first line of the docstring of each script."""
    lines = [f"# {path.name}\n", "| file | |", "|---|---|"]
    for file in sorted(path.iterdir()):
        if file.is_file() and not file.name.startswith((".", "__")):
            doc = ast.get_docstring(ast.parse(file.read_text())) if file.suffix == ".py" else None
            lines.append(f"| [{file.name}]({file.name}) | {(doc or '').split(chr(10))[0]} |")
    return "\n".join(lines)


def page_of(path: Path) -> str:
    if path.is_dir():
        return folder_page(path)
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # a card begins with metadata
    if path.suffix == ".ipynb":
        return notebook_page(text)
    language = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    return f"# {path.relative_to(ROOT).as_posix()}\n\n{fenced(text, language)}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    # the anchors that the repository's web view makes of headings
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a page links to, and for those that these link to."""
    waiting = [(DOCS + file.src_uri, file.content_string) for file in files.documentation_pages()]
    done: set[str] = set()
    while waiting:
        page, text = waiting.pop()
        for link in LINK.findall(text):
            path = target_of(page, link)
            if path in done or path.startswith((DOCS, "../")) or not (ROOT / path).exists():
                continue
            done.add(path)
            uri, content = in_site(path), page_of(ROOT / path)
            files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            # links of a folder's page begin in the folder
            waiting.append((f"{path}/index.md" if (ROOT / path).is_dir() else path, content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    origin = in_repository(uri)
    if (ROOT / origin).is_dir():
        origin += "/index.md"
    elif not origin.endswith((".md", ".ipynb")):
        page.meta["search"] = {"exclude": True}
        return markdown  # source code has no links

    def rewritten(match: re.Match) -> str:
        path = target_of(origin, match[1])
        return posixpath.relpath(in_site(path), posixpath.dirname(uri) or ".")

    # as in the repository's web view, a figure opens in full size
    return FIGURE.sub(r"[\1](\2)", LINK.sub(rewritten, markdown))


__all__: list[Callable] = [on_config, on_files, on_page_markdown]
