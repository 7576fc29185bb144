"""The base of request classes, whose types are parser and schema. msgspec checks types and limits,
`body_faults` words refusals, functions beside each class check the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import attrs
import msgspec
from msgspec import inspect

from trouper.protocol.problems import RequestFailed, bad_request
from trouper.web.http.body_faults import info_of, members, refusal, unwrapped
from trouper.web.http.body_parsing import is_integer
from trouper.web.http.client_paths import Adaptation
from trouper.web.http.leniency import NOTHING, Adapt, ReadPast, renamed
from trouper.web.http.request_schema import Json, Unsupported, among

T = TypeVar("T", bound="Body")
Report = Callable[[RequestFailed], None] | ReadPast
"""Gets the refusal of an unknown name, or collects the name."""
MAX_UNREAD = 100
StrictCheck = Callable[[Json, str], None]
Path = tuple[Any, ...]
"""Path of a value: the container's path, and a name or index; empty at the root."""


@attrs.define
class Unread:
    past: ReadPast | None
    refusals: list[RequestFailed] = attrs.field(factory=list)
    """Refusals of the first `MAX_UNREAD` names that are not read past."""


def refuse(failed: RequestFailed) -> None:
    raise failed


Read = Callable[[Any, Path, Unread], Any]
"""Prepares a value at a path for the type."""
PLAIN = {str, int, bool}


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object in a request's body. Null in an optional field is absence."""

    unsupported: ClassVar[Unsupported] = {}
    """Parameters of the API that do nothing here: refused by name, or read past, if the value
    requests something (D13)."""
    rules: ClassVar[tuple[Json, ...]] = ()
    """Rules between fields as JSON Schema, which functions check after decoding."""
    unknown_may_be_null: ClassVar[bool] = False
    may_lack_tag: ClassVar[bool] = False
    essential: ClassVar[frozenset[str]] = frozenset()
    """Names that are never read past: the answer would be wrong."""
    harmless: ClassVar[frozenset[str] | None] = None
    """The only names that lenient reading may read past; None: all but `essential`."""
    aliases: ClassVar[Mapping[str, str]] = {}
    adapt: ClassVar[Adapt | None] = None
    strict_check: ClassVar[StrictCheck | None] = None
    """Refuses in strict reading values that the types allow for lenient reading. Gets the object
    and the path; raises `RequestFailed` (400)."""

    @classmethod
    def parse(cls, body: Mapping[str, Any], report: Report = refuse) -> Self:
        """As `structure`."""
        return structure(body, cls, report)

    @classmethod
    def may_skip(cls, name: str) -> bool:
        return name not in cls.essential if cls.harmless is None else name in cls.harmless


class SentBack(Body, frozen=True):
    """An object that clients send back as received: unknown names may be null."""

    unknown_may_be_null: ClassVar[bool] = True


