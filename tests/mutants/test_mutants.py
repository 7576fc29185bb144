"""The list of mutants is true to the source, a few of them are played, and what plays them tells
one fate from another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import attrs
import pytest

from tests.family_configs import LONG
from tests.mutants.catalogue import HERE, ROOT, Mutant, Stale, faults, load
from tests.mutants.playing import NotTheCopy, Outcome, Results, Scratch

MUTANTS = load()
SAMPLE = Random(int(os.environ.get("TROUPER_MUTANTS_SEED", "0"))).sample(
    [m for m in MUTANTS if not m.equivalent], 2 if LONG else 1
)


# -- the list ------------------------------------------------------------------------------------


def test_every_fragment_occurs_once_and_every_test_is_there() -> None:
    assert [fault for mutant in MUTANTS for fault in faults(mutant)] == []


def test_there_are_many_over_all_rooms_each_with_a_name_of_its_own() -> None:
    assert len(MUTANTS) >= 200
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    rooms = {mutant.file.partition("/")[0] for mutant in MUTANTS}
    assert rooms >= {"engine", "actors", "storage", "web", "protocol"}


def test_few_are_equivalent_and_each_says_why() -> None:
    equivalent = [mutant for mutant in MUTANTS if mutant.equivalent]
    assert all(len(mutant.equivalent.split()) > 8 for mutant in equivalent)
    assert len(equivalent) < len(MUTANTS) / 20


@pytest.mark.long
def test_a_few_are_played() -> None:
    """All are by `just mutants`. TROUPER_MUTANTS_SEED draws others."""
    with Scratch() as scratch:
        whole = scratch.run(
            [*dict.fromkeys(test for mutant in SAMPLE for test in mutant.tests)], limit_s=600
        )
        assert whole.fate == "survived", f"these tests fail without a mutant:\n{whole.said}"
        for mutant in SAMPLE:
            outcome = scratch.play(mutant, limit_s=600)
            assert outcome.killed, f"{mutant.name} {outcome.fate}: {mutant.breaks}\n{outcome.said}"


# -- what plays them -----------------------------------------------------------------------------

SOURCE = (
    "def double(number: int) -> int:\n    return 2 * number\n\n\ndef half(number: int) -> int:\n   "
    " return number // 2\n"
)
TESTS = """
from trouper.numbers import double

def test_double():
    assert double(3) == 6

def test_nothing_of_ours():
    assert True
"""
FOREIGN = """
import sys, types
sys.modules["trouper.elsewhere"] = types.ModuleType("elsewhere")
sys.modules["trouper.elsewhere"].__file__ = "/elsewhere/trouper.py"

def test_it():
    assert True
