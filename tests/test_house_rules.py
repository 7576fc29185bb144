"""What no file of the package may do."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import trouper
from trouper import Settings

PACKAGE = Path(trouper.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def injected(tree: ast.AST) -> Iterator[str]:
    """Private attributes that are set on something else than the object at hand."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr.startswith("_"):
                owner = ast.unparse(part.value)
                if owner not in {"self", "cls"}:
                    yield f"{owner}.{part.attr}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_d14_f11_no_pickles_and_no_private_attributes_of_others(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    assert not UNSAFE.intersection(imported(tree))
    assert not [*injected(tree)]


def test_the_rules_can_be_broken() -> None:
    assert [*imported(ast.parse("import os.path\nfrom pickle import load"))] == ["os", "pickle"]
    assert [*injected(ast.parse("self._a = other._b = 1\nx.y._c += 2"))] == ["other._b", "x.y._c"]


ACTORS = {"request_intake", "scheduler", "rank_mirror", "model_stepper", "cache_janitor", "ssd_writer"}
REPEATED_ON_PURPOSE = {"__init__", "__main__", "routes", "errors", "schemas"}
"""Names that each dialect's package has."""


def test_actors_are_six_files_a_graph_and_packages() -> None:
    inside = [path for path in (PACKAGE / "actors").iterdir() if path.name not in {"__init__.py", "__pycache__"}]
    assert {path.stem for path in inside if path.is_file()} == ACTORS | {"graph"}
    assert {path.name for path in inside if path.is_dir()} == {"scheduling", "runtime", "ranks"}


def test_a_file_name_exists_once() -> None:
    names = Counter(path.stem for path in FILES if path.stem not in REPEATED_ON_PURPOSE)
    assert [name for name, count in names.items() if count > 1] == []


def test_a_class_name_exists_once() -> None:
    names = Counter(
        node.name
        for path in FILES
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_core_of_the_scheduler_knows_no_trio() -> None:
    core = sorted((PACKAGE / "actors" / "scheduling").rglob("*.py"))
    assert len(core) > 10
    assert [path.name for path in core if "trio" in imported(ast.parse(path.read_text("utf-8")))] == []


def test_d15_nothing_lossy_is_on_by_default() -> None:
    """Unless it was asked for, keys and values have the model's own precision."""
    assert Settings().kv_bits == 0
    assert {field.name for field in attrs.fields(Settings) if "bits" in field.name} == {"kv_bits"}
