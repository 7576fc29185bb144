"""Answers are described with room for fields of later versions; tests let them have no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


def without_room(document: Json) -> Json:
    """Return /openapi.json whose answers have no other fields unless it says that they may."""
    components, answers = document["components"], parts_of_answers(document)
    closed = {
        name: {"additionalProperties": False, **schema} if "properties" in schema else schema
        for name, schema in components["schemas"].items()
        if name in answers
    }
    return document | {"components": components | {"schemas": components["schemas"] | closed}}


def parts_of_answers(document: Json) -> set[str]:
    """Return the components that answers refer to, and those that these refer to."""
    schemas = document["components"]["schemas"]
    names = set[str]()
    fresh = {
        *references(
            [
                operation["responses"]
                for methods in document["paths"].values()
                for operation in methods.values()
            ]
        )
    }
    while fresh:
        names |= fresh
        fresh = {*references([schemas[name] for name in fresh])} - names
    return names


def references(value: object) -> Iterator[str]:
    """Yield the names of the components that a schema refers to."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].removeprefix("#/components/schemas/")
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)
