"""The place of a fault in the body that a client sent, where adapters of lenient reading moved it.

Adapters drop, rename and take apart, but pass the client's values on as they are: a moved value is
found by its identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

Json = dict[str, Any]
NOT_THERE = object()
DEPTH = 4
"""Steps within which a value is searched for: as far as a tool of an item, `input.0.tools.0`."""


@attrs.frozen
class Adaptation:
    path: str
    """Path of the object in the body of the adaptations before; "" for the body itself."""
    before: Json
    after: Json


def trace_to_client(path: str, adaptations: Sequence[Adaptation]) -> str:
    """Return the place in the client's body of a value in the adapted one. `adaptations`: in their
    order, an outer object before those within."""
    for one in reversed(adaptations):
        within = f"{one.path}." if one.path else ""
        if path.startswith(within):
            steps = path.removeprefix(within).split(".")
            path = within + ".".join(_trace(one.before, one.after, steps) or steps)
    return path


def _trace(before: Any, after: Any, steps: list[str]) -> list[str]:
    """Return the steps in `before` to the value or, if an adapter built it, to its source."""
    if not steps:
        return []
    step, *rest = steps
    value = _at(after, step)
    if value is NOT_THERE or _at(before, step) is value:
        return steps
    if (moved := _find_moved(before, after, step)) is not None:
        return [*moved, *rest]
    origin = _find_source(before, after, step) if isinstance(before, list) else step
    inner = _at(before, origin)
    if isinstance(inner, list) and isinstance(value, list) and len(inner) < len(value) and rest:
        entry = _at(value, rest[0])
        if (moved := _find(entry, before, after, DEPTH)) is not None:
            return [*moved, *rest[1:]]  # An entry from elsewhere.
    if inner is NOT_THERE:
        return _trace(before, value, rest)
    return [origin, *_trace(inner, value, rest)]


def _find_moved(before: Any, after: Any, step: str) -> list[str] | None:
    value = _at(after, step)
    if isinstance(before, list):
        return _find(value, before, after, 1)
    return _find(value, before, after, DEPTH) if before.get(step) is None else None


def _find(value: Any, before: Any, after: Any, depth: int) -> list[str] | None:
    """Return the steps in `before` to this very value, if `after` has another one there."""
    vanished = _walk_vanished(before, after, depth)
    return next((steps for steps, other in vanished if other is value), None)


def _walk_vanished(before: Any, after: Any, depth: int) -> Iterator[tuple[list[str], Any]]:
    """Yield the values of `before` that `after` has elsewhere or lacks, with their steps."""
    for step, value in _walk(before):
        other = _at(after, step)
        if other is not value:
            yield [step], value
            for inner, within in _walk_vanished(value, other, depth - 1) if depth > 1 else ():
                yield [step, *inner], within


def _find_source(before: list[Any], after: Any, step: str) -> str:
    """Return the index of the entry of which an adapter made that at `step`: the one with the most
    objects in common."""
    index, dropped = int(step), len(before) - len(after)
    if dropped <= 0:
        return step
    made = {id(value) for value in _walk_objects(after[index])}

    def likeness(at: int) -> int:
        return sum(id(value) in made for value in _walk_objects(before[at]))

    return str(max(range(index, index + dropped + 1), key=likeness))


def _walk_objects(container: Any) -> Iterator[Any]:
    """Yield what is an object of its own: all but numbers and the shortest texts."""
    for _, value in _walk(container):
        if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > 1):
            yield value
        yield from _walk_objects(value)


def _at(container: Any, step: str) -> Any:
    if isinstance(container, dict):
        return container.get(step, NOT_THERE)
    if isinstance(container, list) and step.isdigit() and int(step) < len(container):
        return container[int(step)]
    return NOT_THERE


def _walk(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        yield from container.items()
    elif isinstance(container, list):
        for index, value in enumerate(container):
            yield str(index), value
