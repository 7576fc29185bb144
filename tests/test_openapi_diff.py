"""Differences of two descriptions are those of what may be sent and received."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import PIPE, run
from sys import executable
from typing import Any

import pytest

from tests.openapi_diff import differences

Json = dict[str, Any]
TEXT: Json = {"type": "string"}


def document(body: Json, answer: Json | None = None, **components: Json) -> Json:
    operation = {
        "operationId": "ask",
        "parameters": [{"name": "after", "in": "query", "schema": TEXT}],
        "requestBody": {"content": {"json": {"schema": body}}},
        "responses": {"200": {"content": {"json": {"schema": answer or TEXT}}}},
    }
    return {"paths": {"/ask": {"post": operation}}, "components": {"schemas": components}}


def of(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": required}


FLAT = of(["a"], a={"type": ["string", "null"]}, b={"enum": ["x", 1]})
NAMED = of(["a"], a={"anyOf": [{"type": "null"}, {"$ref": "#/c/A"}]}, b={"$ref": "#/c/B"})
ENUMS = {"anyOf": [{"type": "integer", "const": 1}, {"type": "string", "enum": ["x"]}]}


def test_names_and_the_shape_of_components_are_no_difference() -> None:
    named = document({"$ref": "#/c/Body"}, Body=NAMED, A=TEXT, B=ENUMS)
    assert differences(document(FLAT), named) == {}


TREE = of(["up"], up={"$ref": "#/c/Tree"})


@pytest.mark.parametrize(
    ("new", "line"),
    [
        (of(["a"], a=TEXT), "removed request (json) .b"),
        (of(["a"], a=TEXT, b=TEXT, c=of([], d=TEXT)), "added request (json) .c"),
        (of([], a=TEXT, b=TEXT), "changed request (json) .a: needs -required, +optional"),
        (
            of(["a"], a={"type": "integer"}, b=TEXT),
            "changed request (json) .a: types -string, +integer",
        ),
        (
            of(["a"], a={"enum": ["x"]}, b=TEXT),
            'changed request (json) .a: types -string; values +"x"',
        ),
        (
            of(["a"], a=TEXT | {"maxLength": 3}, b=TEXT),
            "changed request (json) .a: rules +maxLength 3",
        ),
        (
            of(["a"], a=TEXT, b=TEXT) | {"additionalProperties": False},
            "changed request (json) : rules +no other names",
        ),
        (
            of(["a"], a=TEXT, b=TEXT) | {"if": {}, "then": {"allOf": [{"required": ["b"]}]}},
            'changed request (json) : rules +rule {"required": ["b"]}',
        ),
    ],
)
def test_a_field_is_named_once(new: Json, line: str) -> None:
    old = of(["a"], a=TEXT, b=TEXT)
    assert differences(document(old), document(new)) == {line: ["POST /ask"]}


def test_members_of_unions_differ_by_their_type() -> None:
    members = [of(["type"], type={"const": kind}, text=TEXT) for kind in ("a", "b")]
    old = document({"anyOf": members})
    new = document({"anyOf": [members[0]]})
    lines = [*differences(old, new)]
    assert "removed request (json) <b>" in lines
    assert not any("<a>" in line for line in lines)


def test_schemas_that_hold_themselves_end() -> None:
    old, new = document(TEXT, {"$ref": "#/c/Tree"}, Tree=TREE), document(TEXT, TREE, Tree=TREE)
    assert differences(old, old) == {}
    assert "200 (json) .up" in " ".join(differences(old, new))


def test_operations_and_their_parameters() -> None:
    old, new = document(TEXT), document(TEXT)
    new["paths"]["/ask"]["post"] |= {"operationId": "tell", "parameters": []}
    new["paths"]["/more"] = {"get": {"operationId": "more", "responses": {}}}
    assert differences(old, new) == {
        "added": ["GET /more"],
        "changed operationId: values -ask, +tell": ["POST /ask"],
        "removed query after": ["POST /ask"],
    }


def test_the_command_ends_with_1_where_there_is_a_difference(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(document(TEXT)))
    new.write_text(json.dumps(document({"type": "integer"})))
    line = [executable, "-m", "tests.openapi_diff", str(old), str(new)]
    compared = run(line, stdout=PIPE, check=False)
    assert (compared.returncode, b"POST /ask" in compared.stdout) == (1, True)
    assert run([*line[:-1], str(old)], stdout=PIPE, check=False).returncode == 0
