"""The room: how workarounds are listed, switched off and described."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from trouper import workarounds

NAMES = workarounds.list_names()
ROOM = Path(workarounds.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/workarounds.md"


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_is_wrong_and_has_a_test_of_its_end(name: str) -> None:
    head = ast.get_docstring(ast.parse((ROOM / f"{name}.py").read_text())) or ""
    fields = re.findall("^(Fault|Seen|Upstream|Without): .", head, re.MULTILINE)
    assert fields == ["Fault", "Seen", "Upstream", "Without"]
    assert workarounds.summarize(name).endswith(".")
    tests = ast.parse((Path(__file__).parent / f"test_{name}.py").read_text())
    assert "test_it_is_still_needed" in {getattr(node, "name", "") for node in tests.body}


def test_the_page_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert rows == NAMES


def test_names_in_the_variable_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = NAMES
    monkeypatch.setenv(workarounds.VARIABLE, f" {first} ,")
    assert not workarounds.is_active(first)
    assert not workarounds.is_active(f"trouper.workarounds.{first}")
    assert all(map(workarounds.is_active, others))
    monkeypatch.setenv(workarounds.VARIABLE, "all")
    assert not any(map(workarounds.is_active, NAMES))
    monkeypatch.delenv(workarounds.VARIABLE)
    assert all(map(workarounds.is_active, NAMES))


def test_an_unknown_name_is_one_warning_that_lists_the_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(workarounds.VARIABLE, f"blass,{NAMES[0]},other")
    workarounds.warn_of_unknown()
    [record] = caplog.records
    assert "no workaround is named blass, other" in record.getMessage()
    assert all(name in record.getMessage() for name in NAMES)
    caplog.clear()
    monkeypatch.setenv(workarounds.VARIABLE, "all")
    workarounds.warn_of_unknown()
    assert not caplog.records
