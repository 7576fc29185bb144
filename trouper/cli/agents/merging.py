"""Changes of plain data that keep other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

MISSING = object()
"""The value of a missing key."""
KEY_VARIABLE = "TROUPER_API_KEY"
"""Clients read the server's key from this variable."""


class ConfigInvalid(Exception):
    """The message says why a client's file cannot be changed."""


@attrs.frozen
class Default:
    """A value for a missing key."""

    value: Any


@attrs.frozen
class Blank:
    """An empty text in place of a value."""


@attrs.frozen
class Dropped:
    """A key to remove."""


@attrs.frozen
class Entries:
    """Entries of a list, known by the values of the keys `by`."""

    by: tuple[str, ...]
    items: tuple[dict[str, Any], ...]


@attrs.frozen
class Secret:
    """The server's API key, which is never shown."""

    value: str = attrs.field(repr=False)


@attrs.frozen
class Edit:
    """`path`: keys, and indices of lists; an index equal to the length appends."""

    path: tuple[Any, ...]
    old: Any
    new: Any = attrs.field(repr=False)


def plain(value: Any, *, shown: bool = False) -> Any:
    """Return the value as data. `shown`: without secrets."""
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


def merged(data: Any, values: Mapping[str, Any], path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Raises `ConfigInvalid` for a value of another kind."""
    if not isinstance(data, dict):
        raise ConfigInvalid(
            f"{dotted(path) or 'the file'} holds {_kind(data)}, where a table of keys is expected"
        )
    changed = dict(data)
    for key, value in values.items():
        _set(changed, key, _merged_value(data.get(key, MISSING), value, (*path, key)))
    return changed


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        data.pop(key, None)
    else:
        data[key] = value


def _merged_value(old: Any, value: Any, path: tuple[Any, ...]) -> Any:
    absent = old is MISSING or old is None
    match value:
        case Default():
            return plain(value) if old is MISSING else old
        case Blank():
            return old if absent else ""
        case Dropped():
            return MISSING
        case Mapping() if not absent:
            return merged(old, value, path)
        case Entries() if not absent:
            return _merged_list(old, value, path)
        case _:
            return plain(value)


def _merged_list(old: Any, entries: Entries, path: tuple[Any, ...]) -> list[Any]:
    if not isinstance(old, list):
        raise ConfigInvalid(f"{dotted(path)} holds {_kind(old)}, where a list is expected")
    changed = list(old)
    for item in entries.items:
        same = (index for index, known in enumerate(old) if _same(known, item, entries.by))
        index = next(same, None)
        if index is None:
            changed.append(plain(item))
        else:
            changed[index] = merged(old[index], item, (*path, index))
    return changed


def _same(known: Any, item: Mapping[str, Any], by: tuple[str, ...]) -> bool:
    return isinstance(known, dict) and all(
        known.get(key, MISSING) == plain(item[key]) for key in by
    )


def reverted(before: Any, after: Any, now: Any) -> Any:
    """Return `now` without the change from `before` to `after`. Other changes stay."""
    if not isinstance(now, dict):
        return now
    changed = dict(now)
    for key in dict.fromkeys([*after, *before]):
        old, new, present = (data.get(key, MISSING) for data in (before, after, now))
        if _equal(old, new) or _equal(present, old):
            continue
        if _equal(present, new):
            _set(changed, key, old)
        elif isinstance(new, dict) and isinstance(present, dict):
            changed[key] = reverted(old if isinstance(old, dict) else {}, new, present)
        elif isinstance(new, list) and isinstance(present, list):
            known = old if isinstance(old, list) else []
            changed[key] = [item for item in present if item in known or item not in new]
    return changed


def edits_between(old: Any, new: Any, path: tuple[Any, ...] = ()) -> Iterator[Edit]:
    """A list that shrinks is replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from edits_between(old.get(key, MISSING), new.get(key, MISSING), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) <= len(new):
        for index, item in enumerate(new):
            known = old[index] if index < len(old) else MISSING
            yield from edits_between(known, item, (*path, index))
    elif not _equal(old, new):
        yield Edit(path, old, new)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def put(root: Any, edit: Edit) -> None:
    """Edit a document of tomlkit or ruamel.yaml."""
    *parents, last = edit.path
    for key in parents:
        root = root[key]
    if edit.new is MISSING:
        del root[last]
    elif isinstance(last, int) and last == len(root):
        root.append(edit.new)
    else:
        root[last] = edit.new


def dotted(path: tuple[Any, ...]) -> str:
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
