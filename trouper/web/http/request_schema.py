"""Request classes as JSON Schema, and the limits that both the schema and the parser go by.

A field's schema follows from its type, and from `metadata={"schema": ...}`: limits of a typed field (`limits`), or all that
an `Any` field accepts. An optional field may be null, which means absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import attrs

Json = dict[str, Any]
Refused = Mapping[str, tuple[Any, ...]]
"""Names of unsupported parameters, and the values of each that request nothing."""

TYPES: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
NULL: Json = {"type": "null"}
TEXT: Json = {"type": "string"}
OBJECT: Json = {"type": "object"}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 0}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


MODEL, TOKEN, TOKEN_KEY = ref("Model"), ref("TokenId"), ref("TokenKey")
LENGTH, DIMENSIONS = ref("Length"), ref("Dimensions")
"""References to schemas that depend on the served models: their names, token ids (as numbers, as property names), the
length of an answer, and the dimensions of an embedding."""


def limits(low: float | None = None, high: float | None = None, *, above: float | None = None, **more: Any) -> Json:
    """Return metadata of a field that `structure` checks: low <= value <= high, or above < value. `more` are other
    keywords."""
    bounds = {"minimum": low, "exclusiveMinimum": above, "maximum": high}
    return schema({name: bound for name, bound in bounds.items() if bound is not None} | more)


def schema(value: Json, *, harmless: bool = False) -> Json:
    """Return metadata of a field. `harmless`: the field is accepted and changes nothing."""
    return {"schema": value, "harmless": harmless}


HARMLESS = schema({}, harmless=True)


def nullable(value: Json) -> Json:
    if not value:
        return value
    kind = value.get("type")
    if not isinstance(kind, str):
        return {"anyOf": [value, NULL]}
    return value | {"type": [kind, "null"]} | ({"enum": [*value["enum"], None]} if "enum" in value else {})


def closed(properties: Json, *required: str, **more: Any) -> Json:
    """Return the schema of an object with these properties and no others."""
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed, "additionalProperties": False, **more}


def array(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def either(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def needs(name: str, given: Json, other: str, value: Json) -> Json:
    """Return a rule of an object: `name`, if it matches `given`, needs `other` to match `value`."""
    return {
        "if": {"properties": {name: given}, "required": [name]},
        "then": {"properties": {other: value}, "required": [other]},
    }


def at_most_one(nothing: Mapping[str, Json]) -> Json:
    """Return a rule of an object: at most one of these names may be given. `nothing`: the schema of a value that counts
    as not given."""
    return {"anyOf": [{"properties": {name: nothing[name] for name in nothing if name != kept}} for kept in nothing]}


def schema_of(kind: type, refused: Refused, rules: Sequence[Json] = ()) -> Json:
    """Return the schema of the bodies that `structure(body, kind, refused)` accepts, with the rules that are checked
    afterwards."""
    hints = get_type_hints(kind)
    fields: Sequence[attrs.Attribute[Any]] = attrs.fields(kind)
    properties = {field.name: _field(field, hints[field.name]) for field in fields}
    properties |= {name: _refused(neutral) for name, neutral in refused.items() if name not in properties}
    body = closed(properties, *(field.name for field in fields if field.default is attrs.NOTHING))
    return body | ({"allOf": list(rules)} if rules else {})


def _field(field: attrs.Attribute[Any], hint: Any) -> Json:
    field_schema: Json = field.metadata.get("schema", {})
    if field.name == "model" and not field_schema:
        field_schema = MODEL
    if "$ref" not in field_schema:
        field_schema = _typed(hint, field.name) | field_schema
    if field.default is attrs.NOTHING:
        return field_schema
    field_schema = nullable(field_schema)
    return field_schema if field.default in (None, ()) else field_schema | {"default": field.default}


def _typed(hint: Any, name: str) -> Json:
    """Return the schema of a type, without null."""
    if hint is Any:
        return {}
    if isinstance(hint, UnionType):
        [hint] = [option for option in get_args(hint) if option is not NoneType]
    if get_origin(hint) is tuple:
        return array(_typed(get_args(hint)[0], name))
    kind = get_origin(hint) or hint
    if kind not in TYPES:
        raise TypeError(f"{name}: no JSON Schema is known for {hint}")
    return {"type": TYPES[kind]}


def _refused(neutral: tuple[Any, ...]) -> Json:
    """Return the schema of an unsupported parameter: null, or a value that requests nothing."""
    values = [value for index, value in enumerate(neutral) if not among(value, neutral[:index])]
    return {"enum": [*values, None], "description": "Not supported: refused unless it asks for nothing."}


def among(value: Any, values: Sequence[Any]) -> bool:
    """Whether `value` is one of `values`, compared as in JSON: true is not 1, but 1.0 is."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in values)
