"""Bodies become typed fields, or a 400 that names the parameter: pure, so that every limit is met
from both sides."""

from __future__ import annotations

import json
from math import inf, nextafter
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from trouper.protocol.problems import RequestFailed
from trouper.web.http.body_faults import ordered, says
from trouper.web.http.body_parsing import between, parse_json
from trouper.web.http.client_paths import Adaptation, trace_to_client
from trouper.web.http.field_types import HUGE
from trouper.web.http.request_body import Body, SentBack, structure
from trouper.web.http.request_schema import Unsupported, among, components_of, schema_of
from trouper.web.openai.chat_completions import ChatRequest
from trouper.web.openai.completions import CompletionRequest

LIMITED = [
    (cls, name, told)
    for cls in (ChatRequest, CompletionRequest)
    for name, schema in schema_of(cls)["properties"].items()
    for told in (schema, *schema.get("anyOf", ()))
    if {"minimum", "exclusiveMinimum", "maximum"} & {*told}
]


def fault(*call: Any) -> tuple[str | None, str | None]:
    """(parameter, code) of what it is refused with."""
    function, *arguments = call
    with pytest.raises(RequestFailed) as caught:
        function(*arguments)
    assert caught.value.problem.status == 400
    return caught.value.problem.param, caught.value.problem.code


def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    """As Windows' tools write it; no reader of JSON has to refuse it (RFC 8259, 8.1)."""
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert (
        fault(parse_json, b"\xef\xbb\xbf\xef\xbb\xbf{}")
        == fault(parse_json, b"\xef\xbb\xbf")
        == (None, "invalid_json")
    )


def parse(cls: Any, **fields: Any) -> Any:
    needed = (
        {"messages": [{"role": "user", "content": "a"}]} if cls is ChatRequest else {"prompt": "a"}
    )
    return structure(needed | fields, cls)


@pytest.mark.parametrize(
    ("cls", "name", "told"), LIMITED, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_a_limit_is_taken_and_what_is_beyond_it_is_not(
    cls: Any, name: str, told: dict[str, Any]
) -> None:
    whole = "integer" in told["type"]
    for key, below in (("minimum", -1), ("maximum", 1)):
        if key in told:
            bound = told[key] if whole else float(told[key])
            assert getattr(parse(cls, **{name: bound}), name) == bound
            beyond = bound + below if whole else nextafter(bound, below * inf)
            assert fault(lambda value=beyond: parse(cls, **{name: value})) == (
                name,
                "invalid_value",
            )
    if "exclusiveMinimum" in told:
        bound = told["exclusiveMinimum"]
        assert fault(lambda: parse(cls, **{name: bound})) == (name, "invalid_value")
        assert getattr(parse(cls, **{name: 1e-9}), name) == 1e-9


def test_there_are_limits() -> None:
    assert {name for _, name, _ in LIMITED} >= {
        "temperature",
        "top_p",
        "n",
        "min_tokens",
        "max_tokens",
        "best_of",
    }


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(-10, 10), st.booleans())
def test_between(value: float, low: float, high: float, open_low: bool) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if inside:
        between("x", value, low, high, open_low=open_low)
    else:
        assert fault(lambda: between("x", value, low, high, open_low=open_low)) == (
            "x",
            "invalid_value",
        )


Size = Literal["large", "a"]


class Note(SentBack, tag="note", frozen=True):
    text: str
    unsupported: ClassVar[Unsupported] = {"citations": ([],)}


class Picture(SentBack, tag="picture", frozen=True):
    url: Annotated[str, says("{path} must be a URL, not {type}", "unsupported_content")]
    large: bool | None = None


class Inner(Body, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = {"old": (1,)}
    words: Annotated[tuple[int, ...], Meta(max_length=3)] = ()
    name: Annotated[str, Meta(max_length=5)] | None = None
    kind: Annotated[Size, ordered(Size)] | None = None
    yes: bool = False
    size: float = 0.0
    title: Annotated[str, Meta(min_length=1)] | None = None


class Outer(Body, kw_only=True, frozen=True):
    within: Inner | None = None
    parts: list[Note | Picture] | None = None
    only: Note | None = None
    raw: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"words": [1, 2, 3, 4]}, "within.words", "invalid_value"),
        ({"name": "longer"}, "within.name", "invalid_value"),
        ({"kind": "c"}, "within.kind", "invalid_value"),
        ({"kind": 3}, "within.kind", "invalid_type"),
        ({"yes": 1}, "within.yes", "invalid_type"),
        ({"size": True}, "within.size", "invalid_type"),
        ({"size": "1"}, "within.size", "invalid_type"),
        ({"name": 1}, "within.name", "invalid_type"),
        ({"words": [1.5]}, "within.words", "invalid_type"),
        ({"words": 1}, "within.words", "invalid_type"),
        ({"size": 10**400}, "within.size", "invalid_type"),
        ({"other": 1}, "within.other", "unknown_parameter"),
        ({"other": None}, "within.other", "unknown_parameter"),
        ({"old": 2}, "within.old", "unsupported_parameter"),
        ({"old": True}, "within.old", "unsupported_parameter"),
    ],
)
def test_what_is_refused_names_its_place(body: dict[str, Any], param: str, code: str) -> None:
    assert fault(lambda: structure({"within": body}, Outer)) == (param, code)


