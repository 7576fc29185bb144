"""Rewrites a JSON schema for llguidance without a change of meaning.

An asserting keyword unknown to llguidance stays, and is refused. Source: JSON Schema 2020-12, where
`format` is an annotation (7.2.1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from trouper.engine.grammars.schema_faults import LIST_KEYS, NAMED, SINGLE

FORMATS = frozenset(
    {
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "unknown",
    }
)
"""Formats that llguidance follows. Others say what a text means."""
NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
"""Keywords that llguidance refuses, and their values that hold for everything: zod writes the
second with every record."""
ANYTHING: tuple[Any, ...] = (True, {})
NAMING = {"enum", "type", "title", "description"}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""pydantic's Decimal, which looks ahead."""
PATTERNS = {DECIMAL: r"^[+-]?(\d+\.?\d*|\.\d+)$"}
"""Patterns, and equal ones without a look ahead."""
KEYS = ('"format"', '"pattern"', *(f'"{name}"' for name in NOTHING))


def followed(source: str) -> str:
    """Return the schema's text. Raises `ValueError` or `RecursionError`."""
    if not any(key in source for key in KEYS):
        return source
    schema: Any = json.loads(source)
    root = _changed(schema, schema) or schema
    waiting = [root]
    while waiting:
        for outer, key in [*_subschemas(waiting.pop())]:
            outer[key] = _changed(outer[key], root)
            waiting.append(outer[key])
    return json.dumps(root)


def _subschemas(schema: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the direct subschemas: the object or array around each, and the key or index."""
    for key, inner in schema.items() if isinstance(schema, dict) else ():
        if key in NAMED and isinstance(inner, dict):
            yield from ((inner, name) for name in inner)
        elif key in LIST_KEYS and isinstance(inner, list):
            yield from ((inner, index) for index in range(len(inner)))
        elif key in SINGLE:
            yield schema, key


def _changed(schema: Any, root: Any) -> Any:
    """Return the schema without what llguidance refuses; subschemas stay."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") in ANYTHING:
        return False
    kept = {name: value for name, value in schema.items() if not _asserts_nothing(name, value)}
    names = _names_of(kept.get("propertyNames"), root)
    if names and not {"properties", "patternProperties"} & kept.keys():
        del kept["propertyNames"]
        pattern = f"^({'|'.join(map(re.escape, names))})$"
        kept |= {
            "patternProperties": {pattern: kept.get("additionalProperties", True)},
            "additionalProperties": False,
        }
    written = kept.get("pattern")
    return (
        kept | {"pattern": PATTERNS[written]}
        if isinstance(written, str) and written in PATTERNS
        else kept
    )


def _names_of(schema: Any, root: Any) -> list[str]:
    """Return the names that a schema of names allows, if an `enum` lists them."""
    if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        schema = _at(root, reference)
    names: Any = (
        schema.get("enum") if isinstance(schema, dict) and schema.keys() <= NAMING else None
    )
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _at(root: Any, reference: str) -> Any:
    """Return the target of a reference within the schema; None: nothing."""
    found = root if reference.startswith("#") else None
    for step in unquote(reference[1:]).split("/")[1:]:
        found = (
            found.get(step.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, dict)
            else None
        )
    return found


def _asserts_nothing(name: str, value: Any) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in FORMATS
    return any(
        type(value) is type(nothing) and value == nothing for nothing in NOTHING.get(name, ())
    )
