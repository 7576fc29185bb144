"""The ratchet lets faults become fewer, never more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.__main__ import main
from tests.house.ratchet import (
    Faults,
    list_new,
    list_unneeded,
    lower,
    measure_faults,
    read_ratchet,
    write_ratchet,
)

TREE = {
    "trouper/__init__.py": "import trouper.a.one\n",
    "trouper/a/__init__.py": "import trouper\nfound = 1\n",
    "trouper/a/one.py": "import h11\nimport trouper\nh11._state\n",
    "tests/test_one.py": "told_once = told = 1\n",
    "pyproject.toml": "[project]\ndependencies = []\n",
}
RATCHET: Faults = {
    "words": {"tests: told": 3, "tests: said": 1},
    "foreign_names": {"trouper.a": ["h11._one", "h11._two"], "trouper.b": ["h11._three"]},
    "pairs": {"trouper": ["trouper.a"]},
    "circles": {},
}


def replace(kind: str, **more: object) -> Faults:
    return RATCHET | {kind: RATCHET[kind] | {key.replace("__", "."): more[key] for key in more}}


def test_each_fault_of_a_tree(tmp_path: Path) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert measure_faults(tmp_path) == {
        "words": {"trouper: found": 1, "tests: told": 2},
        "foreign_names": {"trouper.a.one": ["h11._state"]},
        "pairs": {"trouper": ["trouper.a"]},
        "circles": {"trouper": ["trouper.a.one"]},
    }


@pytest.mark.parametrize(
    ("now", "new"),
    [
        (RATCHET, []),
        (replace("words", place=1), ["words: place: 1, where 0 may be"]),
        (
            replace("foreign_names", trouper__c=["h11._one"]),
            ["foreign_names: trouper.c: h11._one"],
        ),
        (replace("pairs", trouper=["trouper.a", "trouper.b"]), ["pairs: trouper: trouper.b"]),
        (replace("circles", trouper=["trouper.a"]), ["circles: trouper: trouper.a"]),
    ],
)
def test_more_faults_are_new(now: Faults, new: list[str]) -> None:
    assert [*list_new(now, RATCHET)] == new


def test_names_that_are_no_longer_there_are_not_needed() -> None:
    assert [*list_unneeded(RATCHET, RATCHET)] == []
    now = RATCHET | {"pairs": {}, "foreign_names": {"trouper.a": ["h11._two"]}, "words": {}}
    assert [*list_unneeded(now, RATCHET)] == [
        "foreign_names: trouper.a: h11._one",
        "foreign_names: trouper.b: h11._three",
        "pairs: trouper: trouper.a",
    ]


def test_a_ratchet_is_lowered_and_never_raised(tmp_path: Path) -> None:
    now: Faults = {
        "words": {"tests: told": 3, "tests: place": 9},
        "foreign_names": {"trouper.a": ["h11._two", "h11._new"]},
        "pairs": {},
        "circles": {"trouper.a": ["trouper.b"]},
    }
    lowered = {
        "words": {"tests: told": 3},
        "foreign_names": {"trouper.a": ["h11._two"]},
        "pairs": {},
        "circles": {},
    }
    assert lower(now, RATCHET) == lowered
    write_ratchet(lowered, tmp_path / "ratchet.json")
    assert read_ratchet(tmp_path / "ratchet.json") == lowered


def test_the_command_lowers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Faults] = []
    monkeypatch.setattr("tests.house.ratchet.read_ratchet", lambda: RATCHET)
    monkeypatch.setattr("tests.house.ratchet.write_ratchet", written.append)
    test_each_fault_of_a_tree(tmp_path)
    main(["--json", "--lower"], tmp_path)
    assert written == [
        {
            "words": {"tests: told": 2},
            "foreign_names": {},
            "pairs": {"trouper": ["trouper.a"]},
            "circles": {},
        }
    ]
