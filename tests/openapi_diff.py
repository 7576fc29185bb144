"""`just openapi-diff OLD.json NEW.json`: names each operation, parameter and field that was added,
removed or changed between two descriptions.

Fields are compared by path, with references resolved and unions joined, so that neither names nor
the shape of components count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

Json = dict[str, Any]
METHODS = ("get", "put", "post", "delete", "head", "patch")
UNIONS = ("anyOf", "oneOf")
TAGS = ("type", "role", "object")
"""Properties whose only value names a member of a union."""
LIMITS = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "uniqueItems",
    "pattern",
    "format",
    "default",
    "propertyNames",
    "not",
)


@attrs.define
class Field:
    """What the values at a path may be. `values`: those of enums; `needs`: whether the object
    around must have the field, by member of a union."""

    types: set[str] = attrs.field(factory=set)
    values: set[str] = attrs.field(factory=set)
    rules: set[str] = attrs.field(factory=set)
    needs: set[str] = attrs.field(factory=set)

    def changes(self, new: Field) -> str:
        """Return the differences as one line, or ""."""
        lines = []
        for name in ("types", "values", "rules", "needs"):
            old_set, new_set = getattr(self, name), getattr(new, name)
            if old_set != new_set:
                lost, new_ones = sorted(old_set - new_set), sorted(new_set - old_set)
                lines += [
                    f"{name} {', '.join([f'-{x}' for x in lost] + [f'+{x}' for x in new_ones])}"
                ]
        return "; ".join(lines)


class Fields:
    """The fields of one schema, by path."""

    def __init__(self, components: Mapping[str, Json]) -> None:
        self._components = components
        self.by_path: dict[str, Field] = {}

    def add(self, schema: Any, path: str, seen: tuple[str, ...] = ()) -> None:
        field = self.by_path.setdefault(path, Field())
        while isinstance(schema, dict) and "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name in seen:
                field.types.add("as above")
                return
            seen, schema = (*seen, name), self._components[name]
        if not isinstance(schema, dict):
            field.types.add(json.dumps(schema))
            return
        members = [member for key in UNIONS for member in schema.get(key, ())]
        members += [
            _schema_of(value) for value in _values(schema) if isinstance(value, dict | list)
        ]
        for member in members:
            self.add(member, path, seen)
        self._note(schema, field, is_union=bool(members))
        path += _tag(schema)
        self.by_path.setdefault(path, Field())
        for name, inner in schema.get("properties", {}).items():
            self.add(inner, f"{path}.{name}", seen)
            is_needed = name in schema.get("required", ())
            self.by_path[f"{path}.{name}"].needs.add("required" if is_needed else "optional")
        for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
            if isinstance(schema.get(key), dict) and schema.get("maxItems") != 0:
                self.add(schema[key], path + mark, seen)
        for index, inner in enumerate(schema.get("prefixItems", ())):
            self.add(inner, f"{path}[{index}]", seen)
        if "contentSchema" in schema:
            self.add(schema["contentSchema"], f"{path}:", seen)

    def _note(self, schema: Json, field: Field, *, is_union: bool) -> None:
        values = [value for value in _values(schema) if not isinstance(value, dict | list)]
        field.values |= {json.dumps(value) for value in values if value is not None}
        field.types |= {"null"} if None in values else set()
        is_free = "enum" not in schema and "const" not in schema
        if is_free and ("type" in schema or not is_union):
            kinds = schema.get("type", "object" if "properties" in schema else "any")
            field.types |= {kinds} if isinstance(kinds, str) else {*kinds}
        field.rules |= {f"{key} {json.dumps(schema[key])}" for key in LIMITS if key in schema}
        if schema.get("additionalProperties") is False:
            field.rules.add("no other names")
        rules = [*schema.get("allOf", ()), *schema.get("then", {}).get("allOf", ())]
        field.rules |= {f"rule {json.dumps(rule, sort_keys=True)}" for rule in rules}


def _values(schema: Json) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _schema_of(value: Json | list[Any]) -> Json:
    """Return the schema of one array or object."""
    if isinstance(value, list):
        items = {"items": {"enum": value}} if value else {}
        return {"type": "array", **items, "minItems": len(value), "maxItems": len(value)}
    if not value:
        return {"type": "object", "maxProperties": 0}
    properties = {name: {"enum": [inner]} for name, inner in value.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": [*value],
        "additionalProperties": False,
    }


def _tag(schema: Json) -> str:
    """Return "<text>" for a member whose type is "text"."""
    for name in TAGS:
        if isinstance(value := schema.get("properties", {}).get(name, {}).get("const"), str):
            return f"<{value}>"
    return ""


def operations(document: Json) -> dict[str, dict[str, Field]]:
    """Return the fields of each operation, by "POST /v1/models" and path."""
    return {
        f"{method.upper()} {path}": dict(_fields(operation, document))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    }


def _fields(operation: Json, document: Json) -> Iterator[tuple[str, Field]]:
    components = document["components"]["schemas"]
    yield "operationId", Field(values={operation["operationId"]})
    yield "security", Field(values={json.dumps(operation.get("security"))})
    for parameter in operation.get("parameters", ()):
        where = f"{parameter['in']} {parameter['name']}"
        yield from _of_schema(parameter["schema"], where, components)
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield from _of_schema(content["schema"], f"request ({kind}) ", components)
    for status, response in operation["responses"].items():
        for kind, content in response["content"].items():
            yield from _of_schema(content["schema"], f"{status} ({kind}) ", components)


def _of_schema(
    schema: Json, where: str, components: Mapping[str, Json]
) -> Iterator[tuple[str, Field]]:
    fields = Fields(components)
    fields.add(schema, where)
    return iter(fields.by_path.items())


def differences(old: Json, new: Json) -> dict[str, list[str]]:
    """Return the operations by the difference that they have: one of a shared schema is one."""
    before, after = operations(old), operations(new)
    by_line: dict[str, list[str]] = {}
    for name in before.keys() ^ after.keys():
        by_line.setdefault("removed" if name in before else "added", []).append(name)
    for name in before.keys() & after.keys():
        for line in _of_operation(before[name], after[name]):
            by_line.setdefault(line, []).append(name)
    return {line: sorted(names) for line, names in sorted(by_line.items())}


def _of_operation(old: Mapping[str, Field], new: Mapping[str, Field]) -> Iterator[str]:
    for word, fields, others in (("removed", old, new), ("added", new, old)):
        alone = fields.keys() - others.keys()
        yield from (f"{word} {path}" for path in alone if not _is_below(path, alone))
    for path in old.keys() & new.keys():
        if line := old[path].changes(new[path]):
            yield f"changed {path}: {line}"


def _is_below(path: str, others: set[str]) -> bool:
    return any(path[:end] in others for end in range(1, len(path)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="just openapi-diff")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    files = parser.parse_args()
    old, new = (json.loads(path.read_text("utf-8")) for path in (files.old, files.new))
    by_line = differences(old, new)
    for line, names in by_line.items():
        print(f"{line}\n    {', '.join(names)}")  # noqa: T201
    return int(bool(by_line))


if __name__ == "__main__":
    sys.exit(main())