def structure(body: Mapping[str, Any], kind: type[T], report: Report = refuse) -> T:
    """Build `kind` from a body. Raises `RequestFailed` (400) that names the parameter. `report`
    gets refusals of unknown names."""
    past = report if isinstance(report, ReadPast) else None
    unread = Unread(past)
    refused = refuse if isinstance(report, ReadPast) else report
    prepared = _object(kind)(body, (), unread)
    fault: RequestFailed | None = None
    try:
        parsed = msgspec.convert(prepared, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        fault = refusal(error, prepared, kind)
    for failed in unread.refusals:
        if fault is None or _explains(failed, fault):
            refused(failed)
    if fault is not None:
        raise fault
    return parsed


def _explains(misread: RequestFailed, fault: RequestFailed) -> bool:
    parent, _, _ = (misread.problem.param or "").rpartition(".")
    return not parent or f"{fault.problem.param}.".startswith(f"{parent}.")


@cache
def _object(kind: type[Body]) -> Read:
    """Return an object's reader, which reports unknown names and drops nulls."""
    info = info_of(kind)
    assert isinstance(info, inspect.StructType)
    nested = {
        field.encode_name: reader
        for field in info.fields
        if (reader := _reader(field.type)) is not None
    }
    tag_field, tag = info.tag_field, info.tag
    known = {field.encode_name for field in info.fields} | (
        {tag_field} if tag_field is not None else set()
    )
    adapts = bool(kind.aliases) or kind.adapt is not None

    def read(value: Any, path: Path, unread: Unread) -> Any:
        if not isinstance(value, dict):
            return value
        if adapts and unread.past is not None:
            value = _adapted(kind, value, path, unread.past)
        if kind.strict_check is not None and unread.past is None:
            kind.strict_check(value, _written(path))
        if tag_field is not None and value.get(tag_field) != tag:
            if value.get(tag_field) is not None or not kind.may_lack_tag:
                # msgspec would read past a missing tag where it expects one class.
                return {tag_field: None} | value
            value = value | {tag_field: tag}
        if not known.issuperset(value):
            for name in value:
                if name not in known:
                    _check_unread(kind, name, value[name], path, unread)
            value = {name: inner for name, inner in value.items() if name in known}
        if None in value.values():
            value = {name: inner for name, inner in value.items() if inner is not None}
        prepared = {
            name: reader(value[name], (path, name), unread)
            for name, reader in nested.items()
            if name in value and type(value[name]) not in PLAIN
        }
        return value | prepared if prepared else value

    return read


def _adapted(kind: type[Body], value: Json, path: Path, past: ReadPast) -> Json:
    def skip(name: str) -> None:
        past.skip(_general((path, name)))

    adapted = value if kind.adapt is None else kind.adapt(value, skip)
    adapted = renamed(adapted, kind.aliases, skip)
    if adapted is not value:
        past.adaptations.append(Adaptation(_written(path), value, adapted))
    return adapted


def _check_unread(kind: type[Body], name: str, value: Any, within: Path, unread: Unread) -> None:
    """Report an unknown name whose value requests something."""
    unsupported, past = name in kind.unsupported, unread.past
    if value is None and (unsupported or kind.unknown_may_be_null or past is not None):
        return
    if unsupported and among(value, kind.unsupported[name]):
        return
    if past is not None and (kind.may_skip(name) or (not unsupported and among(value, NOTHING))):
        if not past.full:
            past.skip(_general((within, name)))
    elif len(unread.refusals) < MAX_UNREAD:
        # Those that a lenient reading refuses are of other APIs.
        known = unsupported or past is not None
        unread.refusals.append(_unread(kind, _written((within, name)), known=known))


def _unread(kind: type[Body], path: str, *, known: bool) -> RequestFailed:
    """Return the refusal of an unknown name. `known`: another API has the name."""
    if issubclass(kind, SentBack):
        return bad_request(f"{path} is not supported here", path, "unsupported_parameter")
    if known:
        named = path if kind.unknown_may_be_null else f"{path!r}"
        return bad_request(
            f"{named} is not supported here; leave it out", path, "unsupported_parameter"
        )
    return bad_request(f"unknown parameter {path!r}", path, "unknown_parameter")


def _written(path: Path) -> str:
    if not path:
        return ""
    within, step = path
    return f"{_written(within)}.{step}" if within else str(step)


def _general(path: Path) -> str:
    if not path:
        return ""
    within, step = path
    outer = _general(within)
    return outer if isinstance(step, int) else f"{outer}.{step}" if outer else step


def _reader(info: inspect.Type) -> Read | None:
    """Return the reader of a type's values; None without preparation."""
    match unwrapped(info):
        case inspect.IntType():
            return _as_integer
        case inspect.StructType(cls=kind):
            return _object(kind)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            inner = _reader(item)
            return None if inner is None else _array(inner)
        case inspect.UnionType():
            return _union(info)
    return None


def _as_integer(value: Any, _: Path, __: Unread) -> Any:
    return int(value) if type(value) is float and is_integer(value) else value


def _array(inner: Read) -> Read:
    def read(value: Any, path: Path, unread: Unread) -> Any:
        if not isinstance(value, list) or PLAIN.issuperset(map(type, value)):
            return value
        return [inner(item, (path, index), unread) for index, item in enumerate(value)]

    return read


def _union(info: inspect.Type) -> Read | None:
    """Return a union's reader. msgspec allows one array type, and several tagged classes."""
    tagged: dict[Any, Read] = {}
    field, untagged = "", None
    readers: dict[type, Read] = {}
    for member in members(info):
        reader = _reader(member)
        if isinstance(member, inspect.StructType) and member.tag_field is not None:
            field, tagged[member.tag] = member.tag_field, _object(member.cls)
            untagged = member.tag if getattr(member.cls, "may_lack_tag", False) else untagged
        elif reader is not None:
            kind = {inspect.IntType: float, inspect.StructType: dict}.get(type(member), list)
            readers[kind] = reader

    def by_tag(value: Any, path: Path, unread: Unread) -> Any:
        name = value.get(field) if isinstance(value, dict) else None
        if name is None and isinstance(value, dict):
            name = untagged
        reader = tagged.get(name) if isinstance(name, str) else None
        return value if reader is None else reader(value, path, unread)

    if tagged:
        readers[dict] = by_tag if len(tagged) > 1 else tagged.popitem()[1]
    if [*readers] == [dict]:
        return readers[dict]

    def read(value: Any, path: Path, unread: Unread) -> Any:
        reader = readers.get(type(value))
        return value if reader is None else reader(value, path, unread)

    return read if readers else None
