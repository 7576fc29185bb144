"""Workarounds for faults of dependencies, each in a module of its own.

The head of a module says what is wrong, in which version, where it was reported, and what it costs
to be without. `TROUPER_WITHOUT=NAME,NAME` switches workarounds off, `all` each of them. For each
module `tests/workarounds` has a test that fails once the dependency is mended.
"""

# The modules import no other room of the package, which each room may import.

from __future__ import annotations

import ast
import logging
import os
import pkgutil
from pathlib import Path

log = logging.getLogger("trouper")
VARIABLE = "TROUPER_WITHOUT"
ALL = "all"


def list_names() -> list[str]:
    """Names of all workarounds."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def is_active(name: str) -> bool:
    """Whether a workaround is switched on. `name`: its own, or `__name__` of its module."""
    return _switched_off().isdisjoint({ALL, name.rpartition(".")[2]})


def summarize(name: str) -> str:
    """The first line of the module's head. The module is not imported."""
    source = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def list_unknown() -> list[str]:
    """Names in TROUPER_WITHOUT that no workaround has."""
    return sorted(_switched_off() - {ALL, *list_names()})


def warn_of_unknown() -> None:
    """Log a warning if TROUPER_WITHOUT has a name that no workaround has."""
    if unknown := list_unknown():
        names = ", ".join([ALL, *list_names()])
        log.warning("%s: no workaround is named %s; use %s", VARIABLE, ", ".join(unknown), names)


def _switched_off() -> set[str]:
    return {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
