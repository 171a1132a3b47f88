"""A name for what a builder does, which changes whenever its code does."""

import hashlib
import inspect
import site
import sys
import sysconfig
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np


CONSTANTS = (str, bytes, int, float, complex, bool, type(None), type(...))


def generator_hash(builder: type) -> str:
    """Hash the running code of a builder class, of all that it calls outside of installed libraries, and numpy's version.

    Code objects are hashed, not source: a file that was edited after its import would name the new code while the old one
    runs. Numpy's version belongs to it because numpy promises equal random streams within a version only.
    """
    walk = CodeWalk({base.__module__.split(".")[0] for base in builder.__mro__} - {"datasets", "builtins", "abc"})
    walk.visit(np.__version__)
    walk.visit(builder)
    return walk.digest.hexdigest()[:16]


class CodeWalk:
    def __init__(self, own_packages: set[str]):
        self.own_packages = own_packages
        self.seen: set[int] = set()
        self.digest = hashlib.sha256()

    def visit(self, value: Any) -> None:
        if isinstance(value, CONSTANTS):
            self.digest.update(f"{type(value).__name__} {value!r};".encode())
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, CodeType):
            self.code(value)
        elif isinstance(value, FunctionType):
            if self.is_own(value.__module__):
                self.function(value)
        elif isinstance(value, type):
            if self.is_own(value.__module__):
                self.members(value)
        elif isinstance(value, property):
            self.visit_all((value.fget, value.fset))
        elif isinstance(value, classmethod | staticmethod):
            self.visit(value.__func__)
        elif isinstance(value, dict):
            self.visit_all(part for item in value.items() for part in item)
        elif isinstance(value, tuple | list):
            self.visit_all(value)
        elif isinstance(value, set | frozenset):
            self.visit_all(sorted(value, key=repr))
        elif isinstance(value, np.ndarray):
            self.visit_all((value.dtype.str, value.shape, value.tobytes()))

    def visit_all(self, values) -> None:
        for value in values:
            self.visit(value)

    def members(self, owner: type) -> None:
        self.digest.update(f"class {owner.__module__}.{owner.__qualname__};".encode())
        self.visit_all(owner.__mro__[1:])
        for name, value in sorted(vars(owner).items()):
            # what Python and the decorators of dataclasses and abc put there is not ours, and may differ run by run
            if name not in ("__doc__", "__dict__", "__weakref__", "__module__", "_abc_impl", "__firstlineno__"):
                self.digest.update(f"{name}=".encode())
                self.visit(value)

    def function(self, function: FunctionType) -> None:
        self.digest.update(f"def {function.__module__}.{function.__qualname__};".encode())
        self.visit_all((function.__code__, function.__defaults__, function.__kwdefaults__))
        self.visit_all(inspect.getclosurevars(function).nonlocals.values())
        names = names_of(function.__code__)
        for name in names:
            used = function.__globals__.get(name)
            if isinstance(used, ModuleType):
                if self.is_own(used.__name__):
                    self.visit_all(getattr(used, other) for other in names if hasattr(used, other))
            else:
                self.visit(used)

    def code(self, code: CodeType) -> None:
        self.digest.update(code.co_code)
        self.visit_all((code.co_names, code.co_varnames, code.co_freevars))
        self.visit_all(code.co_consts)

    def is_own(self, module: str) -> bool:
        """Whether code is the project's or the user's; installed libraries are told apart by their versions, if at all."""
        package = module.split(".")[0]
        if package in self.own_packages:
            return True
        if package in sys.stdlib_module_names:
            return package == "__main__"
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        return not file.startswith(installed_folders())


@cache
def installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages())


def names_of(code: CodeType) -> list[str]:
    """Global names that a function and the functions within it look up, in a fixed order."""
    inner = [name for value in code.co_consts if inspect.iscode(value) for name in names_of(value)]
    return sorted({*code.co_names, *inner})
