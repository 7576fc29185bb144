"""The figures of a checkout and their targets."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from tests.house import foreign_names, prose, source_tree
from tests.house.source_tree import Module

WIDTH = 100
PACKAGE, WORKAROUNDS = "trouper", "trouper.workarounds"
LAB = "packages/trouper-lab/trouper_lab"

TARGETS = {
    "lines": ("lines in `trouper/`", "<= 50,000"),
    "files": ("files in `trouper/`", "<= 340"),
    "lab_lines": ("lines in `packages/`", ""),
    "median_file": ("lines of the median file", "130 to 150"),
    "splinters": ("modules with one importer and < 60 lines", "<= 10"),
    "wide_lines": ("lines wider than 100", "0"),
    "docstring_words": ("docstring words", "<= 55,000"),
    "pronouns_per_1000": ("pronouns per 1,000 docstring words", "<= 18"),
    "docstrings_with_what": ('docstrings that begin with "What"', "<= 10"),
    "workarounds": ("patches of others: modules of `trouper/workarounds/`", "<= 14"),
    "foreign_names": ("patches of others: elsewhere, each name of a module once", "0"),
    "class_assignments": ("of these, assignments to `__class__`", "0"),
    "circles": ("circles of files", "0"),
    "pairs": ("pairs of packages that import each other", "<= 8"),
    "sibling_pairs": ("of these, siblings", "0"),
    "test_lines": ("lines of tests, with mutants", "<= 65,000"),
    "dependencies": ("direct dependencies", "<= 21"),
}
"""What each figure is called in the table, and its target, in the order of the table."""


def measure(root: Path) -> dict[str, float]:
    """All figures of the checkout at `root`."""
    modules = source_tree.read_modules(root / PACKAGE)
    graph = source_tree.graph_imports(modules)
    pairs = source_tree.list_pairs(modules, graph)
    foreign = list_foreign_elsewhere(modules)
    touched = [name for names in foreign.values() for name in names]
    return {
        "lines": sum(module.lines for module in modules.values()),
        "files": len(modules),
        "lab_lines": sum(module.lines for module in source_tree.read_modules(root / LAB).values()),
        "median_file": median(module.lines for module in modules.values()),
        "splinters": len(source_tree.list_splinters(modules, graph)),
        "wide_lines": sum(count_wide_lines(module.text) for module in modules.values()),
        **_measure_prose(modules.values()),
        "workarounds": sum(is_workaround(module) for module in modules.values()),
        "foreign_names": len(touched),
        "class_assignments": sum(name.endswith(".__class__") for name in touched),
        "circles": len(source_tree.list_circles(graph)),
        "pairs": len(pairs),
        "sibling_pairs": sum(1 for _ in source_tree.list_siblings(pairs)),
        "test_lines": _count_test_lines(root / "tests"),
        "dependencies": _count_dependencies(root / "pyproject.toml"),
    }


def list_foreign_elsewhere(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """Private names of other packages that modules outside the workarounds touch."""
    foreign = foreign_names.list_foreign(modules)
    return {name: names for name, names in foreign.items() if not _is_inside(name, WORKAROUNDS)}


def is_workaround(module: Module) -> bool:
    return _is_inside(module.name, WORKAROUNDS) and not module.is_package


def count_wide_lines(text: str) -> int:
    return sum(len(line) > WIDTH for line in text.splitlines())


def format_table(figures: Mapping[str, float]) -> str:
    """In Markdown."""
    rows = [
        f"| {label} | {_format_number(figures[key])} | {target} |"
        for key, (label, target) in TARGETS.items()  # In the order of the page.
    ]
    return "\n".join(["| | now | target |", "|---|---|---|", *rows])


def _format_number(number: float) -> str:
    return f"{number:,.1f}" if number % 1 else f"{number:,.0f}"


def _is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _measure_prose(modules: Iterable[Module]) -> dict[str, float]:
    texts = [text for module in modules for text in prose.list_docstrings(module)]
    words = sum(map(prose.count_words, texts))
    pronouns = sum(map(prose.count_pronouns, texts))
    return {
        "docstring_words": words,
        "pronouns_per_1000": round(1000 * pronouns / words, 1) if words else 0,
        "docstrings_with_what": sum(text.split()[:1] == ["What"] for text in texts),
    }


def _count_test_lines(directory: Path) -> int:
    files = (*directory.rglob("*.py"), *(directory / "mutants").glob("*.toml"))
    return sum(len(path.read_text("utf-8").splitlines()) for path in files)


def _count_dependencies(pyproject: Path) -> int:
    return len(tomllib.loads(pyproject.read_text("utf-8"))["project"]["dependencies"])
