"""Modules of a package, read from a directory, and their imports of each other."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

Graph = Mapping[str, set[str]]


class Module:
    """One file of a package: dotted name, path, text and syntax tree."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.path, self.text = name, path, text

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def read_modules(package: Path) -> dict[str, Module]:
    """All modules below a package's directory, by dotted name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(inside[:-1] if inside[-1] == "__init__" else inside)
        modules[name] = Module(name, path, path.read_text("utf-8"))
    return modules


def absolute_name(node: ast.ImportFrom, package: str) -> str:
    """The module that `from ... import` names, without leading dots."""
    if not node.level:
        return node.module or ""
    base = package.split(".")
    return ".".join([*base[: len(base) - node.level + 1], *filter(None, [node.module])])


def list_imports(module: Module, names: Iterable[str]) -> set[str]:
    """Which of `names` a module imports, also inside functions and for types alone.

    `from a import b` imports `a.b` if that is a module, else `a`.
    """
    imported: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_name(node, module.package)
            members = (f"{base}.{alias.name}" for alias in node.names)
            imported.update(name if name in names else base for name in members)
    return imported.intersection(names) - {module.name}


def graph_imports(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    return {name: list_imports(module, modules.keys()) for name, module in modules.items()}


def list_splinters(modules: Mapping[str, Module], graph: Graph, below: int = 60) -> list[str]:
    """Modules of fewer than `below` lines that one other module imports; packages do not count."""
    importers = dict.fromkeys(modules, 0)
    for targets in graph.values():
        for target in targets:
            importers[target] += 1
    return [
        name
        for name, module in modules.items()
        if importers[name] == 1 and module.lines < below and not module.is_package
    ]


def list_circles(graph: Graph) -> list[tuple[str, ...]]:
    """Groups of modules that reach each other by imports (strongly connected components)."""
    reached = {name: _reach(graph, name) for name in graph}
    circles = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(circles)


def _reach(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - reached:
            reached.add(target)
            waiting.append(target)
    return reached


def list_pairs(modules: Mapping[str, Module], graph: Graph) -> list[tuple[str, str]]:
    """Packages of which each has a module that imports one of the other's."""
    edges: set[tuple[str, str]] = set()
    for source, targets in graph.items():
        edges.update((modules[source].package, modules[target].package) for target in targets)
    return sorted((one, other) for one, other in edges if one < other and (other, one) in edges)


def list_siblings(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Pairs of packages in one package."""
    for one, other in pairs:
        if one.rpartition(".")[0] == other.rpartition(".")[0]:
            yield one, other
