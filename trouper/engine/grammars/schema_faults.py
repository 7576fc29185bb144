"""Finds the faulty part of a JSON schema: llguidance reports the reason without a path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_TRIALS = 500
"""Trials take a fraction of a millisecond each. Huge schemas get a path near the root."""
NAMED = ("$defs", "definitions", "properties", "patternProperties")
"""Keys of named schemas, definitions first: paths of referring parts help less."""
MAX_OPTIONAL = 490
"""Optional properties of an object: each takes four of the 2,000 items of llguidance's parser."""
LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = ("additionalProperties", "items", "not")


def path_of_fault(schema: Any, wrong: Callable[[Any], bool]) -> str:
    """Return the innermost part that fails alone with the schema's definitions, such as
    ".properties.a.items"; "" for the whole."""
    named = {
        key: schema[key]
        for key in ("$defs", "definitions")
        if isinstance(schema, dict) and key in schema
    }
    trials = 0
    path = ""
    found: Any = schema
    while found is not None:
        inside, found = found, None
        for step, part in parts_of(inside):
            trials += 1
            if trials > MAX_TRIALS:
                return path
            if wrong({**part, **named} if isinstance(part, dict) else part):
                path, found = path + step, part
                break
    return path


def too_wide(schema: Any, path: str = "") -> tuple[str, str] | None:
    """Return path and reason of an object with too many optional properties."""
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        required = schema.get("required")
        optional = len(
            schema["properties"].keys()
            - set(filter(_is_text, required if isinstance(required, list) else ()))
        )
        if optional > MAX_OPTIONAL:
            return (
                path,
                (
                    f"{optional} of its properties are not required, and at most {MAX_OPTIONAL} of "
                    "one object may be so"
                ),
            )
    return next(
        (found for step, part in parts_of(schema) if (found := too_wide(part, path + step))), None
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield direct subschemas with relative paths."""
    if not isinstance(schema, dict):
        return
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            for name, part in schema[key].items():
                yield f".{key}.{name}", part
    for key in LIST_KEYS:
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                yield f".{key}.{index}", part
    for key in SINGLE:
        if isinstance(schema.get(key), dict):
            yield f".{key}", schema[key]
