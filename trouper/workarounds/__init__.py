"""Workarounds for faults of dependencies.

`TROUPER_WITHOUT=NAME,NAME` switches workarounds off, `all` each of them. A test of each fails once
the dependency is mended.
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
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def is_active(name: str) -> bool:
    """`name`: of the workaround, or `__name__` of its module."""
    return _switched_off().isdisjoint({ALL, name.rpartition(".")[2]})


def summarize(name: str) -> str:
    """The head's first line, without an import."""
    source = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def list_unknown() -> list[str]:
    """Names in TROUPER_WITHOUT of no workaround."""
    return sorted(_switched_off() - {ALL, *list_names()})


def warn_of_unknown() -> None:
    if unknown := list_unknown():
        names = ", ".join([ALL, *list_names()])
        log.warning("%s: no workaround is named %s; use %s", VARIABLE, ", ".join(unknown), names)


def _switched_off() -> set[str]:
    return {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
