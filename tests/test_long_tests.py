"""The marker `long`: whom the short version leaves out."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.long_tests import is_left_out, unmatched_patterns


@attrs.frozen
class Call:
    id: str


@attrs.frozen
class Item:
    """As much of a pytest.Item as is read."""

    nodeid: str
    callspec: Call
    marker: pytest.Mark | None = None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "long"
        return self.marker


def items(mark: pytest.MarkDecorator | None, *ids: str) -> list[Any]:
    marker = None if mark is None else mark.mark
    return [Item(f"t.py::test[{each}]", Call(each), marker) for each in ids]


def left_out(mark: pytest.MarkDecorator | None) -> list[str]:
    return [each.callspec.id for each in items(mark, "0-llama", "0-gpt_oss") if is_left_out(each)]


def test_a_long_test_is_left_out_but_for_what_it_keeps() -> None:
    assert left_out(None) == []
    assert left_out(pytest.mark.long) == ["0-llama", "0-gpt_oss"]
    assert left_out(pytest.mark.long(but=("*-llama",))) == ["0-gpt_oss"]


def test_a_pattern_without_a_parameter_is_named() -> None:
    assert unmatched_patterns(items(pytest.mark.long(but=("*-llama",)), "0-llama")) == []
    assert unmatched_patterns(items(pytest.mark.long(but=("llama",)), "0-llama")) == [
        "t.py::test: no parameter is like 'llama'"
    ]
