"""Names for completion in shells. They are the names of files, so that nothing is imported while a key is pressed."""

from importlib.util import find_spec
from pathlib import Path


def modules(pattern: str) -> list[str]:
    """The names of the modules of hf_rankattn that match a pattern. Finding a package does not import it."""
    found = find_spec("hf_rankattn")
    folders = found.submodule_search_locations or [] if found else []
    return [file.stem for folder in folders for file in sorted(Path(folder).glob(pattern))]


def complete_experiment(incomplete: str) -> list[str]:
    names = [*(name.replace("_", "-") for name in modules("papers/rank_*/[!_]*.py")), "all"]
    return [name for name in names if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    return [name for name in modules("tasks/[!_]*.py") if name.startswith(incomplete)]