"""


def mutant(**more: object) -> Mutant:
    told = Mutant(
        name="numbers:one",
        file="numbers.py",
        breaks="it",
        old="2 * number",
        new="3 * number",
        tests=("tests/test_numbers.py",),
    )
    return attrs.evolve(told, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of one file."""
    root = tmp_path_factory.mktemp("checkout")
    for name, content in {
        "trouper/__init__.py": "",
        "trouper/numbers.py": SOURCE,
        "tests/__init__.py": "",
        "tests/test_numbers.py": TESTS,
        "tests/test_foreign.py": FOREIGN,
        "tests/test_broken.py": "import nothing_of_this_name\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nfilterwarnings = ['error']\n",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    (root / "tests" / "mutants").mkdir()
    shutil.copy(HERE / "player.py", root / "tests" / "mutants")
    return root


@pytest.fixture(scope="module")
def scratch(checkout: Path) -> Iterator[Scratch]:
    with Scratch(checkout) as scratch:
        yield scratch


def test_what_a_test_notices_is_killed_and_nothing_is_left_of_it(
    scratch: Scratch, checkout: Path
) -> None:
    for _ in range(2):
        outcome = scratch.play(mutant())
        assert outcome.fate == "killed" and "assert 9 == 6" in outcome.said
        assert scratch.run(["tests/test_numbers.py"]).fate == "survived"
    assert (checkout / "trouper" / "numbers.py").read_text() == SOURCE, (
        "the checkout itself is never touched"
    )


def test_what_no_test_notices_survives(scratch: Scratch) -> None:
    assert scratch.play(mutant(new="number * 2")).fate == "survived"
    assert scratch.play(mutant(old="number // 2", new="number // 3")).fate == "survived"
    unseen = scratch.play(mutant(tests=("tests/test_numbers.py::test_nothing_of_ours",)))
    assert unseen.fate == "survived"


def test_what_hangs_is_told_apart_from_what_fails(scratch: Scratch) -> None:
    outcome = scratch.play(mutant(new="double(number)\n    while True: pass"), limit_s=60)
    assert outcome.fate == "killed", "a recursion ends"
    hanging = mutant(old="    return 2 * number", new="    while True: pass")
    assert scratch.play(hanging, limit_s=3).fate == "timed out"


def test_tests_that_cannot_be_run_say_nothing(scratch: Scratch) -> None:
    for tests in (
        ("tests/test_broken.py",),
        ("tests/test_nowhere.py",),
        ("tests/test_numbers.py::test_nobody",),
    ):
        assert scratch.play(mutant(tests=tests)).fate == "broken"
    assert not Outcome("broken").killed


def test_a_package_from_elsewhere_is_not_the_copy(scratch: Scratch) -> None:
    with pytest.raises(NotTheCopy, match="/elsewhere/trouper"):
        scratch.play(mutant(tests=("tests/test_foreign.py",)))


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("    return 2 + number", "the nearest line is 2: return 2 * number"),
        ("def half(number: float)", "the nearest line is 5: def half(number: int) -> int:"),
        ("number: int", "2 times, not once; name its function: it begins in lines [1, 5]"),
        ("€€€€", "no line is like it"),
    ],
)
def test_a_stale_fragment_says_where_it_may_be(
    scratch: Scratch, checkout: Path, old: str, said: str
) -> None:
    one = mutant(old=old)
    with pytest.raises(Stale, match="has its fragment") as caught:
        scratch.play(one)
    assert said in str(caught.value)
    assert [said in fault for fault in faults(one, checkout)] == [True]


def test_neither_layout_nor_comments_matter() -> None:
    source = (
        "def both(\n    first,  # One.\n    second,\n):\n    return [\n        first,\n        "
        "second,\n    ]\n"
    )
    mutated = mutant(old="return [first, second]", new="return []").applied(source)
    assert mutated.endswith("):\n    return []\n")


def test_a_fragment_counts_in_its_function_alone() -> None:
    source = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n"
    assert mutant(old="1", new="2", function="A.g").applied(source) == "return 2".join(
        source.rsplit("return 1", 1)
    )
    with pytest.raises(Stale, match=r"numbers.py A.h has its fragment 0 times"):
        mutant(old="1", new="2", function="A.h").applied(source)


def test_a_part_of_a_string_is_compared_as_text() -> None:
    assert mutant(old="%x", new="%d").applied("HEAD = b'%x'\n") == "HEAD = b'%d'\n"


def test_what_is_wrong_with_an_entry_is_told_without_playing_it(checkout: Path) -> None:
    assert faults(mutant(), checkout) == []
    assert "no Python" in faults(mutant(new="2 *"), checkout)[0]
    assert "changes nothing" in faults(mutant(new="2 * number"), checkout)[0]
    for test in (
        "tests/test_nowhere.py",
        "tests/test_numbers.py::test_nobody",
        "tests/test_numbers.py::Nobody::test_it",
    ):
        assert f"there is no {test}" in faults(mutant(tests=(test,)), checkout)[0]


def test_a_fate_is_remembered_until_something_changes(checkout: Path, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", checkout)
    key = results.key(mutant())
    for fate in ("survived", "broken"):
        results.note(key, Outcome(fate))
    assert results.find(key) is None, "played again"
    results.note(key, Outcome("killed"))
    again = Results(tmp_path / "results.json", checkout)
    assert again.find(again.key(mutant())) == Outcome("killed", "as in an earlier run")
    assert again.find(again.key(mutant(new="4 * number"))) is None
    for file in ("trouper/numbers.py", "tests/test_numbers.py"):
        path = checkout / file
        content = path.read_text()
        path.write_text(content + "\n")
        assert again.find(again.key(mutant())) is None
        path.write_text(content)


def test_the_list_is_of_this_checkout() -> None:
    assert (ROOT / "pyproject.toml").exists() and HERE.parent == ROOT / "tests"
