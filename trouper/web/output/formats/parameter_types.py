"""Parameter values as plain text, turned into JSON by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from trouper.web.output.formats.lenient_json import completed

SchemaTypes = frozenset[str]
ANY: SchemaTypes = frozenset()
TEXT: SchemaTypes = frozenset({"string"})
KINDS = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
LONGEST_LITERAL = 10_000  # Characters that Python's parser reads in 30 ms.
DEPTH = 8
WORDS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "null": ("null", "null"),
    "none": ("null", "null"),
}


def parameter_types(function: Mapping[str, Any]) -> dict[str, SchemaTypes]:
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(name): _types(part, schema, DEPTH) for name, part in properties.items()}


def _types(schema: Any, root: Any, depth: int) -> SchemaTypes:
    """JSON types that a schema allows; `ANY` where it does not say, or says so beyond `depth`
    references."""
    if not isinstance(schema, Mapping) or not depth:
        return ANY
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_at(root, reference), root, depth - 1)
    named = schema.get("type")
    if named is not None:
        return (
            frozenset(map(str, named))
            if isinstance(named, list | tuple)
            else frozenset({str(named)})
        )
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            found = [_types(part, root, depth - 1) for part in parts]
            return ANY if ANY in found else frozenset().union(*found)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return frozenset(map(_type_of, values)) if isinstance(values, list) else ANY


def _at(root: Any, reference: str) -> Any:
    found = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        found = (
            found.get(key.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, Mapping)
            else None
        )
    return found


def _type_of(value: Any) -> str:
    return next((name for kind, name in KINDS if isinstance(value, kind)), "null")


def converted(text: str, types: SchemaTypes) -> str:
    """Return JSON of a type of the schema, otherwise a string. Without a schema only objects and
    arrays are more than text."""
    stripped = text.strip()
    kind, found = WORDS.get(stripped.lower(), ("", ""))
    if kind in types and kind:
        return found
    if {"integer", "number"} & types and (
        number := _number(stripped, integral="number" not in types)
    ):
        return number
    if ({"object", "array"} & types or not types) and (container := _container(stripped, types)):
        return container
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _number(text: str, *, integral: bool) -> str | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if integral and isinstance(value, float):
        return str(int(value)) if value.is_integer() else None
    return text


def _container(text: str, types: SchemaTypes) -> str | None:
    kind = {"{": "object", "[": "array"}.get(text[:1])
    if kind is None or (types and kind not in types):
        return None
    try:
        json.loads(text, parse_constant=_no_constant)
        return text
    except (ValueError, RecursionError):
        pass
    if not types:
        return None
    if len(text) > LONGEST_LITERAL:
        return completed(text)[0]
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return completed(text)[0]