NOTE = {"type": "note", "text": "a"}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"parts": 3}, "parts", "invalid_type"),
        ({"parts": [3]}, "parts.0", "invalid_type"),
        ({"parts": [NOTE, {"type": "film"}]}, "parts.1.type", "invalid_value"),
        ({"parts": [NOTE, {"text": "a"}]}, "parts.1.type", "invalid_value"),
        ({"parts": [NOTE, {"type": "note"}]}, "parts.1.text", "missing_required_parameter"),
        (
            {"parts": [NOTE, {"type": "note", "txt": "misspelled"}]},
            "parts.1.txt",
            "unsupported_parameter",
        ),
        ({"parts": [NOTE | {"extra": 1}], "within": {"yes": 1}}, "within.yes", "invalid_type"),
        ({"parts": [NOTE | {"url": "x"}]}, "parts.0.url", "unsupported_parameter"),
        ({"parts": [NOTE | {"citations": [1]}]}, "parts.0.citations", "unsupported_parameter"),
        ({"parts": [{"type": "picture", "url": 3}]}, "parts.0.url", "unsupported_content"),
        ({"parts": [{"type": "picture"}]}, "parts.0.url", "unsupported_content"),
        ({"only": {"text": "a"}}, "only.type", "invalid_value"),
        ({"only": {"type": "picture", "text": "a"}}, "only.type", "invalid_value"),
        ({"raw": [1]}, "raw", "invalid_type"),
    ],
)
def test_faults_within_arrays_and_tagged_objects(
    body: dict[str, Any], param: str, code: str
) -> None:
    assert fault(lambda: structure(body, Outer)) == (param, code)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=7),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "url", "large", "words"]), inner)
    ),
    max_leaves=8,
)
FIELDS = ("words", "name", "kind", "yes", "size", "parts", "only", "raw", "type", "text", "url")


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES | st.sampled_from(["note", "picture"])))
def test_every_fault_has_a_param(body: dict[str, Any]) -> None:
    """Also where a class has no words of its own for it."""
    part = {"type": "note"} | body
    faults: list[RequestFailed] = []
    for outer in ({"within": body}, {"parts": [NOTE, part]}, {"only": part}, body):
        try:
            structure(outer, Outer, lambda _: None)
        except RequestFailed as failed:
            faults.append(failed)
    assert all(failed.problem.param for failed in faults)
    assert not any(failed.problem.message.startswith("the body is not as") for failed in faults)


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
@pytest.mark.parametrize("at", [0, 1, 998, 999])
def test_a_fault_has_its_index(count: int, at: int) -> None:
    notes: list[Any] = [NOTE] * count
    notes[min(at, count - 1)] = {"type": "note", "text": 1}
    assert fault(lambda: structure({"parts": notes}, Outer)) == (
        f"parts.{min(at, count - 1)}.text",
        "invalid_type",
    )


NAMES = st.lists(st.text("abcdefgh", min_size=2, max_size=6), min_size=1, unique=True)


