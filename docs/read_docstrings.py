"""An extension of griffe for `make docs`: docstrings in the style of transformers as Markdown.

The docstrings are read from the source, so neither torch nor transformers has to be installed where the site is built.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe


API = Path(__file__).parent / "api"
# [`name`] and [`~package.name`], as transformers writes references
REFERENCE = re.compile(r"\[`~?([\w.]+)`\](?![(\[])")


def documented() -> dict[str, str]:
    """Name -> identifier of every entry of the API pages."""
    text = "".join(page.read_text() for page in API.glob("*.md"))
    return {
        identifier.split(".")[-1]: identifier for identifier in re.findall(r"^::: (\S+)", text, flags=re.MULTILINE)
    }


def linked(text: str, names: dict[str, str]) -> str:
    """References become links where a page has the name, else code."""

    def link(match: re.Match) -> str:
        name = match[1].split(".")[-1]
        return f"[`{name}`][{names[name]}]" if name in names else f"`{match[1].removeprefix('hf_rankattn.')}`"

    return REFERENCE.sub(link, text)


def listed(lines: list[str]) -> Iterator[str]:
    """The lines of an `Args:` section as a list."""
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        start = re.match(r"(\*{0,2}\w+(?:, \w+)*)( \(.*?\))?:\s*(.*)", line)
        if start and not line.startswith(" "):
            name = start[1].replace("*", r"\*")
            yield f"- **{name}**{start[2] or ''}: {start[3]}".rstrip()
        else:
            yield f"    {line.strip()}".rstrip()


def section(lines: list[str]) -> list[str]:
    """The lines from the start that are indented or empty."""
    end = next((place for place, line in enumerate(lines) if line.strip() and not line.startswith(" ")), len(lines))
    return lines[:end]


def rendered(doc: str) -> Iterator[str]:
    lines = doc.splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("```") or line.startswith(">>>"):
            # doctests, inside of a fence or not
            if line.startswith(">>>"):
                lines.insert(0, line)
                end = next((place for place, text in enumerate(lines) if not text.strip()), len(lines))
            else:
                end = lines.index("```")
            example, lines = lines[:end], lines[end + (not line.startswith(">>>")) :]
            yield from ["", "```pycon", *example, "```"]
        elif line in ("Args:", "Returns:"):
            inside = section(lines)
            lines = lines[len(inside) :]
            if line == "Args:":
                yield from ["", *listed(inside), ""]
            else:
                yield from ["", "Returns " + textwrap.dedent("\n".join(inside)).strip(), ""]
        elif line != "Example:":
            yield line


class TransformersStyle(griffe.Extension):
    """Rewrites docstrings as they are loaded. A rank config also gets the text of the fields that all of them share, which the
    class adds to its docstring when it is defined."""

    def __init__(self) -> None:
        self.names = documented()

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        shared = ast.literal_eval(str(pkg["models.rank_attention.FIELDS_DOC"].value))
        waiting: list[griffe.Object] = [pkg]
        while waiting:
            thing = waiting.pop()
            if thing.is_class and "stock_model_type" in thing.members and thing.name.endswith("Config"):
                stem = thing.name.removesuffix("Config")
                text = shared.format(model=f"{stem}Model", config=f"{stem[4:]}Config", family=stem[4:])
                own = thing.docstring.value if thing.docstring else ""
                thing.docstring = griffe.Docstring(f"{text}\n{own}", parent=thing)
            if thing.docstring:
                thing.docstring.value = linked("\n".join(rendered(thing.docstring.value)), self.names)
            waiting += [member for member in thing.members.values() if not member.is_alias]
