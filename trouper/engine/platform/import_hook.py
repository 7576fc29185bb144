"""Changes to what a module of another library does while it is imported, whenever that comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Around = Callable[[Callable[[], None], ModuleType], None]
"""Is given what runs a module's code, which it must call, and the module."""


def around_import(module: str, around: Around) -> None:
    """Have `around` run the code of a module when that is imported. No effect on a module that was imported before."""
    if module not in sys.modules:
        sys.meta_path.insert(0, _Finder(module, around))


class _Finder(MetaPathFinder):
    """Finds that one module, once."""

    def __init__(self, module: str, around: Around) -> None:
        self._module, self._around = module, around

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run, around = spec.loader.exec_module, self._around
        spec.loader.exec_module = lambda module: around(lambda: run(module), module)  # type: ignore[method-assign]
        return spec
