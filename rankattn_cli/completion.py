"""Names for completion in shells. They are the names of files, so that nothing is imported while a key is pressed."""

from importlib.util import find_spec
from pathlib import Path


def modules(pattern: str) -> list[Path]:
    """The modules of hf_rankattn that match a pattern. Finding a package does not import it."""
    found = find_spec("hf_rankattn")
    folders = found.submodule_search_locations or [] if found else []
    return [file for folder in folders for file in sorted(Path(folder).glob(pattern))]


def complete_experiment(incomplete: str) -> list[str]:
    # only the folders of papers have published values
    files = [file for file in modules("papers/*/[!_]*.py") if (file.parent / "published").is_dir()]
    names = [*(file.stem.replace("_", "-") for file in files), "all"]
    return [name for name in names if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    return [file.stem for file in modules("tasks/[!_]*.py") if file.stem.startswith(incomplete)]
