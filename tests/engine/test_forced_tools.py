"""Parameters with references, as the engine's grammars take them once they stand below the root of
a forced call."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.engine.test_grammar import tiny
from trouper import RequestFailed
from trouper.engine.grammars.grammar_compiler import Grammars
from trouper.web.openai.response_format import schema_grammar
from trouper.web.output.tool_calls import Tools

INTEGER = {"type": "integer"}
NODE = {"type": "object", "properties": {"value": INTEGER, "next": {"$ref": "#/$defs/Node"}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a definition": {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/N"}},
        "$defs": {"N": INTEGER},
    },
    "recursion": {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
    "the root": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "https://example.com/s",
        "type": "object",
        "definitions": {"N": INTEGER},
        "properties": {"n": {"$ref": "#/definitions/N"}},
    },
    "nested definitions": {
        "$defs": {"A": {"$defs": {"B": INTEGER}}},
        "items": {"$ref": "#/$defs/A/$defs/B"},
    },
    "a property": {"type": "object", "properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}},
    "odd names": {"$defs": {"a/b~c%d é": INTEGER}, "items": {"$ref": "#/$defs/a~1b~0c%25d é"}},
    "generics": {"$defs": {"Box[int]": INTEGER}, "items": {"$ref": "#/$defs/Box[int]"}},
    "an anchor": {"$defs": {"N": {"$anchor": "n", **INTEGER}}, "items": {"$ref": "#n"}},
    "an identifier": {
        "properties": {"t": {"$id": "T0", "type": "object", "properties": {"t": {"$ref": "T0"}}}}
    },
    "openapi": {
        "components": {"schemas": {"N": INTEGER}},
        "items": {"$ref": "#/components/schemas/N"},
    },
}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def checker() -> Grammars:
    grammars = tiny().tokenizer.grammars
    assert grammars is not None
    return grammars


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_references_are_followed(schema: dict[str, Any]) -> None:
    """As a response format, as the only tool, and beside others whose definitions have the same
    names."""
    grammars = checker()
    other = {
        "$defs": {name: {"type": "string"} for name in ("N", "Node", "A")},
        "$ref": "#/$defs/N",
    }
    offered = (
        tool("own.tool-1", schema),
        tool("own", other),
        tool("N", {"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}),
    )
    grammars.compile(schema_grammar(schema, "response_format"))
    for forced in (offered[:1], offered):
        grammar = Tools(offered, forced).grammar
        assert grammar is not None
        grammars.compile(grammar)


def test_what_cannot_be_followed_inside_a_definition_is_found() -> None:
    wrong = {
        "$defs": {
            "N": {"type": "object", "properties": {"w": {"not": {"type": "null"}}}},
            "M": INTEGER,
        },
        "$ref": "#/$defs/N",
    }
    grammar = Tools((tool("look", wrong),), (tool("look", wrong),)).grammar
    assert grammar is not None
    assert checker().compile(grammar).ignored == ("tools.$defs.N.properties.w.not",)
    grammar = attrs.evolve(grammar, strict=True)
    with pytest.raises(RequestFailed) as caught:
        checker().compile(grammar)
    assert caught.value.problem.param == "tools.$defs.N.properties.w.not"
