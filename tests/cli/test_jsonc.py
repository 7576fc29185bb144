"""JSON with comments, changed in place: what is set is there, and nothing else has changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.cli.agents.jsonc import NotJson, loads, with_value

KEYS = st.text(max_size=4)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
INDENTS = st.sampled_from([None, 2, 4, "\t"])
SETTINGS = """\
// What the editor does.
{
    "theme": "One", // the dark one
    /* {"not": "this"} */
    "agent": {
        "url": "http://x//y", // "quoted"
    },
    "list": [1, 2,],
    // the end
}
"""


@given(VALUES, INDENTS)
def test_all_that_json_reads_is_read(value: Any, indent: Any) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert loads(text) == value


@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.lists(KEYS, min_size=1, max_size=3),
    VALUES,
    INDENTS,
)
def test_what_is_set_is_there_and_the_rest_as_it_was(
    before: dict[str, Any], path: list[str], value: Any, indent: Any
) -> None:
    expected = json.loads(json.dumps(before))
    place = expected
    for key in path[:-1]:
        if place.get(key) is None:
            place[key] = {}
        place = place[key]
        if not isinstance(place, dict):
            return
    place[path[-1]] = value
    after = with_value(json.dumps(before, indent=indent), tuple(path), value)
    assert loads(after) == expected == json.loads(after)
    assert with_value(after, tuple(path), value) == after, "done twice is done once"


@given(st.lists(VALUES, max_size=4), VALUES, INDENTS)
def test_what_is_appended_is_the_last(items: list[Any], value: Any, indent: Any) -> None:
    after = with_value(json.dumps({"a": items}, indent=indent), ("a", len(items)), value)
    assert json.loads(after) == {"a": [*items, value]}


def test_comments_commas_and_indentation_stay() -> None:
    after = with_value(SETTINGS, ("agent", "model"), {"name": "m"})
    after = with_value(after, ("list", 2), 3)
    after = with_value(after, ("theme",), "Two")
    after = with_value(after, ("new",), True)
    assert (
        after
        == """\
// What the editor does.
{
    "theme": "Two", // the dark one
    /* {"not": "this"} */
    "agent": {
        "url": "http://x//y", // "quoted"
        "model": {
            "name": "m"
        }
    },
    "list": [1, 2,
        3
    ],
    // the end
    "new": true
}
"""
    )
    assert loads(after)["agent"] == {"url": "http://x//y", "model": {"name": "m"}}


def test_an_empty_object_and_one_with_a_comment_alone() -> None:
    assert with_value("{}", ("a",), 1) == '{\n  "a": 1\n}'
    assert with_value("{\n  // nothing yet\n}\n", ("a",), 1) == '{\n  // nothing yet\n  "a": 1\n}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("{\n", 2),
        ('{"a" 1}', 1),
        ('{"a": 1 "b": 2}', 1),
        ('{\n"a": 1\n"b": 2}', 3),
        ("{'a': 1}", 1),
        ('{"a": 01}', 1),
        ('{"a": nul}', 1),
        ("{} {}", 1),
        ("[1, , 2]", 1),
        ('{"a": "\n"}', 1),
        ("[" * 1000, 1),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(NotJson, match=f"^line {line}: "):
        loads(text)
