"""What no file of the package may do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import attrs
import pytest

import trouper
from tests.house.ratchet import Faults, list_new, list_unneeded, measure_faults, read_ratchet
from tests.house.source_tree import Module, read_modules
from tests.house.words import count_words, find_old_words, list_identifiers
from trouper import Sampling, Settings
from trouper.protocol.sampling import parameter

PACKAGE = Path(trouper.__file__).parent
LAB = PACKAGE.parent / "packages" / "trouper-lab" / "trouper_lab"
FILES = sorted([*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")])
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def imported(tree: ast.AST) -> Iterator[str]:
    for node in inside(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def injected(tree: ast.AST) -> Iterator[str]:
    """Private attributes that are set on another object; an object's class is none of them."""
    targets: list[ast.expr] = []
    for node in inside(tree):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
    for target in targets:
        for part in ast.walk(target):
            if not isinstance(part, ast.Attribute) or not isinstance(part.ctx, ast.Store):
                continue
            if part.attr.startswith("_"):
                owner = ast.unparse(part.value)
                if owner not in {"self", "cls"} and part.attr != "__class__":
                    yield f"{owner}.{part.attr}"


@cache
def modules() -> dict[str, Module]:
    return read_modules(PACKAGE) | read_modules(LAB)


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    """Each file of both packages. One test looks at all of them: five hundred tests took longer to
    begin and to end than to look."""
    return tuple((module.path, module.tree) for module in modules().values())


