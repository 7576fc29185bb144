"""What an answer must look like, in each way to say it: pure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.test_parsing import fault
from tests.web.test_thinking import generate
from trouper.protocol.grammar import MAX_SOURCE, Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SOURCE = json.dumps(SCHEMA, separators=(",", ":"))


def named(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", **more}}}


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (named(schema=SCHEMA), "json_schema", SOURCE, "response_format.json_schema.schema"),
        (
            named(schema=SCHEMA, strict=False),
            "json_schema",
            SOURCE,
            "response_format.json_schema.schema",
        ),
        (named(), "json_object", "", "response_format.json_schema.schema"),
        (named(schema=False), "json_schema", "false", "response_format.json_schema.schema"),
        ({"guided_json": SOURCE}, "json_schema", SOURCE, "guided_json"),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+", "guided_regex"),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes","no"]', "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"', "guided_grammar"),
        (
            {"structured_outputs": {"regex": "a", "json": None}},
            "regex",
            "a",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "json_object",
            "",
            "structured_outputs.json_object",
        ),
    ],
)
def test_each_way_to_say_it(fields: dict[str, Any], kind: str, source: str, param: str) -> None:
    wanted = Grammar(kind, source, param, strict=kind != "json_schema")  # type: ignore[arg-type]
    assert generate(**fields).grammar == wanted


def test_text_is_free() -> None:
    assert generate(response_format={"type": "text"}).grammar is None
    assert generate(structured_outputs={"json_object": False}).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (named(schema=SCHEMA) | {"guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (named(schema=3), "response_format.json_schema.schema"),
        (named(schema=SCHEMA, other=1), "response_format.json_schema.other"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice.1"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_regex": "a" * (MAX_SOURCE + 1)}, "guided_regex"),
        ({"guided_grammar": "a" * (MAX_SOURCE + 1)}, "guided_grammar"),
        ({"guided_json": {"const": "a" * MAX_SOURCE}}, "guided_json"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert fault(lambda: generate(**fields))[0] == param


def test_a_source_as_large_as_may_be_is_taken() -> None:
    grammar = generate(guided_regex="a" * MAX_SOURCE).grammar
    assert grammar is not None and len(grammar.source) == MAX_SOURCE
