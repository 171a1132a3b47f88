"""Write docs/api.md from the docstrings of the public names: python docs/build_api.py"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import evaluate
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

import hf_rankattn
from hf_rankattn import papers as experiments
from hf_rankattn import tasks, theory
from hf_rankattn.theory import constructions


PAGE = Path(__file__).parent / "api.md"
AUTO_CLASSES = [name for name in modeling_auto.__all__ if re.fullmatch(r"AutoModel(For\w+)?", name)]
# the rank families, without the suffix of their config classes
FAMILIES = [name.removesuffix("Config") for name in hf_rankattn.models.__all__ if name.endswith("Config")]
HEAD = """# API

Made from the docstrings by `python docs/build_api.py`; a test fails where the two differ. What stands here without a module is
imported from `hf_rankattn`.
"""
# room -> title, pages with more, module of its names
ROOMS = {
    "models": ("Models", "models.md", "hf_rankattn"),
    "convert": ("Another rank for a checkpoint", "convert.md", "hf_rankattn"),
    "limit": ("Limits on the rank of any model", "limit.md", "hf_rankattn"),
    "measure": ("Measuring tensors", "measure.md", "hf_rankattn"),
    "probe": ("Measuring models", "measure.md and paths.md", "hf_rankattn"),
    "tasks": ("Tasks", "tasks.md", "hf_rankattn"),
    "sharing": ("Sharing", "sharing.md", "hf_rankattn"),
    "theory": ("Theory", "theory.md", "hf_rankattn.theory"),
    "constructions": ("Constructions", "theory.md", "hf_rankattn.theory.constructions"),
    "more tasks": ("More of the tasks", "tasks.md", "hf_rankattn.tasks"),
    "experiments": ("Experiments", "sweeps.md", "hf_rankattn.papers"),
}


def public(module: ModuleType) -> dict[str, Any]:
    """The public classes and functions of a module, wherever in the package they are defined."""
    found = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: thing
        for name, thing in found.items()
        if isinstance(thing, type | FunctionType) and thing.__module__.startswith("hf_rankattn")
    }


def room_of(thing: Any) -> str:
    parts = thing.__module__.split(".")[1:]
    return {"hub": "sharing", "files": "tasks", "papers": "experiments"}.get(parts[0], parts[0])


def rooms() -> dict[str, dict[str, Any]]:
    """Room -> public names without the model classes, which are in tables."""
    found: dict[str, dict[str, Any]] = {room: {} for room in ROOMS}
    for name, thing in public(hf_rankattn).items():
        if not is_model(thing):
            found[room_of(thing)][name] = thing
    found["theory"] = public(theory)
    found["constructions"] = {
        name: thing
        for name, thing in public(constructions).items()
        if thing.__module__ == constructions.__name__
        and name not in ("bare_model", "empty_model")  # their raw material
    }
    found["more tasks"] = {name: thing for name, thing in public(tasks).items() if name not in found["tasks"]}
    found["experiments"] |= public(experiments)
    return found


def is_model(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, PreTrainedModel | GradientCheckpointingLayer)


def auto_class(model: type) -> str:
    """The Auto classes of transformers that load this class."""
    mappings = {name: getattr(modeling_auto, name)._model_mapping for name in AUTO_CLASSES}
    found = [name for name, mapping in mappings.items() if model in mapping._extra_content.values()]
    return ", ".join(f"`{name}`" for name in found)


def summary(thing: Any) -> str:
    """The first paragraph of its own docstring, which is not inherited."""
    doc = thing.__dict__.get("__doc__") if isinstance(thing, type) else thing.__doc__
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def class_table(family: str) -> Iterator[str]:
    config = getattr(hf_rankattn, f"{family}Config")
    yield f"\n### The classes of `{config.model_type}`\n\n| class | Auto class | |\n|---|---|---|"
    for name, thing in public(hf_rankattn).items():
        if is_model(thing) and name.startswith(family):
            yield f"| `{name}` | {auto_class(thing)} | {linked(summary(thing), {})} |"


def signature(name: str, thing: Any) -> str:
    """Names and defaults; types are in the docstring. Of a config only the fields that its docstring names."""
    if isinstance(thing, type) and issubclass(thing, evaluate.Metric):
        return f"{name}()"
    parameters = list(inspect.signature(thing).parameters.values())
    foreign = ""
    if isinstance(thing, type) and issubclass(thing, PreTrainedConfig):
        own = set(re.findall(r"^ {4}(\w+) \(", inspect.getdoc(thing) or "", flags=re.MULTILINE))
        parameters = [parameter for parameter in parameters if parameter.name in own]
        foreign = ", ..."
    shown, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        # The repr of a function holds an address, which differs from run to run.
        value = "..." if callable(parameter.default) else repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f"={value}"
        shown.append(f"{prefix}{parameter.name}{default}")
    line = f"{name}({', '.join(shown)}{foreign})"
    return "\n".join(textwrap.wrap(line, 119, subsequent_indent="    ", break_long_words=False))


def linked(text: str, names: dict[str, Any]) -> str:
    """[`name`] becomes a link where the page has that name."""

    def link(match: re.Match) -> str:
        name = match[1].lstrip("~").removeprefix("hf_rankattn.theory.")
        return f"[`{name}`](#{name.lower()})" if name in names else f"`{name}`"

    return re.sub(r"\[`([\w.~]+)`\](?!\()", link, text)


def listed(lines: list[str]) -> Iterator[str]:
    """The indented lines of an `Args:` section as a list."""
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        start = re.match(r"(\*{0,2}\w+(?:, \w+)*)( \(.*?\))?:\s*(.*)", line)
        if start and not line.startswith(" "):
            yield f"- **{start[1].replace('*', chr(92) + '*')}**{start[2] or ''}: {start[3]}".rstrip()
        else:
            yield f"  {line.strip()}".rstrip()


def rendered(doc: str) -> Iterator[str]:
    """A docstring in the style of transformers as Markdown. Examples are run by the tests as doctests."""
    lines = doc.splitlines()
    place = 0
    while place < len(lines):
        line = lines[place]
        if line.startswith("```"):
            end = lines.index("```", place + 1)
            yield from ["```pycon", *lines[place + 1 : end], "```"]
            place = end + 1
        elif line.startswith(">>>"):
            yield "```pycon"
            while place < len(lines) and lines[place].strip():
                yield lines[place]
                place += 1
            yield "```"
        elif line in ("Args:", "Returns:"):
            end = place + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            section = lines[place + 1 : end]
            if line == "Args:":
                yield from [*listed(section), ""]
            else:
                yield from ["Returns " + textwrap.dedent("\n".join(section)).strip(), ""]
            place = end
        else:
            if line != "Example:":
                yield line
            place += 1


def entry(name: str, thing: Any, names: dict[str, Any]) -> Iterator[str]:
    yield f"\n### {name}\n\n```text\n{signature(name, thing)}\n```\n"
    yield linked("\n".join(rendered(inspect.getdoc(thing) or "")), names)
    if isinstance(thing, type) and issubclass(thing, PreTrainedConfig):
        yield f"\n`{name}.head_geometry(layer)`: {summary(thing.head_geometry)}"


def page() -> str:
    found = rooms()
    names = {name: thing for room in found.values() for name, thing in room.items()}
    parts = [HEAD]
    for room, (title, _, _) in ROOMS.items():
        inside = ", ".join(f"[{name}](#{name.lower()})" for name in found[room])
        parts.append(f"- [{title}](#{re.sub(r'[^a-z0-9 _-]', '', title.lower()).replace(' ', '-')}): {inside}")
    for room, (title, pages, module) in ROOMS.items():
        origin = "" if module == "hf_rankattn" else f" From `{module}`."
        links = re.sub(r"(\w+\.md)", r"[\1](\1)", pages)
        parts.append(f"\n## {title}\n\nThe whole story: {links}.{origin}")
        for name, thing in found[room].items():
            parts.extend(entry(name, thing, names))
        if room == "models":
            for family in FAMILIES:
                parts.extend(class_table(family))
    parts.append("\n---\nNext: [gotchas](gotchas.md) · [all pages](README.md)\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


if __name__ == "__main__":
    PAGE.write_text(page())
