"""Rewrites a JSON schema for llguidance, without a change of meaning or with keywords dropped.

`followed` keeps an asserting keyword unknown to llguidance, which is then refused; `relaxed` drops
it. Source: JSON Schema 2020-12, where `format` is an annotation (7.2.1).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from trouper.engine.grammars.schema_faults import LIST_KEYS, NAMED, OWN, SINGLE, UNFOLLOWED, Steps

Json = dict[str, Any]

# Formats that llguidance follows. Others say what a text means.
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

# Keywords that llguidance refuses, and their values that hold for everything: zod writes the second
# with every record.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
ANYTHING: tuple[Any, ...] = (True, {})
APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "$dynamicRef"})
NAMING = {"enum", "const", "type", "title", "description", "pattern"}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's Decimal, which looks ahead.
PATTERNS = {DECIMAL: r"^[+-]?(\d+\.?\d*|\.\d+)$"}  # Patterns, and equal ones without a look ahead.
LOOKS = re.compile(r"\(\?<?[=!]")  # A look ahead or behind, which no automaton follows.

# The lowest integer of 64 bits that a float has and llguidance can negate.
LOWEST = -(2**63) + 1024
HIGHEST_FLOAT = sys.float_info.max
COUNTS = frozenset({"Length", "Items", "Properties"})
LOWER = ("minimum", "exclusiveMinimum")
BOUNDS = (*LOWER, "maximum", "exclusiveMaximum")
KEYS = (
    "format",
    "pattern",
    *BOUNDS,
    *(f"{end}{name}" for end in ("min", "max") for name in COUNTS),
)
ANNOTATIONS = frozenset(
    {
        "$id",
        "id",
        "$anchor",
        "$comment",
        "$vocabulary",
        "$defs",
        "definitions",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "discriminator",
        "xml",
        "externalDocs",
    }
)
"""Keywords of JSON Schema and OpenAPI that permit and forbid nothing, beside those of `OWN`."""
REWRITTEN = re.compile(f'"({"|".join(map(re.escape, (*KEYS, *UNFOLLOWED)))})"')


def followed(source: str) -> str:
    """Return the schema's text. Raises `ValueError` or `RecursionError`."""
    return json.dumps(_rewritten(json.loads(source))) if REWRITTEN.search(source) else source


def relaxed(schema: Any) -> tuple[Any, list[Steps]]:
    """Return the schema without what llguidance never follows, and the paths of dropped
    keywords. The argument may change."""
    dropped: list[Steps] = []
    return _rewritten(schema, dropped), dropped


def unknown_keywords(schema: Any) -> list[Steps]:
    """Return the paths of keywords that JSON Schema does not have, as of a typing error. Those
    that hold what a `$ref` names, and `x-...`, are not among them."""
    subschemas = [(outer[key], steps) for outer, key, steps in _walk({"": schema})]
    holders = {steps[0] for _, steps in subschemas if steps}
    return [
        (*steps, name)
        for subschema, steps in subschemas
        if isinstance(subschema, dict)
        for name in subschema.keys() - OWN - ANNOTATIONS
        if not name.startswith("x-") and (steps or name not in holders)
    ]


def _rewritten(schema: Any, dropped: list[Steps] | None = None) -> Any:
    """`dropped`: filled with the paths of dropped keywords; None: all asserting ones stay."""
    holder: Json = {"": schema}
    for outer, key, steps in _walk(holder):
        _rewrite(outer, key, steps, holder[""], dropped)
        if holder[""] is False:
            holder[""] = schema
    return holder[""]


def _walk(holder: Json) -> Iterator[tuple[Any, Any, Steps]]:
    """Yield each subschema, the outer ones first: the object or array around it, its key or index,
    and its path. It may be replaced meanwhile."""
    yield holder, "", ()
    seen = dict[int, Any]()
    waiting: list[tuple[Any, Steps]] = [(holder[""], ())]
    while waiting:
        outer, steps = waiting.pop()
        seen[id(outer)] = outer
        for inside, key, further in [*_subschemas(outer), *_referred(outer, holder[""])]:
            if id(inside[key]) not in seen:
                path = further[1:] if further[:1] == ("#",) else (*steps, *further)
                yield inside, key, path
                waiting.append((inside[key], path))


def _rewrite(outer: Any, key: Any, steps: Steps, root: Any, dropped: list[Steps] | None) -> None:
    schema = outer[key]
    changed = _changed(schema, root)
    if dropped is not None and isinstance(schema, dict):
        names = [] if _format_follows(schema.get("format")) else ["format"]
        if isinstance(changed, dict):
            names += [name for name in changed if _is_dropped(name, changed[name])]
            changed = {name: value for name, value in changed.items() if name not in names}
        dropped += [(*steps, name) for name in names]
    outer[key] = changed


