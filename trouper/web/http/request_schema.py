"""JSON Schema of request classes, and pieces of answers' schemas."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import Meta, inspect

from trouper.web.http.body_faults import extras, info_of
from trouper.web.http.leniency import NOTHING

Json = dict[str, Any]
Unsupported = Mapping[str, tuple[Any, ...]]

NULL: Json = {"type": "null"}
TEXT: Json = {"type": "string"}
OBJECT: Json = {"type": "object"}
FLAG: Json = {"type": "boolean"}
NUMBER: Json = {"type": "number"}
COUNT: Json = {"type": "integer", "minimum": 0}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


MODEL, TOKEN, TOKEN_KEY = ref("Model"), ref("TokenId"), ref("TokenKey")
LENGTH, DIMENSIONS = ref("Length"), ref("Dimensions")
"""Schemas that depend on the served models: names, token ids (as numbers, as property names),
length of an answer, dimensions of an embedding."""


READ_PAST = "Read past, and named in the header X-Trouper-Ignored."
HARMLESS = Meta(description="Changes nothing.")


def described(value: Json, **limits: Any) -> Meta:
    """Return a type's metadata: limits, and further JSON Schema."""
    return Meta(extra_json_schema=value, **limits)


def nullable(value: Json) -> Json:
    if not value:
        return value
    kind = value.get("type")
    if not isinstance(kind, str) or "$ref" in value:
        return {"anyOf": [value, NULL]}
    return (
        value
        | {"type": [kind, "null"]}
        | ({"enum": [*value["enum"], None]} if "enum" in value else {})
    )


def titled(name: str, schema: Json) -> Json:
    """Return the schema with the name of generated clients."""
    return {"title": name, **schema}


def with_properties(properties: Json, *required: str, **more: Any) -> Json:
    """Return the schema of an object with these properties and room for later ones, so that
    generated clients outlive an update of the server."""
    needed = {"required": list(required)} if required else {}
    return {
        "type": "object",
        "properties": properties,
        **needed,
        **more,
    }


def full(properties: Json, *, optional: Collection[str] = ()) -> Json:
    """Return the schema of an object with all of these properties; `optional` ones may be
    absent."""
    return with_properties(properties, *(name for name in properties if name not in optional))


def array(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def either(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


def needs(name: str, given: Json, other: str, value: Json) -> Json:
    """Rule: `name` that matches `given` needs `other` to match `value`."""
    return {
        "if": {"properties": {name: given}, "required": [name]},
        "then": {"properties": {other: value}, "required": [other]},
    }


def at_most_one(nothing: Mapping[str, Json]) -> Json:
    """Rule: at most one of these names. `nothing` is the schema of an absent value."""
    return {
        "anyOf": [
            {"properties": {name: nothing[name] for name in nothing if name != kept}}
            for kept in nothing
        ]
    }


def schema_of(kind: type, *, strict: bool = True) -> Json:
    """Schema of bodies that `structure(body, kind)` accepts, with references to `components_of`."""
    return _schemas(frozenset({kind}), strict=strict)[kind.__name__]


def components_of(kinds: Iterable[type], *, strict: bool = True) -> Json:
    outer = frozenset(kinds)
    names = {kind.__name__ for kind in outer}
    return {
        name: schema for name, schema in _schemas(outer, strict=strict).items() if name not in names
    }


@cache
def _schemas(kinds: frozenset[type], *, strict: bool) -> dict[str, Json]:
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    classes = {struct.cls for info in inspect.multi_type_info(kinds) for struct in _structs(info)}
    read = {
        cls.__name__: _as_read(cls, schemas[cls.__name__])
        for cls in sorted(classes, key=lambda cls: cls.__name__)
    }
    return (
        read
        if strict
        else {cls.__name__: _as_read_past(cls, read[cls.__name__]) for cls in classes}
    )


def _structs(info: Any) -> Iterator[inspect.StructType]:
    match info:
        case inspect.StructType(fields=fields):
            yield info
            for field in fields:
                yield from _structs(field.type)
        case inspect.UnionType(types=types):
            for option in types:
                yield from _structs(option)
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            yield from _structs(inner)


def _as_read(kind: Any, schema: Json) -> Json:
    """Return msgspec's schema of a class, with null for absent."""
    info = info_of(kind)
    assert isinstance(info, inspect.StructType)
    properties, required = {**schema["properties"]}, [*schema["required"]]
    for field in info.fields:
        name = field.encode_name
        for extra in extras(field.type):
            properties[name] = extra.get("schema", properties[name])
        if not field.required:
            properties[name] = _optional(properties[name])
    if info.tag_field is not None:
        properties[info.tag_field] = {"const": info.tag}
        if kind.may_lack_tag:
            required.remove(info.tag_field)
            properties[info.tag_field] = nullable(properties[info.tag_field])
    properties |= {name: _refused(neutral) for name, neutral in kind.unsupported.items()}
    unknown = {"additionalProperties": NULL} if kind.unknown_may_be_null else {}
    rules = {"allOf": list(kind.rules)} if kind.rules else {}
    kept = {key: value for key, value in schema.items() if key != "title"}
    return kept | {"properties": properties, "required": required} | unknown | rules


def _as_read_past(kind: Any, schema: Json) -> Json:
    """Return the schema for lenient reading. Refused names are a rule where others are read
    past."""
    properties = {**schema["properties"]}
    essential = {name: _refused(NOTHING[1:]) for name in sorted(kind.essential - properties.keys())}
    for name in kind.unsupported:
        if kind.may_skip(name):
            properties[name] = {"description": READ_PAST}
        elif kind.harmless is None:
            essential[name] = properties.pop(name)
    aliases = {
        alias: {"description": f"What other servers call `{name}`."} | properties[name]
        for alias, name in kind.aliases.items()
        if name in properties
    }
    if kind.harmless is None:
        rules = [*schema.get("allOf", ()), *([{"properties": essential}] if essential else ())]
        return {
            **schema,
            "properties": {**aliases, **properties},
            "additionalProperties": True,
            **({"allOf": rules} if rules else {}),
        }
    more = {**schema, "properties": {**essential, **aliases, **properties}}
    harmless = {name: {"description": READ_PAST} for name in sorted(kind.harmless)}
    return more | {"properties": harmless | more["properties"]}


def _optional(value: Json) -> Json:
    """Return the schema with null for absent. Generators take a `default` for a required value."""
    value, default = dict(value), value.get("default")
    value.pop("default", None)
    if default is not None:
        words = [value["description"]] if "description" in value else []
        value["description"] = " ".join([*words, f"Default: {json.dumps(default)}."])
    return value if NULL in value.get("anyOf", ()) else nullable(value)


def _refused(neutral: tuple[Any, ...]) -> Json:
    values = [value for index, value in enumerate(neutral) if not among(value, neutral[:index])]
    return {
        "enum": [*values, None],
        "description": "Not supported: refused unless it asks for nothing.",
    }


def among(value: Any, values: Sequence[Any]) -> bool:
    """Whether `value` is among `values` as in JSON: true is not 1, but 1.0 is."""
    return any(
        isinstance(value, bool) == isinstance(other, bool) and value == other for other in values
    )
