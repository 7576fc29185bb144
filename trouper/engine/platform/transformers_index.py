"""The index of models that transformers makes at its import, made when a name needs it, once and faster.

transformers/utils/import_utils.py reads all 3,300 files of transformers/models for what each exports, at the import of `transformers`
and again at that of `transformers.models`, since its cache has room for 128 of 500 directories; and it looks at each line of each
file for the last one that begins with `__all__`. Both together were a third of what a process needed to import the engine.

A server asks for few names, of modules that transformers lists itself and of `models/auto`. So its two modules begin with these,
and read the other files when somebody wants a name that is not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from trouper.engine.platform.import_hook import around_import

MODULE = "transformers.utils.import_utils"
SCAN, EXPORTS, INDEX, LAZY = (
    "create_import_structure_from_path",
    "fetch__all__",
    "define_import_structure",
    "_LazyModule",
)
FIRST = "auto"
"""The directory of models that is read at once: all tokenizers are found through it."""
STATE = ("_modules", "_class_to_module", "_object_missing_backend", "_import_structure", "__all__")
"""Attributes of a lazy module that come from its index."""
NAMES = ("_class_to_module", "_modules", "_object_missing_backend", "_objects")
"""Those that have the names it has."""
ONLY_COMPLETE = ("_import_structure", "__all__")
"""Those that others read, who must see all."""
COMPLETE = "_complete_of_trouper"
"""Attribute of a lazy module whose index is begun: makes that module with all of it. None: it is complete."""

Structure = dict[Any, dict[str, Any]]


def make_faster() -> None:
    """Change the functions when transformers is imported. To be called before it. A version without them is left as it is."""
    around_import(MODULE, _changed)


def _changed(run: Callable[[], None], module: ModuleType) -> None:
    run()
    scan = getattr(getattr(module, SCAN, None), "__wrapped__", None)
    if scan is not None:
        setattr(module, SCAN, cache(scan))
    exports = getattr(module, EXPORTS, None)
    if exports is not None:
        setattr(module, EXPORTS, _from_last(exports))
    index, lazy = getattr(module, INDEX, None), getattr(module, LAZY, None)
    if index is not None and lazy is not None and module.__file__ is not None:
        setattr(module, INDEX, _begun(index, Path(module.__file__).parents[1] / "models"))
        setattr(module, LAZY, _completed_on_demand(lazy))


def _from_last(exports: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Give a file's content from its last `__all__` on, which decides."""
    return lambda content: exports(content[content.rfind("\n__all__") + 1 :])


class BegunIndex(dict[Any, dict[str, Any]]):
    """What FIRST exports, and what is added; the index of all models is this one's `complete`."""

    def __init__(self, first: Structure, prefix: str, read: Callable[[], Structure]) -> None:
        super().__init__({frozenset(): {}})
        for backends, modules in first.items():
            self[backends] = {f"{prefix}{FIRST}.{name}": exported for name, exported in modules.items()}
        self._read = read

    def complete(self) -> Structure:
        """Read all files."""
        structure = {backends: dict(modules) for backends, modules in self._read().items()}  # It is cached.
        for backends, modules in self.items():
            structure.setdefault(backends, {}).update(modules)
        return structure


def _begun(index: Callable[..., Structure], models: Path) -> Callable[..., Structure]:
    @wraps(index)
    def begun(module_path: str | Path, prefix: str | None = None) -> Structure:
        if Path(module_path) not in (models, models / "__init__.py") or not (models / FIRST).is_dir():
            return index(module_path, prefix)
        return BegunIndex(index(models / FIRST), f"{prefix}." if prefix else "", lambda: index(models, prefix))

    return begun


def _completed_on_demand(lazy: Any) -> type[ModuleType]:
    """Make a class of lazy modules, with the name of the one that it extends: one whose index is begun completes it before it has no such name."""
    initialize, attribute = lazy.__init__, lazy.__getattr__

    @wraps(initialize)
    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        initialize(self, *given, **named)
        if any(isinstance(each, BegunIndex) for each in (*given, *named.values())):
            for incomplete in ONLY_COMPLETE:
                self.__dict__.pop(incomplete, None)
            self.__dict__[COMPLETE] = lambda: lazy(
                *map(_completed, given), **{key: _completed(each) for key, each in named.items()}
            )

    @wraps(attribute)
    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        complete = self.__dict__.get(COMPLETE)
        if complete is not None and _is_missing(self, name):
            full = complete().__dict__
            self.__dict__.update({each: full[each] for each in STATE if each in full})
            self.__dict__[COMPLETE] = None
        return self.__dict__[name] if name in self.__dict__ else attribute(self, name)

    return type(LAZY, (lazy,), {"__module__": MODULE, "__init__": __init__, "__getattr__": __getattr__})


def _completed(argument: Any) -> Any:
    return argument.complete() if isinstance(argument, BegunIndex) else argument


def _is_missing(lazy: Any, name: str) -> bool:
    if name in ONLY_COMPLETE:
        return True
    if name.startswith("__"):  # No model exports one, and `inspect` wants several of each module.
        return False
    known = lazy.__dict__
    return not any(name in known.get(each, ()) for each in NAMES)
