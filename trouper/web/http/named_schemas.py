"""Writes a description as generators of clients read it: each object and union is a component with
a name and a title, unions have discriminators, and values of an enum have one type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
REF = "#/components/schemas/"
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
TAGS = ("type", "role", "object")
"""Properties that may tell the members of a union apart."""


def with_names(document: Json) -> Json:
    """Return the document with named schemas. Validators accept the same values."""
    return _Naming(document["components"]["schemas"]).document(document)


def pascal(text: str) -> str:
    """Return "ResponseOutputTextDelta" for "response.output_text.delta"."""
    words = re.findall(r"[A-Za-z0-9]+", text)
    return "".join(word[0].upper() + word[1:] for word in words)


class _Naming:
    def __init__(self, components: Mapping[str, Json]) -> None:
        self._sources = components
        self._named: dict[str, Json] = {}

    def document(self, document: Json) -> Json:
        for name, schema in self._sources.items():
            self._named[name] = self._titled(name, self._written(schema, name))
        paths = {
            path: {method: self._operation(operation) for method, operation in methods.items()}
            for path, methods in document["paths"].items()
        }
        for schema in self._named.values():
            self._discriminate(schema)
        components = document["components"] | {"schemas": dict(sorted(self._named.items()))}
        return document | {"paths": paths, "components": components}

    def _operation(self, operation: Json) -> Json:
        name = pascal(operation["operationId"])
        written = operation | {
            "responses": {
                status: self._contents(response, f"{name}Response")
                for status, response in operation["responses"].items()
            }
        }
        if "parameters" in operation:
            written["parameters"] = [
                parameter | {"schema": self._part(parameter["schema"], name)}
                for parameter in operation["parameters"]
            ]
        if "requestBody" in operation:
            written["requestBody"] = self._contents(operation["requestBody"], f"{name}Request")
        return written

    def _contents(self, holder: Json, name: str) -> Json:
        contents = {
            kind: content
            | {
                "schema": _with_data(content["schema"], self._part, name)
                if kind == "text/event-stream"
                else self._part(content["schema"], name)
            }
            for kind, content in holder["content"].items()
        }
        return holder | {"content": contents}

    def _titled(self, name: str, schema: Json) -> Json:
        return schema if "$ref" in schema else {"title": name, **schema}

    def _part(self, schema: Any, name: str) -> Any:
        """Return an inline schema, or a reference to the component that it became."""
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            more = {key: schema[key] for key in ("description",) if key in schema}
            return {"$ref": schema["$ref"]} | more
        name = schema.get("title", name)
        written = self._written(schema, name)
        if _is_nullable_union(written):
            outside = {key: value for key, value in written.items() if key != "anyOf"}
            members = [member for member in written["anyOf"] if member != {"type": "null"}]
            inner = {"anyOf": members} if len(members) > 1 else members[0]
            return outside | {"anyOf": [self._hoisted(inner, name), {"type": "null"}]}
        return self._hoisted(written, name)

    def _hoisted(self, written: Json, name: str) -> Json:
        """Make a component of an object with properties or a union."""
        if "properties" not in written and not _has_named_members(written):
            return written
        outside = {"description": written["description"]} if "description" in written else {}
        titled = self._titled(name, written)
        if name in self._sources or self._named.setdefault(name, titled) != titled:
            raise ValueError(f"two schemas of {name}; `titled` names one")
        return {"$ref": REF + name} | outside

    def _written(self, schema: Json, name: str) -> Json:
        """Return the schema with its own parts as components."""
        schema = _one_type(_with_rules(schema))
        written = dict(schema)
        if "properties" in schema:
            written["properties"] = {
                key: self._part(value, name + pascal(key))
                for key, value in schema["properties"].items()
            }
        if "items" in schema:
            written["items"] = self._part(schema["items"], _singular(name))
        if isinstance(schema.get("additionalProperties"), dict):
            written["additionalProperties"] = self._part(
                schema["additionalProperties"], f"{name}Value"
            )
        if "anyOf" in schema:
            written["anyOf"] = [
                self._part(member, name + _member_name(member)) for member in _flat(schema["anyOf"])
            ]
        return written

    def _discriminate(self, schema: Json) -> None:
        schema.pop("discriminator", None)
        members = schema.get("anyOf", ())
        for tag in TAGS:
            values = [self._tags(member, tag) for member in members]
            flat = [value for some in values for value in some]
            if len(members) > 1 and all(values) and len(flat) == len({*flat}):
                schema["discriminator"] = {
                    "propertyName": tag,
                    "mapping": {
                        value: member["$ref"]
                        for member, some in zip(members, values, strict=True)
                        for value in some
                    },
                }
                return

    def _tags(self, member: Json, tag: str) -> Sequence[str]:
        """Return the values of a member's tag; (): the tag may be absent, or the member is no
        component."""
        schema = self._named.get(member.get("$ref", "").removeprefix(REF), {})
        value = schema.get("properties", {}).get(tag, {})
        if tag not in schema.get("required", ()):
            return ()
        return [value["const"]] if "const" in value else ()


def _with_data(schema: Json, part: Any, name: str) -> Json:
    if "anyOf" in schema:
        return schema | {"anyOf": [_with_data(member, part, name) for member in schema["anyOf"]]}
    data = schema["properties"]["data"]
    if "contentSchema" not in data:
        return schema
    data = data | {"contentSchema": part(data["contentSchema"], f"{name}Event")}
    return schema | {"properties": schema["properties"] | {"data": data}}


def _with_rules(schema: Json) -> Json:
    """Move rules between properties to where generators do not look for a base class."""
    if "allOf" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    rules = schema["allOf"]
    return rest | {"if": {}, "then": {"allOf": rules} if len(rules) > 1 else rules[0]}


def _one_type(schema: Json) -> Json:
    if "const" in schema:
        return {"type": TYPES[type(schema["const"])], **schema}
    kinds = schema.get("type")
    if "enum" in schema:
        return _one_type_of_values(schema)
    if isinstance(kinds, list) and (len(kinds) > 2 or {"object", "array"} & {*kinds}):
        inner = {key: value for key, value in schema.items() if key not in ("type", "description")}
        outside = {key: schema[key] for key in ("description",) if key in schema}
        return outside | {
            "anyOf": [{"type": kind, **(inner if kind != "null" else {})} for kind in kinds]
        }
    return schema


def _one_type_of_values(schema: Json) -> Json:
    by_type: dict[str, list[Any]] = {}
    for value in schema["enum"]:
        kind = "array" if isinstance(value, list) else TYPES.get(type(value), "object")
        by_type.setdefault(kind, []).append(value)
    outside = {key: value for key, value in schema.items() if key not in ("type", "enum")}
    options = [_of_type(kind, values) for kind, values in by_type.items()]
    return outside | (options[0] if len(options) == 1 else {"anyOf": [*_flat(options)]})


def _of_type(kind: str, values: list[Any]) -> Json:
    if kind == "null":
        return {"type": "null"}
    if kind in ("boolean", "number"):
        options = [{"type": kind, "const": value} for value in values]
    elif kind == "array":
        options = [
            {
                "type": "array",
                "items": _one_type_of_values({"enum": value}) if value else {},
                "minItems": len(value),
                "maxItems": len(value),
            }
            for value in values
        ]
    elif kind == "object":
        options = [_of_object(value) for value in values]
    else:
        return {"type": kind, "enum": values}
    return options[0] if len(options) == 1 else {"anyOf": options}


def _of_object(value: Json) -> Json:
    if not value:
        return {"type": "object", "maxProperties": 0}
    return {
        "type": "object",
        "properties": {key: _one_type_of_values({"enum": [one]}) for key, one in value.items()},
        "required": [*value],
        "additionalProperties": False,
    }


def _has_named_members(schema: Json) -> bool:
    return sum("$ref" in one for one in schema.get("anyOf", ())) > 1


def _is_nullable_union(schema: Json) -> bool:
    members = schema.get("anyOf", ())
    return {"type": "null"} in members and len(members) > 1


def _flat(members: Sequence[Json]) -> Iterator[Json]:
    """Return the members with those of unions among them, and each once."""
    seen: list[Json] = []
    for member in members:
        inner = _one_type(member)
        alone = inner.keys() <= {"anyOf", "description"} and "anyOf" in inner
        for one in _flat(inner["anyOf"]) if alone else _with_pure_arrays(member):
            if one not in seen:
                seen.append(one)
                yield one


def _with_pure_arrays(member: Json) -> list[Json]:
    """Return an array of mixed values behind arrays of each type, for openapi-generator."""
    kinds = member.get("items", {}).get("anyOf", ()) if member.get("type") == "array" else ()
    is_plain = all(kind.get("type") in ("string", "array") for kind in kinds)
    return [*(member | {"items": kind} for kind in kinds if is_plain), member]


def _member_name(member: Json) -> str:
    properties = member.get("properties", {})
    for tag in TAGS:
        if "const" in properties.get(tag, {}):
            return pascal(str(properties[tag]["const"]))
    return ""


def _singular(name: str) -> str:
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else f"{name}Item"
