"""What of a configuration must change so that it holds given values, on plain data. Everything else
in it stays."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import attrs


class Absence(Enum):
    """The value of a key that is not there, or shall not be."""

    MISSING = "missing"


MISSING = Absence.MISSING
KEY_VARIABLE = "TROUPER_API_KEY"
"""The variable that clients read the server's key from, so that it need not stand in their
files."""


class ConfigInvalid(Exception):
    """A client's file that cannot be changed. The message says why."""


@attrs.frozen
class Default:
    """A value that is written only where there is none."""

    value: Any


@attrs.frozen
class Blank:
    """An empty text where there is a value that must not count any more."""


@attrs.frozen
class Dropped:
    """A key that is removed where it is."""


@attrs.frozen
class Entries:
    """Entries of a list. One whose keys `by` have the same values is changed; else it is added."""

    by: tuple[str, ...]
    items: tuple[dict[str, Any], ...]


@attrs.frozen
class Secret:
    """The server's API key, for clients that cannot read it from a variable. It is written, but
    never shown."""

    value: str = attrs.field(repr=False)


@attrs.frozen
class Edit:
    """A value that is set. `path`: keys, and indices of lists; an index that is the length
    appends."""

    path: tuple[Any, ...]
    old: Any
    new: Any = attrs.field(repr=False)


def plain(value: Any, *, shown: bool = False) -> Any:
    """Return the value as data. `shown`: for a person, without secrets."""
    match value:
        case Default():
            return plain(value.value, shown=shown)
        case Entries():
            return [plain(item, shown=shown) for item in value.items]
        case Secret():
            return f"${KEY_VARIABLE}" if shown else value.value
        case Mapping():
            kept = {
                key: item for key, item in value.items() if not isinstance(item, Blank | Dropped)
            }
            return {key: plain(item, shown=shown) for key, item in kept.items()}
        case list():
            return [plain(item, shown=shown) for item in value]
        case _:
            return value


def edits_for(data: Any, values: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Iterator[Edit]:
    """Yield what must be set in `data`. Raises `ConfigInvalid` where it has another kind of value
    than it should have."""
    if not isinstance(data, dict):
        raise ConfigInvalid(
            f"{dotted(path) or 'the file'} holds {_kind(data)}, where a table of keys is expected"
        )
    for key, value in values.items():
        yield from _edits_of(data.get(key, MISSING), value, (*path, key))


def _edits_of(old: Any, value: Any, path: tuple[Any, ...]) -> Iterator[Edit]:
    absent = old is MISSING or old is None
    match value:
        case Default():
            if old is MISSING:
                yield Edit(path, old, plain(value))
        case Blank():
            if not absent and old != "":
                yield Edit(path, old, "")
        case Dropped():
            if old is not MISSING:
                yield Edit(path, old, MISSING)
        case Mapping() | Entries() if absent:
            yield Edit(path, old, plain(value))
        case Mapping():
            yield from edits_for(old, value, path)
        case Entries():
            yield from _edits_of_list(old, value, path)
        case _:
            new = plain(value)
            if old is MISSING or type(old) is not type(new) or old != new:
                yield Edit(path, old, new)


def _edits_of_list(old: Any, entries: Entries, path: tuple[Any, ...]) -> Iterator[Edit]:
    if not isinstance(old, list):
        raise ConfigInvalid(f"{dotted(path)} holds {_kind(old)}, where a list is expected")
    added = len(old)
    for item in entries.items:
        index = next(
            (index for index, known in enumerate(old) if _same(known, item, entries.by)), None
        )
        if index is not None:
            yield from edits_for(old[index], item, (*path, index))
        else:
            yield Edit((*path, added), MISSING, plain(item))
            added += 1


def _same(known: Any, item: Mapping[str, Any], by: tuple[str, ...]) -> bool:
    return isinstance(known, dict) and all(
        known.get(key, MISSING) == plain(item[key]) for key in by
    )


def edits_back(before: Any, after: Any, now: Any, path: tuple[Any, ...] = ()) -> Iterator[Edit]:
    """Yield what takes a change from `before` to `after` back in `now`, which others have changed
    since. What they have set stays."""
    if not isinstance(now, dict):
        return
    for key in dict.fromkeys([*after, *before]):
        old, new, present = (data.get(key, MISSING) for data in (before, after, now))
        if _equal(old, new) or _equal(present, old):
            continue
        if _equal(present, new):
            yield Edit((*path, key), present, old)
        elif isinstance(new, dict) and isinstance(present, dict):
            yield from edits_back(old if isinstance(old, dict) else {}, new, present, (*path, key))
        elif isinstance(new, list) and isinstance(present, list):
            known = old if isinstance(old, list) else []
            yield Edit(
                (*path, key),
                present,
                [item for item in present if item in known or item not in new],
            )


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def put(root: Any, edit: Edit) -> None:
    """Carry out an edit in dictionaries and lists, or in what a format's library has in their
    place."""
    *parents, last = edit.path
    for key in parents:
        root = root[key]
    if edit.new is MISSING:
        del root[last]
    elif isinstance(last, int) and last == len(root):
        root.append(edit.new)
    else:
        root[last] = edit.new


def with_edits(data: Any, edits: list[Edit]) -> Any:
    """Return a copy of the data with the edits."""
    data = copy.deepcopy(data)
    for edit in edits:
        put(data, attrs.evolve(edit, new=copy.deepcopy(edit.new)))
    return data


def dotted(path: tuple[Any, ...]) -> str:
    """Return the path as a person writes it: `models[2].name`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(
        "."
    )


def _kind(value: Any) -> str:
    kinds = {
        dict: "a table of keys",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "nothing",
    }
    return kinds.get(type(value), "a number")
