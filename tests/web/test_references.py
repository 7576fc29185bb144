"""Schemas whose references are pointers: a value follows the changed one if and only if it follows
the original."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import attrs
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from trouper import RequestFailed
from trouper.web.openai.response_format import schema_grammar
from trouper.web.output.schema_references import PLAIN, ReferenceUnknown, resolved
from trouper.web.output.tool_calls import Tools

NAMES = ("a", "Node", "a/b", "m~n", "~1", "50%", "x y", "é", "$ref", "properties", "0")
HOME = "https://example.com/schema"
DATA = {"$ref": "#/nowhere", "$id": "T0"}
"""Looks like a reference, and is none where it is a value."""
LEAVES: tuple[Any, ...] = (
    {"type": "integer"},
    {"type": "string"},
    {"const": DATA},
    {"enum": [1, "x", DATA]},
    True,
    False,
)
HOLE = "HOLE"
"""Where a reference is put in once all its targets are known."""


def names() -> st.SearchStrategy[str]:
    return st.sampled_from(NAMES)


def structured(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas whose parts may be references: each looks further into a value, so that recursion
    ends with the value."""
    parts = (
        inner
        | st.just({"$ref": HOLE})
        | st.just({"$ref": HOLE, "type": ["object", "array", "string"]})
    )
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(names(), parts, max_size=3)},
            optional={"additionalProperties": parts, "required": st.lists(names(), max_size=1)},
        ),
        st.fixed_dictionaries({"type": st.just("array"), "items": parts}),
        st.fixed_dictionaries({"prefixItems": st.lists(parts, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"not": inner}),
    )


@attrs.frozen
class Drawn:
    """A schema that stands alone, and how often it refers to something."""

    schema: dict[str, Any]
    references: int


@st.composite
def documents(draw: st.DrawFn) -> Drawn:
    within = st.recursive(
        st.sampled_from(LEAVES).map(lambda leaf: json.loads(json.dumps(leaf))),
        structured,
        max_leaves=8,
    )
    root: dict[str, Any] = draw(within.filter(lambda schema: isinstance(schema, dict)))
    if definitions := draw(st.dictionaries(names(), within, max_size=3)):
        root[draw(st.sampled_from(("$defs", "definitions")))] = definitions
    if others := draw(st.dictionaries(names(), within, max_size=1)):
        # No keyword: nothing but a reference says that these are schemas.
        root["components"] = {"schemas": others}
    identified = draw(st.booleans())
    if identified:
        root["$id"] = HOME
    targets, holes = places(root)
    anchors = draw(st.booleans())
    for number, hole in enumerate(holes):
        place, target = draw(st.sampled_from(targets))
        pointer = "".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in place)
        fragment = (
            pointer
            if draw(st.booleans()) and "%" not in pointer
            else quote(pointer, safe=f"{PLAIN}/")
        )
        if anchors and isinstance(target, dict) and "components" not in place:
            fragment = target.setdefault("$anchor", f"anchor-{number}")
        hole["$ref"] = (HOME if identified and draw(st.booleans()) else "") + "#" + fragment
    return Drawn(root, len(holes))


def places(root: Any) -> tuple[list[tuple[tuple[str, ...], Any]], list[dict[str, Any]]]:
    """Every schema that is no bare reference, with its place; and every reference."""
    targets, holes = [], []
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        place, schema = waiting.pop()
        if isinstance(schema, dict) and schema.get("$ref") == HOLE:
            holes.append(schema)
            continue
        targets.append((place, schema))
        if not isinstance(schema, dict):
            continue
        for key in ("properties", "$defs", "definitions"):
            waiting += [((*place, key, name), part) for name, part in schema.get(key, {}).items()]
        for key in ("anyOf", "prefixItems"):
            waiting += [
                ((*place, key, str(index)), part) for index, part in enumerate(schema.get(key, []))
            ]
        waiting += [
            ((*place, key), schema[key])
            for key in ("items", "additionalProperties", "not")
            if key in schema
        ]
        others = schema.get("components", {}).get("schemas", {}) if not place else {}
        waiting += [(("components", "schemas", name), part) for name, part in others.items()]
    return targets, holes


