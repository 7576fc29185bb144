"""Schemas that clients send and llguidance refuses although what it refuses asserts nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.engine.test_grammar import tiny
from trouper import RequestFailed
from trouper.engine.grammars.followed_schema import DECIMAL, FORMATS, PATTERNS, followed
from trouper.protocol.grammar import Grammar

Json = dict[str, Any]
TEXT: Json = {"type": "string"}


def refused_by_llguidance(schema: Any) -> bool:
    return bool(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema))))


def allows(schema: Any, text: str) -> bool:
    """Whether an answer of this schema may be the text."""
    compiled: Any = tiny().tokenizer.compile_grammar(
        Grammar("json_schema", json.dumps(schema), "guided", strict=False)
    )
    matcher = compiled.kept.matcher.deep_copy()
    for token in tiny().tokenizer.encode(text, special=False):
        if not matcher.try_consume_tokens([token]):
            return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"type": "string", "format": "password", "writeOnly": True}, '"x"', "1"),
        ({"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]}, '"/x"', "1"),
        (
            {"properties": {"a": {"type": "string", "format": "binary"}}, "required": ["a"]},
            '{"a":"x"}',
            '{"a":1}',
        ),
        (
            {"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT},
            '{"a":"x"}',
            '{"a":1}',
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": TEXT},
            '{"b":"x"}',
            '{"c":"x"}',
        ),
        (
            {
                "properties": {
                    "x": {"type": "object", "propertyNames": {"$ref": "#/$defs/a~1%C3%A9"}}
                },
                "required": ["x"],
                "$defs": {"a/é": {"title": "E", "type": "string", "enum": ["a", "b"]}},
            },
            '{"x":{"a":[1]}}',
            '{"x":{"c":1}}',
        ),
        ({"type": "array", "uniqueItems": False, "items": TEXT}, '["x","x"]', "[1]"),
        (
            {"type": "object", "properties": {}, "additionalProperties": {"not": {}}},
            "{}",
            '{"a":1}',
        ),
        (
            {
                "items": {"$ref": "#/$defs/x"},
                "type": "array",
                "$defs": {"x": TEXT | {"format": "regex"}},
            },
            '["x"]',
            "[1]",
        ),
        ({"anyOf": [{"type": "number"}, TEXT | {"pattern": DECIMAL}]}, '"-0.5"', '"-"'),
        (
            {"prefixItems": [TEXT | {"format": "iri"}], "items": False, "type": "array"},
            '["x"]',
            "[1]",
        ),
        ({"type": "object", "dependentRequired": {}, "unevaluatedProperties": True}, "{}", "[]"),
    ],
)
def test_what_asserts_nothing_is_no_reason_to_refuse(schema: Json, text: str, other: str) -> None:
    assert refused_by_llguidance(schema), "the schema is none of these"
    assert allows(schema, text) and not allows(schema, other)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"type": "string", "minLength": 2}},
        {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"b": {}}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"], "minLength": 2}},
        {"type": "object", "propertyNames": {"$ref": "#/$defs/gone"}},
        {"not": {}},
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "(?=x)y"},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"properties": {"format": {"type": "string", "format": 5}}},
        {"type": "array", "uniqueItems": 0},
    ],
)
def test_what_asserts_something_is_refused_as_before(schema: Json) -> None:
    with pytest.raises(RequestFailed):
        tiny().tokenizer.compile_grammar(Grammar("json_schema", json.dumps(schema), "guided"))


def test_formats_are_those_that_llguidance_follows() -> None:
    known = (
        "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer "
        "relative-json-pointer regex"
    )
    for name in (*FORMATS, *known.split()):
        assert refused_by_llguidance({"type": "string", "format": name}) is (name not in FORMATS), (
            name
        )


@pytest.mark.parametrize(
    "number", ["1", "-1.", "+.5", "00.10", "007", "", "-", ".", "+.", "1e5", "1.2.3", " 1"]
)
def test_a_decimal_is_what_pydantic_takes_for_one(number: str) -> None:
    import re

    assert bool(re.search(DECIMAL, number)) is bool(re.search(PATTERNS[DECIMAL], number))


def test_data_is_no_schema() -> None:
    """Names of properties, values of const, enum and default: whatever they are called."""
    schema = {
        "properties": {
            "format": TEXT,
            "not": {"const": {"format": "path", "not": {}}},
            "uniqueItems": {"enum": [False]},
        },
        "default": {"uniqueItems": False},
        "required": ["format", "not"],
    }
    assert json.loads(followed(json.dumps(schema))) == schema
    assert followed("true") == "true"
    untouched = '{"default": 1e400, "type" : "number"}'
    assert followed(untouched) == untouched


@pytest.mark.parametrize("strict", [False, True])
def test_unknown_keywords_are_named(strict: bool) -> None:
    """Not annotations, nor what a reference names, nor names of properties and data."""
    node: Json = {"type": "object", "require": ["a"], "properties": {"require": TEXT}}
    schema = {
        "propertys": {"a": TEXT},
        "anyOf": [{"$ref": "#/components/schemas/Node"}, TEXT | {"nullable": True, "x-order": 1}],
        "components": {"schemas": {"Node": node}},
        "default": {"require": 1},
        "$comment": "",
        "examples": [],
    }
    grammar = Grammar("json_schema", json.dumps(schema), "s", strict=strict)
    assert set(tiny().tokenizer.compile_grammar(grammar).ignored) == {
        "s.propertys",
        "s.anyOf.1.nullable",
        "s.components.schemas.Node.require",
    }
    call = {"name": "f", "parameters": {"require": []}, "param": "tools.0", "strict": strict}
    calls = Grammar("calls", json.dumps([call]), "tools", strict=False)
    assert tiny().tokenizer.compile_grammar(calls).ignored == ("tools.0.require",)