def _is_dropped(name: str, value: Any) -> bool:
    return (
        name in UNFOLLOWED
        or (name == "pattern" and isinstance(value, str) and bool(LOOKS.search(value)))
        or (name == "$ref" and isinstance(value, str) and not value.startswith("#"))
    )


def _subschemas(schema: Any) -> Iterator[tuple[Any, Any, Steps]]:
    """Yield the direct subschemas: the object or array around each, key or index, path."""
    for key, inner in schema.items() if isinstance(schema, dict) else ():
        if key in NAMED and isinstance(inner, dict):
            yield from ((inner, name, (key, name)) for name in inner)
        elif key in LIST_KEYS and isinstance(inner, list):
            yield from ((inner, index, (key, str(index))) for index in range(len(inner)))
        elif key in SINGLE:
            yield schema, key, (key,)


def _referred(schema: Any, root: Any) -> Iterator[tuple[Any, Any, Steps]]:
    """Yield the target of a reference, which may lie below an unknown keyword."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    steps = _steps_of(reference) if isinstance(reference, str) else ()
    if steps and isinstance(outer := _at(root, steps[:-1]), dict) and steps[-1] in outer:
        yield outer, steps[-1], ("#", *steps)


def _changed(schema: Any, root: Any) -> Any:
    """Return the schema without what llguidance refuses; subschemas stay."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") in ANYTHING:
        return False
    kept = {name: value for name, value in schema.items() if not _asserts_nothing(name, value)}
    kept = _with_names(kept, root)
    for name, same in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if name in kept and same not in kept and not APPLICATORS & kept.keys():
            kept[same] = kept.pop(name)
    written = kept.get("pattern")
    if isinstance(written, str) and written in PATTERNS:
        kept["pattern"] = PATTERNS[written]
    return _with_bounds(kept)


def _with_names(schema: Json, root: Any) -> Json:
    """Return the schema with the names of `propertyNames` as properties or a pattern."""
    naming = schema.get("propertyNames")
    if isinstance(naming, dict) and isinstance(reference := naming.get("$ref"), str):
        naming = _at(root, _steps_of(reference)) if reference.startswith("#") else None
    if (
        not isinstance(naming, dict)
        or not naming.keys() <= NAMING
        or {"properties", "patternProperties"} & schema.keys()
    ):
        return schema
    kept = {name: value for name, value in schema.items() if name != "propertyNames"}
    value = kept.get("additionalProperties", True)
    names: Any = naming.get("enum", [naming["const"]] if "const" in naming else None)
    if isinstance(names, list) and "pattern" not in naming:
        if not all(isinstance(name, str) for name in names) or not names:
            return schema
        properties = dict.fromkeys(names, value)
        return kept | {"properties": properties, "additionalProperties": False}
    if isinstance(pattern := naming.get("pattern"), str) and names is None:
        return kept | {"patternProperties": {pattern: value}, "additionalProperties": False}
    return schema


def _with_bounds(schema: Json) -> Json:
    """Return the schema with numbers that llguidance reads: integer counts, and no lowest integer
    of 64 bits."""
    changed = dict[str, Any]()
    for name, value in schema.items():
        if name[3:] in COUNTS and isinstance(value, float) and value.is_integer():
            changed[name] = int(value)
        elif name in BOUNDS and _is_endless(value):
            changed[name] = None
        elif name in LOWER and "integer" in (schema.get("type") or ()) and _is_integer(value):
            changed[name] = max(value, LOWEST)
    merged = schema | changed
    return {name: value for name, value in merged.items() if changed.get(name, 0) is not None}


def _is_endless(bound: Any) -> bool:
    """Whether the bound excludes no float."""
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    return is_number and not -HIGHEST_FLOAT < bound < HIGHEST_FLOAT


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _steps_of(reference: str) -> Steps:
    steps = unquote(reference.removeprefix("#")).split("/")[1:]
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)


def _at(root: Any, steps: Steps) -> Any:
    """None: nothing is there."""
    found = root
    for step in steps:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _asserts_nothing(name: str, value: Any) -> bool:
    if name == "format":
        return not _format_follows(value)
    return any(
        type(value) is type(nothing) and value == nothing for nothing in NEUTRAL.get(name, ())
    )


def _format_follows(value: Any) -> bool:
    return not isinstance(value, str) or value in FORMATS
