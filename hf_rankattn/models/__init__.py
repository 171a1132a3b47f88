"""Rank as a config field: one folder per family. Importing this package registers all families with the Auto classes."""

from importlib import import_module
from pkgutil import iter_modules

from .budget import ParameterCounts, equal_budget_grid, parameter_counts
from .registration import register_family


__all__ = ["ParameterCounts", "equal_budget_grid", "parameter_counts"]

for _found in iter_modules(__path__):
    if _found.ispkg:
        _family = import_module(f".{_found.name}", __name__)
        register_family(_family)
        for _name, _public in vars(_family).items():
            if isinstance(_public, type):
                globals()[_name] = _public
                __all__.append(_name)


def __getattr__(name: str):
    """Tell type checkers that there are more names than they see; every family adds its own."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
