"""Bodies become typed fields, or a 400 that names the parameter: pure, so that every limit is met from both sides."""

from __future__ import annotations

import json
from math import inf, nextafter
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.protocol.problems import RequestFailed
from trouper.web.http.body_parsing import between, flag, only, parse_json, structure
from trouper.web.http.request_schema import among, limits
from trouper.web.openai.chat_completions import REFUSED as OF_CHATS
from trouper.web.openai.chat_completions import ChatRequest
from trouper.web.openai.completions import REFUSED as OF_COMPLETIONS
from trouper.web.openai.completions import CompletionRequest

LIMITED = [
    (cls, field.name, field.metadata["schema"])
    for cls in (ChatRequest, CompletionRequest)
    for field in attrs.fields(cls)
    if {"minimum", "exclusiveMinimum", "maximum"} & {*field.metadata.get("schema", {})}
]
REFUSED = {ChatRequest: OF_CHATS, CompletionRequest: OF_COMPLETIONS}


def fault(*call: Any) -> tuple[str | None, str | None]:
    """(parameter, code) of what it is refused with."""
    function, *arguments = call
    with pytest.raises(RequestFailed) as caught:
        function(*arguments)
    assert caught.value.problem.status == 400
    return caught.value.problem.param, caught.value.problem.code


def parse(cls: Any, **fields: Any) -> Any:
    body = {"messages": [], "prompt": "a"} | fields
    return structure(
        {name: body[name] for name in body if name in {f.name for f in attrs.fields(cls)} or name in fields},
        cls,
        REFUSED[cls],
    )


def of_type(cls: Any, name: str, value: float) -> float:
    return int(value) if "int" in str(getattr(attrs.fields(cls), name).type) else value


@pytest.mark.parametrize(("cls", "name", "told"), LIMITED, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_limit_is_taken_and_what_is_beyond_it_is_not(cls: Any, name: str, told: dict[str, Any]) -> None:
    whole = "int" in str(getattr(attrs.fields(cls), name).type)
    for key, below in (("minimum", -1), ("maximum", 1)):
        if key in told:
            bound = of_type(cls, name, told[key])
            assert getattr(parse(cls, **{name: bound}), name) == bound
            beyond = bound + below if whole else nextafter(bound, below * inf)
            assert fault(lambda value=beyond: parse(cls, **{name: value})) == (name, "invalid_value")
    if "exclusiveMinimum" in told:
        bound = told["exclusiveMinimum"]
        assert fault(lambda: parse(cls, **{name: bound})) == (name, "invalid_value")
        assert getattr(parse(cls, **{name: 1e-9}), name) == 1e-9


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(-10, 10), st.booleans())
def test_between(value: float, low: float, high: float, open_low: bool) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if inside:
        between("x", value, low, high, open_low=open_low)
    else:
        assert fault(lambda: between("x", value, low, high, open_low=open_low)) == ("x", "invalid_value")


@attrs.frozen(kw_only=True)
class Body:
    words: tuple[int, ...] = attrs.field(default=(), metadata=limits(maxItems=3))
    name: str | None = attrs.field(default=None, metadata=limits(maxLength=5))
    kind: str | None = attrs.field(default=None, metadata=limits(enum=["a", "b"]))
    yes: bool = False
    size: float = 0.0


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"words": [1, 2, 3, 4]}, "within.words", "invalid_value"),
        ({"name": "longer"}, "within.name", "invalid_value"),
        ({"kind": "c"}, "within.kind", "invalid_value"),
        ({"yes": 1}, "within.yes", "invalid_type"),
        ({"size": True}, "within.size", "invalid_type"),
        ({"size": "1"}, "within.size", "invalid_type"),
        ({"name": 1}, "within.name", "invalid_type"),
        ({"words": [1.5]}, "within.words", "invalid_type"),
        ({"words": 1}, "within.words", "invalid_type"),
        ({"size": 10**400}, "within.size", "invalid_type"),
        ({"other": 1}, "within.other", "unknown_parameter"),
        ({"old": 2}, "within.old", "unsupported_parameter"),
        ({"old": True}, "within.old", "unsupported_parameter"),
    ],
)
def test_what_is_refused_names_its_place(body: dict[str, Any], param: str, code: str) -> None:
    assert fault(lambda: structure(body, Body, {"old": (1,)}, within="within.")) == (param, code)


def test_what_fits_is_taken() -> None:
    told = {"words": [1, 2.0, 3], "name": "five!", "kind": "b", "yes": True, "size": 1, "old": 1.0}
    assert structure(told, Body, {"old": (1,)}) == Body(words=(1, 2, 3), name="five!", kind="b", yes=True, size=1.0)
    assert structure(dict.fromkeys(("words", "name", "yes", "old")), Body, {"old": (1,)}) == Body()


@pytest.mark.parametrize("body", [b"[]", b'"a"', b"1", b"null", b"{", b"", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_no_body(body: bytes) -> None:
    assert fault(parse_json, body) == (None, "invalid_json")


def test_flags_and_names_inside_of_objects() -> None:
    assert [flag(None, "x"), flag(False, "x"), flag(True, "x")] == [False, False, True]
    assert fault(flag, 1, "x") == fault(flag, "true", "x") == ("x", "invalid_type")
    only({"a": 1}, {"a", "b"}, "x")
    assert fault(only, {"a": 1, "c": None}, {"a", "b"}, "x") == ("x.c", "unknown_parameter")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([1.0, 0.0, "a"]), st.lists, max_leaves=3
)


@given(JSON, JSON)
def test_values_are_compared_as_json_compares_them(one: Any, other: Any) -> None:
    """As far as what is neutral goes: scalars, and arrays that are written alike."""
    if isinstance(one, bool) or isinstance(other, bool):
        assert among(one, [other]) == (json.dumps(one) == json.dumps(other))
    else:
        assert among(one, [other]) == (one == other)
    assert among(one, [one, other])
    assert not among(one, [])
