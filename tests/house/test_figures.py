"""`just house`, on trees that the tests write."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from tests.house import figures, foreign_names, prose, source_tree
from tests.house.__main__ import main
from tests.house.source_tree import Module

WHAT_IS_MEASURED = {
    "trouper/__init__.py": '"""What a package is."""\n',
    "trouper/a/__init__.py": "",
    "trouper/a/one.py": "import trouper.b.two\nfrom trouper.a import three\n",
    "trouper/a/three.py": f"from .one import x\n\nx = 1\n# {'y' * 99}\n",
    "trouper/b/__init__.py": "",
    "trouper/b/two.py": "import threading\n\n\ndef f() -> None:\n    from ..a import one\n",
    "trouper/workarounds/__init__.py": "",
    "trouper/workarounds/threads.py": "import threading\n\nthreading._limbo = {}\n",
    "tests/test_a.py": "x = 1\ny = 2\n",
    "tests/mutants/a.toml": "# none\n",
    "tests/data.json": "{}\n",
    "pyproject.toml": '[project]\ndependencies = ["trio", "attrs"]\n',
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def parse(text: str) -> Module:
    return Module("trouper.a.one", Path("trouper/a/one.py"), dedent(text))


def test_each_figure_of_a_tree(tmp_path: Path) -> None:
    write(tmp_path, WHAT_IS_MEASURED)
    assert figures.measure(tmp_path) == {
        "lines": 15,
        "files": 8,
        "lab_lines": 0,
        "median_file": 1.5,
        "splinters": 2,
        "wide_lines": 1,
        "docstring_words": 4,
        "pronouns_per_1000": 0,
        "docstrings_with_what": 1,
        "workarounds": 1,
        "foreign_names": 0,
        "class_assignments": 0,
        "circles": 1,
        "pairs": 1,
        "sibling_pairs": 1,
        "test_lines": 3,
        "dependencies": 2,
    }


def test_each_figure_has_its_target(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path, WHAT_IS_MEASURED)
    main([], tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "| | now | target |",
        "|---|---|---|",
        "| lines in `trouper/` | 15 | <= 50,000 |",
    ]
    assert "| lines of the median file | 1.5 | 130 to 150 |" in lines
    assert len(lines) == 2 + len(figures.TARGETS)
    main(["--json"], tmp_path)
    assert json.loads(capsys.readouterr().out) == figures.measure(tmp_path)


def test_imports_circles_splinters_and_pairs(tmp_path: Path) -> None:
    write(tmp_path, WHAT_IS_MEASURED)
    modules = source_tree.read_modules(tmp_path / "trouper")
    graph = source_tree.graph_imports(modules)
    assert graph["trouper.a.one"] == {"trouper.b.two", "trouper.a.three"}
    assert graph["trouper.a.three"] == {"trouper.a.one"}
    assert graph["trouper.b.two"] == {"trouper.a.one"}
    circle = ("trouper.a.one", "trouper.a.three", "trouper.b.two")
    assert source_tree.list_circles(graph) == [circle]
    assert source_tree.list_splinters(modules, graph) == ["trouper.a.three", "trouper.b.two"]
    assert source_tree.list_splinters(modules, graph, below=5) == ["trouper.a.three"]
    assert source_tree.list_pairs(modules, graph) == [("trouper.a", "trouper.b")]


def test_siblings_are_packages_of_one_package() -> None:
    pairs = [("trouper.a", "trouper.b"), ("trouper", "trouper.a"), ("trouper.a.c", "trouper.b.c")]
    assert [*source_tree.list_siblings(pairs)] == [("trouper.a", "trouper.b")]


def test_docstrings_are_also_strings_below_assignments() -> None:
    module = parse('''
        """A module."""
        X = 1
        """Its value."""

        class A:
            """A class."""
            x: int
            """A field."""

        def f():
            """A function."""
            print("nothing")
            "nothing either"
        ''')
    assert sorted(prose.list_docstrings(module)) == [
        "A class.",
        "A field.",
        "A function.",
        "A module.",
        "Its value.",
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It sends them their own.", 3),
        ("that row, this block and those of others", 0),
        ("the sum of these, and that\n", 2),
        ("(none of this)", 1),
        ("item, theme, hit", 0),
    ],
)
def test_pronouns(text: str, count: int) -> None:
    assert prose.count_pronouns(text) == count


@pytest.mark.parametrize(
    ("text", "touched"),
    [
        ("import h11\nh11.Connection._states", ["h11.Connection._states"]),
        ("from h11._util import Sentinel", ["h11._util.Sentinel"]),
        ("import h11._util", ["h11._util"]),
        ("import resource\nresource.setrlimit = print", ["resource.setrlimit"]),
        ("layer.__class__ = Other", ["layer.__class__"]),
        ("kind = type(name, (kind,), {})", ["type(name, ...)"]),
        ("import sys\nsetattr(sys.modules[name], 'f', f)", ["setattr(sys.modules[name], ...)"]),
        ("getattr(model, '_layers')", ["getattr(model, '_layers')"]),
        ("from quart import Body\nclass A(Body):\n  def f(self): self._data", ["self._data"]),
        ("import quart\nclass A(quart.Body):\n  def _clear(self): pass", ["A._clear"]),
        ("import quart\nclass A(quart.B):\n  def _f(self): super()._f()", ["A._f"]),
        ("from trouper.b.two import _name", ["trouper.b.two._name"]),
        ("other._defined_there", ["other._defined_there"]),
    ],
)
def test_private_names_of_other_packages(text: str, touched: list[str]) -> None:
    there = Module("trouper.b.two", Path("trouper/b/two.py"), "_name = _defined_there = 1")
    modules = {"trouper.a.one": parse(text), "trouper.b.two": there}
    assert foreign_names.list_foreign(modules) == {"trouper.a.one": touched}


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n  def __init__(self): self._x = 1\n\na._x + 1",
        "class A:\n  __slots__ = ('_x',)\n\na._x",
        "import os\nos._exit(1)",
        "import sys\nsys.stderr = file",
        "pair._replace(x=1)",
        "from trouper.a.three import _own\nfrom .three import _own",
        "kind = type(self)\nsetattr(self, 'x', 1)\nobject.__setattr__(self, 'x', 1)",
        "import quart\nclass A(quart.Body):\n  def _f(self): pass\n  def g(self): self._f()",
        "print(layer.__class__)",
    ],
)
def test_names_of_ones_own_package_and_documented_ones_do_not_count(text: str) -> None:
    assert foreign_names.list_foreign({"trouper.a.one": parse(text)}) == {}


def test_names_in_the_room_of_workarounds_do_not_count() -> None:
    text = "import threading\nthreading._limbo = {}\n"
    modules = {
        name: Module(name, Path(f"{name}.py"), text)
        for name in ("trouper.workarounds.threads", "trouper.workarounds_of_mine")
    }
    elsewhere = figures.list_foreign_elsewhere(modules)
    assert elsewhere == {"trouper.workarounds_of_mine": ["threading._limbo"]}
