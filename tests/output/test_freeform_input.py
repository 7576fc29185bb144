"""The input of a custom tool out of arguments that come in pieces of any length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.web.output.freeform_input import FreeformInput


def decoded(arguments: str, size: int) -> str:
    reading = FreeformInput()
    parts = [reading.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    return "".join(parts) + reading.end()


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 9), st.booleans())
def test_any_text_in_any_pieces(text: str, size: int, ascii_only: bool) -> None:
    assert decoded(json.dumps({"input": text}, ensure_ascii=ascii_only), size) == text


def test_it_is_decoded_while_it_comes() -> None:
    reading = FreeformInput()
    assert [reading.push(piece) for piece in ('{"input": "a', "b\\", "nc", '"}')] == [
        "a",
        "b"[:1],
        "\nc",
        "",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"patch": "x"}, "x"),
        ({}, ""),
        ({"other": 1, "input": "x"}, "x"),
        ({"a": 1, "b": 2}, '{"a": 1, "b": 2}'),
        ({"input": ["x"]}, '["x"]'),
    ],
)
def test_arguments_of_another_shape(arguments: Any, text: str) -> None:
    assert decoded(json.dumps(arguments), 3) == text


def test_nothing_is_made_of_half_a_call() -> None:
    assert decoded('{"inp', 2) == ""
