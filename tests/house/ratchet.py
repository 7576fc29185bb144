"""Faults that the tree still has, which may only become fewer: `ratchet.json`.

`just house --lower` writes what has become fewer, and never more.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tests.house import figures, source_tree, words
from tests.house.source_tree import Module

FILE = Path(__file__).with_suffix(".json")

Faults = dict[str, dict[str, Any]]
"""Counts by tree and word (`words`, as `tests: told`); lists of names
by module (`foreign_names`), of packages by package (`pairs`), and of
the other files of a circle by its first (`circles`)."""


def measure_faults(root: Path, modules: Mapping[str, Module] | None = None) -> Faults:
    """Faults of the checkout at `root`, whose packages may have been read already."""
    if modules is None:
        server, lab = (source_tree.read_modules(root / p) for p in (figures.PACKAGE, figures.LAB))
        modules = server | lab
    graph = source_tree.graph_imports(modules)
    pairs: dict[str, list[str]] = {}
    for one, other in source_tree.list_pairs(modules, graph):
        pairs.setdefault(one, []).append(other)
    return {
        "words": {
            **_count_words(figures.PACKAGE, (module.nodes for module in modules.values())),
            **_count_words("tests", map(ast.walk, _parse_files(root / "tests"))),
        },
        "foreign_names": figures.list_foreign_elsewhere(modules),
        "pairs": pairs,
        "circles": {first: others for first, *others in source_tree.list_circles(graph)},
    }


def _read_texts(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*.py")):
        yield path.read_text("utf-8")


def _parse_files(directory: Path) -> Iterator[ast.Module]:
    return map(ast.parse, _read_texts(directory))


def _count_words(tree: str, nodes: Iterable[Iterable[ast.AST]]) -> dict[str, int]:
    counts = words.count_words(words.list_identifiers(chain.from_iterable(nodes)))
    return {f"{tree}: {word}": count for word, count in counts.items()}


def read_ratchet(file: Path = FILE) -> Faults:
    faults: Faults = json.loads(file.read_text("utf-8"))
    return faults


def list_new(now: Faults, ratchet: Faults) -> Iterator[str]:
    """Faults that the ratchet does not have, or not so many of."""
    for kind, by_key in now.items():
        for key, value in by_key.items():
            allowed = ratchet[kind].get(key, [] if isinstance(value, list) else 0)
            if isinstance(value, list):
                yield from (f"{kind}: {key}: {name}" for name in value if name not in allowed)
            elif value > allowed:
                yield f"{kind}: {key}: {value}, where {allowed} may be"


def list_unneeded(now: Faults, ratchet: Faults) -> Iterator[str]:
    """Names and packages of the ratchet that the tree has no more. Counts may lag behind."""
    for kind, by_key in ratchet.items():
        for key, allowed in by_key.items():
            if isinstance(allowed, list):
                there = now[kind].get(key, [])
                yield from (f"{kind}: {key}: {name}" for name in allowed if name not in there)


def lower(now: Faults, ratchet: Faults) -> Faults:
    """The ratchet without what the tree has no more."""
    lowered: Faults = {}
    for kind, by_key in ratchet.items():
        values = {key: _lower_value(now[kind].get(key), old) for key, old in by_key.items()}
        lowered[kind] = {key: value for key, value in values.items() if value}
    return lowered


def _lower_value(now: Any, allowed: Any) -> Any:
    if isinstance(allowed, list):
        return [name for name in allowed if name in (now or [])]
    return min(now or 0, allowed)


def write_ratchet(faults: Mapping[str, Any], file: Path = FILE) -> None:
    file.write_text(json.dumps(faults, indent=2) + "\n", "utf-8")
