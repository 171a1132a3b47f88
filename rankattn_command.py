"""The command `rankattn`, outside the package.

Importing `hf_rankattn` registers its models, for which torch and transformers have to be loaded: seconds that neither
`--help` nor completion in a shell needs. So the two light modules of the package are loaded here without it; the commands
in them import the rest, and with it the package, when they run.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec


def load_without_parent(name: str) -> None:
    package, _, _ = name.partition(".")
    found = find_spec(package)
    spec = PathFinder.find_spec(name, found.submodule_search_locations) if found else None
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{name} is missing: install hf_rankattn anew.", name=name)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def main() -> None:
    # in the order in which they import each other
    for name in ("hf_rankattn.console", "hf_rankattn.cli"):
        if name not in sys.modules:
            load_without_parent(name)
    sys.modules["hf_rankattn.cli"].main()


if __name__ == "__main__":
    main()