@given(NAMES, st.data())
def test_an_entry_keeps_its_index_whatever_was_dropped_and_copied(
    names: list[str], data: Any
) -> None:
    """Identity tells entries apart, also where numbers and short texts are alike."""
    before = [{"name": name, "kind": 1, "inner": {"size": 2}} for name in names]
    keep = data.draw(st.lists(st.sampled_from(before), min_size=1, unique_by=id))
    kept = [entry for entry in before if any(entry is one for one in keep)]
    copies = data.draw(st.lists(st.booleans(), min_size=len(kept), max_size=len(kept)))
    after = [
        {**entry, "type": "made"} if is_copy else entry
        for entry, is_copy in zip(kept, copies, strict=True)
    ]
    origins = [at for at, entry in enumerate(before) if any(entry is one for one in kept)]
    sent = {"tools": before, "sizes": [*range(len(names))], "n": 1}
    adaptation = Adaptation("", sent, {"tools": after, "sizes": origins, "n": 1})
    for index, origin in enumerate(origins):
        assert trace_to_client(f"sizes.{index}", [adaptation]) == f"sizes.{origin}"
        for rest in ("kind", "inner.size", "missing"):
            param = trace_to_client(f"tools.{index}.{rest}", [adaptation])
            assert param == f"tools.{origin}.{rest}"
    assert trace_to_client("n", [adaptation]) == "n"


def test_a_text_can_be_too_short() -> None:
    with pytest.raises(RequestFailed) as caught:
        structure({"within": {"title": ""}}, Outer)
    assert caught.value.problem.message == "within.title is empty"


def test_messages_say_what_is_allowed() -> None:
    def message(body: dict[str, Any]) -> str:
        with pytest.raises(RequestFailed) as caught:
            structure(body, Outer)
        return caught.value.problem.message

    assert message({"within": {"kind": "c"}}) == "within.kind must be one of large, a, not 'c'", (
        "in their order"
    )
    assert message({"within": {"size": "1"}}) == "within.size: expected a number, got a string"
    assert (
        message({"parts": [{"type": "film"}]})
        == "parts.0.type must be one of note, picture, not 'film'"
    )
    assert message({"parts": [{"type": "picture"}]}) == "parts.0.url must be a URL, not null"
    assert (
        message({"parts": [{"type": "note", "text": 1}]})
        == "parts.0.text must be a string, not an integer"
    )


def test_what_fits_is_taken() -> None:
    told = {"words": [1, 2.0, 3], "name": "five!", "kind": "a", "yes": True, "size": 1, "old": 1.0}
    assert structure(told, Inner) == Inner(
        words=(1, 2, 3), name="five!", kind="a", yes=True, size=1.0
    )
    assert structure(dict.fromkeys(("words", "name", "yes", "old")), Inner) == Inner()


def test_null_means_absent_at_every_level() -> None:
    """But not inside of what is passed on as it is."""
    told = {
        "within": {"words": None, "size": None},
        "parts": [NOTE | {"url": None, "citations": []}],
        "raw": {"a": None},
    }
    assert structure(told, Outer) == Outer(within=Inner(), parts=[Note("a")], raw={"a": None})


def test_what_is_not_read_can_be_kept_instead_of_refused() -> None:
    """Names at every level, and the rest is parsed."""
    unread: list[RequestFailed] = []
    body = {
        "made_up": 1,
        "within": {"other": 2, "old": 3, "yes": True},
        "parts": [NOTE | {"extra": 4}],
    }
    assert structure(body, Outer, unread.append) == Outer(within=Inner(yes=True), parts=[Note("a")])
    assert [failed.problem.param for failed in unread] == [
        "made_up",
        "within.other",
        "within.old",
        "parts.0.extra",
    ]


def test_the_types_are_the_schema() -> None:
    components = components_of([Outer])
    assert {*components} == {"Inner", "Note", "Picture"}
    assert components["Inner"]["additionalProperties"] is False
    assert components["Note"]["additionalProperties"] == {"type": "null"}
    assert components["Note"]["required"] == ["type", "text"]
    assert components["Inner"]["properties"]["words"]["maxItems"] == 3
    assert components["Inner"]["properties"]["old"]["enum"] == [1, None]


@pytest.mark.parametrize("body", [b"[]", b'"a"', b"1", b"null", b"{", b"", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_no_body(body: bytes) -> None:
    assert fault(parse_json, body) == (None, "invalid_json")


def test_a_refusal_says_what_is_meant() -> None:
    with pytest.raises(RequestFailed, match=r"^top_n must be at least 1, not 0$"):
        between("top_n", 0, 1, inf)
    with pytest.raises(RequestFailed, match=r"^max_tokens must be at least 1, not 0$"):
        between("max_tokens", 0, 1, HUGE)
    with pytest.raises(RequestFailed, match=r"^max_tokens must be at least 1 and at most 9"):
        between("max_tokens", 2**64, 1, HUGE)
    with pytest.raises(RequestFailed, match="the body is empty; send a JSON object"):
        parse_json(b" \n")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([1.0, 0.0, "a"]),
    st.lists,
    max_leaves=3,
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
