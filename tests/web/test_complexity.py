"""Bodies of very many values are refused before anything is made of them; text is never taken for
values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper import RequestFailed
from trouper.web.http import body_complexity
from trouper.web.http.body_complexity import (
    MAX_CONTAINERS,
    MAX_VALUES,
    check_complexity,
    outside_strings,
    parsed_bytes,
)
from trouper.web.http.body_parsing import parse_json

TEXTS = st.text(st.sampled_from('[]{},:"\\ab \n\u00e9\U0001f469'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """Containers, and commas and colons."""
    if isinstance(value, list | dict):
        inside = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
        parts = max(len(value) - 1, 0) + (len(value) if isinstance(value, dict) else 0)
        return 1 + sum(one for one, _ in inside), parts + sum(one for _, one in inside)
    return 0, 0


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_what_stands_outside_of_strings(value: Any, ascii_only: bool, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_complexity, "PIECE", piece)
        outside = outside_strings(json.dumps(value, ensure_ascii=ascii_only).encode())
    found = sum(map(outside.count, b"[{")), sum(map(outside.count, b",:"))
    assert found == counted(value)


@pytest.mark.parametrize(
    ("body", "called"),
    [
        (b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}", "arrays and objects"),
        (b'{"a":[' + b"{}," * MAX_CONTAINERS + b"{}]}", "arrays and objects"),
        (b"[" * (MAX_CONTAINERS + 1), "arrays and objects"),
        (b'{"a":[' + b"1," * MAX_VALUES + b"1]}", "values"),
    ],
)
def test_too_many_are_refused(body: bytes, called: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        parse_json(body)
    assert refused.value.problem.code == "body_too_complex"
    assert called in refused.value.problem.message


@pytest.mark.parametrize("sign", ["[", "{", ",", ":", '"', "\\"])
def test_text_is_one_value_whatever_stands_in_it(sign: str) -> None:
    body = json.dumps({"prompt": sign * (MAX_VALUES + 10)}).encode()
    assert parse_json(body)["prompt"] == sign * (MAX_VALUES + 10)


def test_a_wide_character_is_seen_across_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in range(1, 20):
        monkeypatch.setattr(body_complexity, "PIECE", piece)
        narrow, wide = ({"prompt": 3000 * "\u00e9" + end} for end in ("\u00e9", "\U0001f469"))
        assert parsed_bytes(json.dumps(narrow).encode()) < parsed_bytes(json.dumps(wide).encode())


def test_as_many_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_complexity, "MAX_CONTAINERS", 5)
    check_complexity(b'{"a": [[], [], []], "b": "[[["}')
    with pytest.raises(RequestFailed):
        check_complexity(b'{"a": [[], [], [], []], "b": ""}')
