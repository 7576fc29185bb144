"""Finds the part and the keyword of a JSON schema that llguidance rejects without naming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import attrs

Steps = tuple[str, ...]
"""The way to a part of a schema: keys, and indexes as text."""
IsWrong = Callable[[Any], bool]
MAX_TRIALS = 500  # Bound of trials. A larger schema gets a path near its root.

# Keys of named schemas. Definitions come first, since parts that refer to a faulty one fail, too.
NAMED = ("$defs", "definitions", "properties", "patternProperties")

# Bound of an object's optional properties: each takes four of the parser's 2,000 items.
MAX_OPTIONAL = 490
LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = ("additionalProperties", "additionalItems", "items", "not")

# Keywords that llguidance refuses.
UNFOLLOWED = (
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
)
DROPPABLE = (
    *UNFOLLOWED,
    "pattern",
    "format",
    "oneOf",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "multipleOf",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "allOf",
    "anyOf",
    "required",
    "additionalProperties",
    "const",
    "enum",
    "properties",
    "items",
    "prefixItems",
    "$ref",
)
"""Keywords that may be dropped, the least first: llguidance follows none of them in every form."""
TESTED = (*DROPPABLE, "type")
"""Keywords that may be named as a fault."""
CONTENTS = frozenset(
    {"properties", "patternProperties", "additionalProperties", "items", "prefixItems"}
)
OWN = {*TESTED, *SINGLE, "title", "description", "$schema"}
MAX_DROPPED = 40  # Bound of keywords that are found by trials and dropped.


@attrs.frozen
class Fault:
    steps: Steps
    """Path of the innermost part that fails; (): the whole."""
    keyword: str = ""
    """The keyword at fault; "": not one alone."""

    @property
    def path(self) -> Steps:
        return (*self.steps, self.keyword) if self.keyword else self.steps


class SchemaFaultError(ValueError):
    def __init__(self, fault: Fault) -> None:
        super().__init__("the schema cannot be followed")
        self.fault = fault


def path_of(steps: Steps) -> str:
    """Return a path such as ".properties.a.type"."""
    return "".join(f".{step}" for step in steps)


def fault_of(schema: Any, is_wrong: IsWrong) -> Fault:
    steps, part = part_at_fault(schema, is_wrong)
    shared = _shared(schema)
    present = [key for key in TESTED if key in part] if isinstance(part, dict) else []
    for keyword in present:
        if not is_wrong(shared | without(part, keyword)):
            return Fault(steps, keyword)
    for keyword, other in combinations(present, 2):
        if not is_wrong(shared | without(without(part, keyword), other)):
            return Fault(steps, keyword)
    return Fault(steps)


def part_at_fault(schema: Any, is_wrong: IsWrong) -> tuple[Steps, Any]:
    """Return the path of the innermost part that fails, and the part."""
    shared, trials = _shared(schema), 0
    path: Steps = ()
    inside, found = schema, schema
    while found is not None:
        inside, found = found, None
        for steps, part in parts_of(inside):
            trials += 1
            if trials > MAX_TRIALS:
                return path, inside
            if is_wrong({**shared, **part} if isinstance(part, dict) else part):
                path, found = (*path, *steps), part
                break
    return path, inside


def relaxed_by_trials(schema: Any, is_wrong: IsWrong) -> tuple[Any, list[Steps]]:
    """Return the schema without the keywords that llguidance rejects as they are, and their
    paths. Raises `SchemaFaultError` for what may not be dropped."""
    dropped: list[Steps] = []
    while is_wrong(schema):
        fault = fault_of(schema, is_wrong)
        part = _at(schema, fault.steps)
        may_go = fault.keyword in DROPPABLE or part is False
        if len(dropped) == MAX_DROPPED or not may_go:
            raise SchemaFaultError(fault)
        changed = True if part is False else without(part, fault.keyword)
        schema = _replaced(schema, fault.steps, changed)
        dropped.append(fault.path)
    return schema, dropped


def _replaced(schema: Any, steps: Steps, part: Any) -> Any:
    if not steps:
        return part
    outer, key = _at(schema, steps[:-1]), steps[-1]
    outer[int(key) if isinstance(outer, list) else key] = part
    return schema


def without(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    """Return the schema without a keyword. Alternatives that overlap become `anyOf`."""
    kept = {name: value for name, value in schema.items() if name != keyword}
    if keyword == "oneOf" and "anyOf" not in kept:
        return kept | {"anyOf": schema[keyword]}
    return kept


def too_wide(schema: Any, steps: Steps = ()) -> tuple[Steps, str] | None:
    """Find the first object with too many optional properties, as (path, reason)."""
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        required = schema.get("required")
        names = required if isinstance(required, list) else ()
        optional = len(
            schema["properties"].keys() - {each for each in names if isinstance(each, str)}
        )
        if optional > MAX_OPTIONAL:
            return (
                steps,
                (
                    f"{optional} of its properties are not required, and at most {MAX_OPTIONAL} of "
                    "one object may be so"
                ),
            )
    found = (too_wide(part, (*steps, *further)) for further, part in parts_of(schema))
    return next(filter(None, found), None)


def narrowed(schema: Any) -> tuple[Any, list[Steps]]:
    """Return the schema with the permitted number of optional properties, and the dropped paths.
    The argument changes."""
    dropped: list[Steps] = []
    while (wide := too_wide(schema)) is not None:
        steps, _ = wide
        part = _at(schema, steps)
        required = part.get("required") or []
        optional = [name for name in part["properties"] if name not in required]
        for name in optional[MAX_OPTIONAL:]:
            del part["properties"][name]
        part.pop("additionalProperties", None)
        dropped.append((*steps, "properties"))
    return schema, dropped


def depth_of(schema: Any) -> int | None:
    """Return the depth of objects and arrays, as written; None: references, or values of any
    kind."""
    deepest, waiting = 0, [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if part is False:
            continue
        if not isinstance(part, dict) or "$ref" in part or _holds_anything(part):
            return None
        deepest = max(deepest, depth + (not CONTENTS.isdisjoint(part)))
        waiting += [(inner, depth + (steps[0] in CONTENTS)) for steps, inner in parts_of(part)]
    return deepest


def _holds_anything(schema: dict[str, Any]) -> bool:
    """Whether values have contents that no part of the schema describes."""
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if {"const", "enum", "anyOf", "oneOf", "allOf"} & schema.keys():
        return False
    return any(
        kind in (None, container) and CONTENTS.isdisjoint(schema)
        for kind in types
        for container in ("object", "array")
    )


def parts_of(schema: Any) -> Iterator[tuple[Steps, Any]]:
    """Yield the direct subschemas with their relative paths."""
    if not isinstance(schema, dict):
        return
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            for name, part in schema[key].items():
                yield (key, name), part
    for key in LIST_KEYS:
        if isinstance(schema.get(key), list):
            for index, part in enumerate(schema[key]):
                yield (key, str(index)), part
    for key in SINGLE:
        if isinstance(schema.get(key), dict):
            yield (key,), schema[key]


def _shared(schema: Any) -> dict[str, Any]:
    """Return what references of a part may need: definitions, and keys that are no keywords."""
    if not isinstance(schema, dict):
        return {}
    return {key: value for key, value in schema.items() if key not in OWN}


def _at(schema: Any, steps: Steps) -> Any:
    for step in steps:
        schema = schema[int(step)] if isinstance(schema, list) else schema[step]
    return schema