@cache
def inside(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes: each rule looks through them."""
    return tuple(ast.walk(tree))


def test_d14_f11_no_pickles_and_no_private_attributes_of_others() -> None:
    for path, tree in trees():
        assert not UNSAFE.intersection(imported(tree)), path
        assert not [*injected(tree)], path


def test_no_process_of_ours_imports_from_the_working_directory() -> None:
    """`-m` alone puts it first: whoever wrote the repository in which a command is called would
    have their pip.py run."""
    programs = [*FILES, *(PACKAGE.parent / "examples").glob("*.py")]
    modules = [
        (path.name, found)
        for path in programs
        for found in re.findall(r"sys\.executable,\s*(.{4})", path.read_text())
    ]
    assert modules
    assert [(name, option) for name, option in modules if option not in ('"-P"', '"-c"')] == []


def test_the_rules_can_be_broken() -> None:
    assert [*imported(ast.parse("import os.path\nfrom pickle import load"))] == ["os", "pickle"]
    injecting = ast.parse("self._a = other._b = x.__class__ = 1\nx.y._c += 2")
    assert [*injected(injecting)] == ["other._b", "x.y._c"]


ACTORS = {
    "request_intake",
    "scheduler",
    "rank_mirror",
    "model_stepper",
    "cache_janitor",
    "ssd_writer",
    "image_decoder",
}
"""Names that each dialect's package has."""


def test_actors_are_seven_files_a_graph_and_packages() -> None:
    inside = [
        path
        for path in (PACKAGE / "actors").iterdir()
        if path.name not in {"__init__.py", "__pycache__"}
    ]
    assert {path.stem for path in inside if path.is_file()} == ACTORS | {"graph"}
    assert {path.name for path in inside if path.is_dir()} == {"scheduling", "runtime", "ranks"}


def test_the_core_of_the_scheduler_knows_no_trio() -> None:
    core = [
        (path, tree)
        for path, tree in trees()
        if path.is_relative_to(PACKAGE / "actors" / "scheduling")
    ]
    assert len(core) > 10
    assert [path.name for path, tree in core if "trio" in imported(tree)] == []


def test_d15_nothing_lossy_is_on_by_default() -> None:
    """Unless it was asked for, keys and values have the model's own precision."""
    assert Settings().kv_bits == 0
    assert {field.name for field in attrs.fields(Settings) if "bits" in field.name} == {"kv_bits"}


# -- size ----------------------------------------------------------------------------------------

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_POSITIONAL = 700, 50, 5
"""Lines of a file, and of a function's body without its docstring: 40 when lines had 120 columns,
50 at 100, since the formatter alone decides how many lines an expression takes."""
LONGER: Mapping[str, str] = {}
"""Files and functions ("file:function") that may be longer, and why."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in inside(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def too_long(name: str, text: str, tree: ast.Module) -> Iterator[str]:
    """What of a file is longer than it may be."""
    if text.count("\n") > MAX_FILE_LINES:
        yield name
    for function in functions(tree):
        body = function.body[ast.get_docstring(function) is not None :]
        if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 > MAX_FUNCTION_LINES:
            yield f"{name}:{function.name}"


def positional(tree: ast.Module) -> Iterator[str]:
    """Calls with more positional arguments than a reader can tell apart. `*arguments` is one."""
    for node in inside(tree):
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
            yield f"line {node.lineno}: {ast.unparse(node.func)}"


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else LAB.parent))


def read_of_rows() -> set[str]:
    """Attributes that the engine and intake, which knows the tokenizer, read of a row's sampling
    parameters."""
    names = set()
    for path, tree in trees():
        if _name(path).startswith(("engine/", "actors/request_intake")):
            names |= {
                node.attr
                for node in inside(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and ast.unparse(node.value).rpartition(".")[2] in {"row", "sampling"}
            }
    return names


def test_each_sampling_parameter_is_read() -> None:
    """One that is declared and not read would be accepted and ignored."""
    read = read_of_rows()
    assert {field.name for field in attrs.fields(Sampling)} - read == set()
    made_up = attrs.make_class("MadeUp", {"made_up": parameter(0.0, 0, 1)}, bases=(Sampling,))
    assert {field.name for field in attrs.fields(made_up)} - read == {"made_up"}


def test_no_file_and_no_function_is_longer_than_a_reader_can_hold() -> None:
    found = [
        long
        for path, tree in trees()
        for long in too_long(_name(path), path.read_text("utf-8"), tree)
    ]
    assert sorted(found) == sorted(LONGER), "too long, or a reason for nothing"


def test_no_call_has_more_than_five_positional_arguments() -> None:
    found = {str(path): [*positional(tree)] for path, tree in trees()}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_the_rules_of_size_can_be_broken() -> None:
    long = "def f():\n" + "    pass\n" * 51
    assert [*too_long("a.py", long, ast.parse(long))] == ["a.py:f"]
    assert [*too_long("a.py", "\n" * 701, ast.parse(""))] == ["a.py"]
    assert [*positional(ast.parse("f(1, 2, 3, 4, 5)\ng.h(1, 2, 3, 4, 5, 6)"))] == ["line 2: g.h"]


# -- words ---------------------------------------------------------------------------------------


def test_identifiers_have_the_words_of_the_field() -> None:
    named = {str(path): [*list_identifiers(inside(tree))] for path, tree in trees()}
    old = {path: sorted(filter(find_old_words, names)) for path, names in named.items()}
    assert {path: names for path, names in old.items() if names} == {}


def test_the_rule_of_words_can_be_broken() -> None:
    tree = ast.parse("facts = at_most = 1\ndef f(wanted): pass\nx.most = found = found_rows = 2")
    names = [*list_identifiers(ast.walk(tree))]
    assert {*filter(find_old_words, names)} == {"facts", "wanted", "most"}
    assert count_words([*names, "_found"]) == {"facts": 1, "found": 2, "most": 1, "wanted": 1}


# -- faults that may only become fewer -----------------------------------------------------------


@cache
def faults() -> Faults:
    return measure_faults(PACKAGE.parent, modules())


def test_f11_no_new_fault() -> None:
    """Private names of other packages, packages that import each other, and old words.

    A fault that can't be avoided goes into tests/house/ratchet.json by hand, and a reason into the
    commit.
    """
    assert [*list_new(faults(), read_ratchet())] == []


def test_each_name_and_pair_of_the_ratchet_is_still_needed() -> None:
    assert [*list_unneeded(faults(), read_ratchet())] == [], "`just house --lower` removes them"


def self_referring(tree: ast.AST) -> Iterator[str]:
    """Functions inside others that name themselves."""
    for outer in functions(tree):
        for inner in functions(outer):
            names = {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}
            if inner is not outer and inner.name in names:
                yield inner.name


def test_no_function_refers_to_itself() -> None:
    """Such a function, and what it uses of the one around it, is left to the garbage collector:
    the states of rows, on the device."""
    assert [(str(path), name) for path, tree in trees() for name in self_referring(tree)] == []
    broken = "def outer(x):\n    def walk(y):\n        return walk(x)\n    return walk(x)"
    assert [*self_referring(ast.parse(broken))] == ["walk"]


# -- essays --------------------------------------------------------------------------------------

ESSAYS = {
    "actors/scheduling/core.py": "The order matters",
    "actors/scheduling/admission.py": "A lookup has a fixed order",
    "actors/scheduling/disk_tier.py": "A disk lookup has a fixed order",
    "actors/graph.py": "The shutdown has a fixed order",
    "actors/ranks/rank_handshake.py": "The order of its steps matters",
}
"""Where the order of steps carries the meaning, and how its essay begins."""


@pytest.mark.parametrize(("name", "begin"), ESSAYS.items(), ids=ESSAYS)
def test_an_essay_stands_where_the_order_of_steps_matters(name: str, begin: str) -> None:
    tree = ast.parse((PACKAGE / name).read_text("utf-8"))
    documented = [
        tree,
        *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)),
    ]
    [essay] = [text for node in documented if begin in (text := ast.get_docstring(node) or "")]
    assert len(essay[essay.index(begin) :].split(". ")) > 3