VALUES = st.recursive(
    st.sampled_from((1, "x", None, DATA)),
    lambda inner: st.dictionaries(names(), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@given(documents(), st.lists(VALUES, min_size=1, max_size=5))
def test_a_value_follows_the_resolved_schema_if_it_follows_the_original(
    drawn: Drawn, values: list[Any]
) -> None:
    assume(drawn.references)
    alone, again = Draft202012Validator(drawn.schema), Draft202012Validator(resolved(drawn.schema))
    for value in values:
        expected = alone.is_valid(value)
        event(f"valid: {expected}")
        assert again.is_valid(value) == expected


@given(documents())
def test_the_original_is_left_as_it_was(drawn: Drawn) -> None:
    before = json.dumps(drawn.schema)
    resolved(drawn.schema)
    assert json.dumps(drawn.schema) == before


@pytest.mark.parametrize(
    "reference",
    [
        "#/$defs/Nod",
        "#Node",
        "#/$defs/Node/0",
        "#/enum/1",
        "#/enum/x",
    ],
)
def test_a_reference_to_nothing_is_said(reference: str) -> None:
    with pytest.raises(ReferenceUnknown, match="names nothing"):
        resolved({"$defs": {"Node": {}}, "enum": [1], "items": {"$ref": reference}})


@pytest.mark.parametrize("reference", ["other.json", "https://example.com/other#/$defs/Node"])
def test_a_reference_to_another_document_stays(reference: str) -> None:
    assert resolved({"items": {"$ref": reference}}) == {"items": {"$ref": reference}}


def test_recursive_types_of_typebox_name_themselves() -> None:
    """`Type.Recursive` gives a nested schema an identifier, and refers to that."""
    node = {
        "$id": "T0",
        "type": "object",
        "properties": {"nodes": {"type": "array", "items": {"$ref": "T0"}}},
    }
    schema = {"type": "object", "properties": {"tree": node}}
    found = resolved(schema)["properties"]["tree"]
    assert found["properties"]["nodes"]["items"] == {"$ref": "#/properties/tree"}
    assert "$id" not in found


def test_identifiers_of_draft_7_are_known() -> None:
    schema = {"definitions": {"N": {"$id": "#node", "type": "integer"}}, "items": {"$ref": "#node"}}
    assert resolved(schema)["items"] == {"$ref": "#/definitions/N"}


def test_deep_schemas_need_no_recursion() -> None:
    schema: dict[str, Any] = {"$ref": "#"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    assert resolved(schema)["type"] == "array"


NODE = {
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    "type": "object",
    "properties": {"first": {"$ref": "#/$defs/Node"}},
}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_forced_tools_keep_their_definitions_apart() -> None:
    other = {"$defs": {"Node": {"type": "integer"}}, "$ref": "#/$defs/Node"}
    offered = tool("walk", NODE), tool("count", other), tool("plain", {"type": "object"})
    grammar = Tools(offered, offered).grammar
    assert grammar is not None
    calls = {call["name"]: call["parameters"] for call in json.loads(grammar.source)}

    def follows(name: str, arguments: Any) -> bool:
        return Draft202012Validator(calls[name]).is_valid(arguments)

    assert follows("walk", {"first": {"next": {"next": {}}}}) and not follows(
        "walk", {"first": {"next": {"next": 1}}}
    )
    assert follows("plain", {"a": 1}) and not follows("plain", 3)
    assert not follows("count", {}), "arguments are an object, and this one an integer"


def test_a_reference_to_nothing_is_refused_by_the_tools_name() -> None:
    offered = (tool("walk", {"$ref": "#/$defs/Node"}),)
    with pytest.raises(
        RequestFailed, match=r"the parameters of 'walk' cannot be followed: .* names nothing"
    ) as caught:
        _ = Tools(offered, offered).grammar
    assert (caught.value.problem.status, caught.value.problem.code) == (400, "invalid_grammar")


def test_names_that_no_uri_may_hold_are_escaped_for_the_engine() -> None:
    """Generic types: llguidance takes references for URIs, clients write them as they like."""
    schema = {
        "$defs": {"Box[int]": {"type": "integer"}},
        "items": {"$ref": "#/$defs/Box[int]"},
        "type": "array",
    }
    found = json.loads(schema_grammar(schema, "response_format").source)
    assert found["items"] == {"$ref": "#/$defs/Box%5Bint%5D"}
    with pytest.raises(
        RequestFailed, match=r"response_format cannot be followed: .* names nothing"
    ):
        schema_grammar({"$ref": "#/$defs/none"}, "response_format")
