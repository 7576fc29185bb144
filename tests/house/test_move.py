"""`just move`, on trees that the tests write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.house.move import CannotMove, main, move

pytestmark = pytest.mark.filterwarnings("ignore:Delete once deprecated:DeprecationWarning")
"""Rope calls a function that it has deprecated."""

SIZER = 'class Sizer:\n    """One `Sizer`."""\n\n\n'
FREE_ROWS = "def free_rows(rows: int) -> int:\n    return rows\n"
TREE = {
    "trouper/__init__.py": 'from trouper.rooms.sizer import Sizer\n\n__all__ = ["Sizer"]\n',
    "trouper/rooms/__init__.py": "",
    "trouper/rooms/sizer.py": SIZER + FREE_ROWS,
    "trouper/rooms/user.py": (
        "from trouper.rooms import other, sizer\n"
        "from trouper.rooms.sizer import free_rows\n\n\n"
        'def use(name: str = "sizer") -> str:\n'
        "    free_rows(sizer.free_rows(other.X))\n"
        '    return f"{sizer.Sizer.__name__} {name}"\n'
    ),
    "trouper/rooms/other.py": "X = 1\n",
    "trouper/halls/__init__.py": "",
    "tests/__init__.py": "",
    "tests/test_sizer.py": (
        "import trouper.rooms.sizer\n\n\n"
        "def test_free_rows() -> None:\n"
        "    assert trouper.rooms.sizer.free_rows(1) == 1\n"
        '    assert "trouper.rooms.sizer.free_rows"\n'
    ),
    "tests/mutants/rooms.toml": (
        '[[source]]\nfile = "rooms/sizer.py"\ntests = ["tests/test_sizer.py::test_free_rows"]\n\n'
        "[[source.mutants]]\nname = \"none-free\"\nold = 'def free_rows('\n"
        "new = 'def free_rows(*, '\n\n"
        '[[source]]\nfile = "rooms/user.py"\ntests = ["tests/test_sizer.py"]\n\n'
        "[[source.mutants]]\nname = \"other\"\nold = 'sizer.free_rows(other.X)'\n"
        "new = '''\nother.X\n'''\n"
    ),
    "docs/tree.md": "`rooms/sizer.py`: `free_rows`, trouper/rooms/sizer.py\nsizer.py, a-sizer.py\n",
    "pyproject.toml": '[contract]\nmodules = ["trouper.rooms.sizer", "trouper.rooms.sizers"]\n',
    "CHANGELOG.md": "trouper/rooms/sizer.py came.\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
    return tmp_path


def read(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file())
    inside = {path.relative_to(root): path.read_text("utf-8", "replace") for path in files}
    hidden = (".git", ".ruff_cache")
    return {path.as_posix(): text for path, text in inside.items() if path.parts[0] not in hidden}


def test_a_module_moves_to_another_package_and_name(checkout: Path) -> None:
    shown = move(checkout, "trouper.rooms.sizer", "trouper.halls.row_sizer")
    files = read(checkout)
    assert "trouper/rooms/sizer.py" not in files
    assert files["trouper/halls/row_sizer.py"] == TREE["trouper/rooms/sizer.py"]
    assert files["trouper/rooms/user.py"] == (
        "from trouper.halls import row_sizer\n"
        "from trouper.halls.row_sizer import free_rows\n"
        "from trouper.rooms import other\n\n\n"
        'def use(name: str = "sizer") -> str:\n'
        "    free_rows(row_sizer.free_rows(other.X))\n"
        '    return f"{row_sizer.Sizer.__name__} {name}"\n'
    )
    assert files["tests/test_sizer.py"].count("trouper.halls.row_sizer") == 3
    assert 'file = "halls/row_sizer.py"' in files["tests/mutants/rooms.toml"]
    assert "old = 'row_sizer.free_rows(other.X)'" in files["tests/mutants/rooms.toml"]
    assert files["docs/tree.md"] == (
        "`halls/row_sizer.py`: `free_rows`, trouper/halls/row_sizer.py\nsizer.py, a-sizer.py\n"
    )
    assert '["trouper.halls.row_sizer", "trouper.rooms.sizers"]' in files["pyproject.toml"]
    assert files["CHANGELOG.md"] == TREE["CHANGELOG.md"], "history stays"
    assert "changed: docs/tree.md" in shown
    assert shown[-1].startswith("docs/tree.md:2: "), "the bare name is left to the reader"


def test_a_module_that_is_renamed_in_its_package_is_renamed_where_it_is_named_alone(
    checkout: Path,
) -> None:
    move(checkout, "trouper.rooms.sizer", "trouper.rooms.row_sizer")
    assert read(checkout)["docs/tree.md"].endswith("\nrow_sizer.py, a-sizer.py\n")


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (("trouper.rooms.sizer", "trouper.halls.sizer"),) * 2,
        (("trouper.rooms.sizer", "trouper.halls.measure"),) * 2,
        (("trouper.rooms", "trouper.halls.rooms"),) * 2,
        (("tests.test_sizer", "tests.test_rows"),) * 2,
        (
            ("trouper.rooms.sizer:free_rows", "idle_rows"),
            ("trouper.rooms.sizer:idle_rows", "free_rows"),
        ),
    ],
)
def test_there_and_back_changes_nothing(
    checkout: Path,
    there: tuple[str, str],
    back: tuple[str, str],
) -> None:
    before = read(checkout)
    move(checkout, there[0], there[1])
    assert read(checkout).keys() != before.keys() or read(checkout) != before
    old, new = there[::-1] if back == there else back
    move(checkout, old, new)
    assert read(checkout) == before


def test_a_package_moves_with_its_modules(checkout: Path) -> None:
    move(checkout, "trouper.rooms", "trouper.halls.rooms")
    files = read(checkout)
    assert "trouper/halls/rooms/sizer.py" in files
    assert "from trouper.halls.rooms import other, sizer\n" in files["trouper/halls/rooms/user.py"]
    assert '["trouper.halls.rooms.sizer", "trouper.halls.rooms.sizers"]' in files["pyproject.toml"]
    assert 'file = "halls/rooms/user.py"' in files["tests/mutants/rooms.toml"]


def test_a_name_that_can_only_mean_itself_is_renamed_in_prose_too(checkout: Path) -> None:
    shown = move(checkout, "trouper.rooms.sizer:free_rows", "idle_rows")
    files = read(checkout)
    texts = {name: text.replace("test_free_rows", "") for name, text in files.items()}
    assert not [name for name, text in texts.items() if "free_rows" in text]
    assert "old = 'def idle_rows('" in files["tests/mutants/rooms.toml"]
    assert "def test_free_rows" in files["tests/test_sizer.py"]
    assert not any("still mentioned" in line for line in shown)


def test_a_name_that_is_a_word_is_left_in_prose(checkout: Path) -> None:
    shown = move(checkout, "trouper.rooms.sizer:Sizer", "Measure")
    files = read(checkout)
    assert "from trouper.rooms.sizer import Measure" in files["trouper/__init__.py"]
    assert "sizer.Measure.__name__" in files["trouper/rooms/user.py"]
    assert '__all__ = ["Measure"]' in files["trouper/__init__.py"]
    assert shown[-1] == 'trouper/rooms/sizer.py:2: """One `Sizer`."""'


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("trouper.rooms.nothing", "trouper.rooms.x", "there is no module trouper.rooms.nothing"),
        ("trouper.rooms.sizer", "trouper.rooms.other", "trouper.rooms.other is there already"),
        ("trouper.rooms.sizer", "trouper.cellar.x", "there is no package trouper.cellar"),
        ("trouper.rooms.sizer", "trouper.rooms.a-b", "is no dotted name of a module"),
        ("trouper.rooms.sizer:Nothing", "X", "sizer.py defines no class, function or variable"),
        ("trouper.rooms.sizer:Sizer", "free_rows", "uses the name free_rows already"),
        ("trouper.rooms.sizer", "trouper.halls.other", "user.py uses the name other already"),
        ("trouper.rooms.sizer:Sizer", "2x", "2x is no identifier"),
    ],
)
def test_a_fault_says_what_is_wrong_and_changes_nothing(
    checkout: Path, old: str, new: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CannotMove, match=fault):
        move(checkout, old, new)
    assert main([old, new], checkout) == 2
    assert capsys.readouterr().err.startswith("just move: ")
    assert read(checkout) == TREE
