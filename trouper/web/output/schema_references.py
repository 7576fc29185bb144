"""Rewrites every `$ref` of a JSON Schema as a pointer into the schema.

`$id` and `$anchor` are resolved and removed. References to other documents stay. Sources: JSON
Schema 2020-12, 8.2; RFC 6901.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

import attrs
import msgspec

Json = dict[str, Any]
Pointer = tuple[str, ...]
NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose value is an object of schemas."""
SINGLE = frozenset(
    {
        "items",
        "additionalItems",
        "additionalProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contentSchema",
    }
)
LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
IDENTIFIERS = ("$id", "$anchor")
PLAIN = "!$&'()*+,;=:@"  # RFC 3986, 3.5.


class ReferenceUnknown(ValueError):
    def __init__(self, reference: str) -> None:
        super().__init__(f"$ref {reference!r} names nothing in this schema")


def resolved(schema: Json) -> Json:
    """Return a copy with rewritten references. Raises `ReferenceUnknown`."""
    return _Document(schema).resolved()


def has_references(encoded: bytes) -> bool:
    """Whether JSON text may hold references, or an `$id`."""
    return b'"$ref"' in encoded or b'"$id"' in encoded


@attrs.frozen
class _Schema:
    value: Any
    location: Pointer
    base: str


class _Document:
    def __init__(self, schema: Json) -> None:
        # Encoding and decoding copies a deeply nested schema without Python recursion.
        self._root: Json = msgspec.json.decode(msgspec.json.encode(schema))
        self._found: dict[int, _Schema] = {}
        self._resources: dict[str, Pointer] = {"": ()}
        self._anchors: dict[tuple[str, str], Pointer] = {}

    def resolved(self) -> Json:
        # A target may lie below an unknown keyword, as in `#/components/schemas/Node`.
        self._explore(_Schema(self._root, (), ""))
        targets: dict[int, Pointer] = {}
        done: set[int] = set()
        while pending := [key for key in self._found if key not in done]:
            for key in pending:
                done.add(key)
                schema = self._found[key]
                if isinstance(reference := schema.value.get("$ref"), str):
                    target = self._resolved(reference, schema.base)
                    if target is not None:
                        targets[key] = target
                        self._explore(_Schema(self._at(target), target, schema.base))
        for key, target in targets.items():
            self._found[key].value["$ref"] = fragment_of(target)
        for schema in self._found.values():
            for name in IDENTIFIERS:
                schema.value.pop(name, None)
        return self._root

    def _explore(self, start: _Schema) -> None:
        waiting = [start]
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema.value, dict) or id(schema.value) in self._found:
                continue
            schema = self._identified(schema)
            self._found[id(schema.value)] = schema
            waiting += [
                _Schema(part, (*schema.location, *steps), schema.base)
                for steps, part in _parts(schema.value)
            ]

    def _identified(self, schema: _Schema) -> _Schema:
        identifier, base = schema.value.get("$id"), schema.base
        if isinstance(identifier, str) and not identifier.startswith("#"):
            base = urldefrag(urljoin(base, identifier)).url
            self._resources.setdefault(base, schema.location)
        for anchor in (
            schema.value.get("$anchor"),
            identifier[1:] if isinstance(identifier, str) and identifier.startswith("#") else None,
        ):
            if isinstance(anchor, str):
                self._anchors.setdefault((base, anchor), schema.location)
        return attrs.evolve(schema, base=base)

    def _resolved(self, reference: str, base: str) -> Pointer | None:
        """Return the target; None: in another document. Raises `ReferenceUnknown`."""
        uri, fragment = urldefrag(reference)
        uri = urldefrag(urljoin(base, uri)).url if uri else base
        resource, fragment = self._resources.get(uri), unquote(fragment)
        if resource is None:
            return None
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            if (anchored := self._anchors.get((uri, fragment))) is None:
                raise ReferenceUnknown(reference)
            return anchored
        location = (
            *resource,
            *(step.replace("~1", "/").replace("~0", "~") for step in fragment[1:].split("/")),
        )
        try:
            self._at(location)
        except (LookupError, ValueError, TypeError):
            raise ReferenceUnknown(reference) from None
        return location

    def _at(self, location: Pointer) -> Any:
        """Raises `LookupError`, `ValueError` or `TypeError`."""
        found: Any = self._root
        for step in location:
            found = found[int(step) if isinstance(found, list) else step]
        return found


def _parts(schema: Json) -> Iterator[tuple[Pointer, Any]]:
    """Yield direct subschemas with paths."""
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items())
        elif key in LISTED and isinstance(value, list):
            yield from (((key, str(index)), part) for index, part in enumerate(value))
        elif key in SINGLE:
            yield (key,), value


def fragment_of(location: Pointer) -> str:
    """Format a pointer as a URI fragment: "#/$defs/a~1b"."""
    steps = (step.replace("~", "~0").replace("/", "~1") for step in location)
    return "#" + "".join(f"/{quote(step, safe=PLAIN)}" for step in steps)
