"""msgspec's refusals in the server's words, with the parameter at fault. Types may explain faults
themselves (`says`, `explains`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf
from types import GenericAlias, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

import attrs
import msgspec
from msgspec import Meta, inspect, structs

from trouper.protocol.problems import RequestFailed, bad_request
from trouper.web.http.body_parsing import at_most, between, is_integer, json_type

KINDS: dict[type[inspect.Type], tuple[str, tuple[type, ...]]] = {
    inspect.StrType: ("a string", (str,)),
    inspect.LiteralType: ("a string", (str,)),
    inspect.BoolType: ("a boolean", (bool,)),
    inspect.IntType: ("an integer", (int,)),
    inspect.FloatType: ("a number", (int, float)),
    inspect.ListType: ("an array", (list,)),
    inspect.VarTupleType: ("an array", (list,)),
    inspect.DictType: ("an object", (dict,)),
    inspect.StructType: ("an object", (dict,)),
}
"""Each type's name and the Python types of such JSON values."""
SCALARS = (
    inspect.StrType,
    inspect.LiteralType,
    inspect.BoolType,
    inspect.IntType,
    inspect.FloatType,
    inspect.DictType,
)


@attrs.frozen
class BodyNode:
    value: Any
    kind: Any
    """A type as written in a class, with its metadata."""
    path: str
    is_missing: bool = False
    """Whether the object around lacks the required field; the value is None then."""

    @property
    def info(self) -> inspect.Type:
        return inspect.type_info(self.kind)

    def inner(
        self, step: str | int, value: Any, kind: Any, *, is_missing: bool = False
    ) -> BodyNode:
        path = f"{self.path}.{step}" if self.path else str(step)
        return BodyNode(value, kind, path, is_missing)


def says(message: str, code: str = "invalid_value", at: str = "", **limits: Any) -> Meta:
    """Type metadata: limits, and the message for a wrong type, with `{path}`, `{type}` (of the JSON
    value), `{tag}` and `{value}` filled in. `at` extends the path."""
    return Meta(extra={"says": (message, code, at)}, **limits)


def explains(explain: Callable[[Any, str], object], **limits: Any) -> Meta:
    """Type metadata: limits, and a function of a refused value and path that raises `RequestFailed`
    unless the general message fits."""
    return Meta(extra={"explains": explain}, **limits)


def ordered(literal: Any) -> Meta:
    """Metadata of a `Literal` that keeps the order of values; msgspec sorts values."""
    return Meta(extra={"values": get_args(literal)})


def unwrapped(info: inspect.Type) -> inspect.Type:
    return unwrapped(info.type) if isinstance(info, inspect.Metadata) else info


def members(info: inspect.Type) -> list[inspect.Type]:
    info = unwrapped(info)
    if not isinstance(info, inspect.UnionType):
        return [] if isinstance(info, inspect.NoneType) else [info]
    return [member for option in info.types for member in members(option)]


def extras(info: inspect.Type) -> Iterator[dict[str, Any]]:
    """Yield a type's metadata, also from within a nullable type."""
    if isinstance(info, inspect.Metadata):
        yield info.extra or {}
        yield from extras(info.type)
    elif isinstance(info, inspect.UnionType):
        present = [option for option in info.types if not isinstance(option, inspect.NoneType)]
        if len(present) == 1:
            yield from extras(present[0])


@cache
def info_of(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def refusal(error: Exception, body: Any, kind: type) -> RequestFailed:
    """Explain why msgspec did not convert the body to `kind`."""
    nodes = [BodyNode(body, kind, "")]
    while (inner := _find_refused(nodes[-1])) is not None:
        nodes.append(inner)
    try:
        _explain(nodes)
    except RequestFailed as failed:
        return failed
    path = nodes[-1].path or None
    return bad_request(f"the body is not as expected: {error}", path, "invalid_value")


def _find_refused(node: BodyNode) -> BodyNode | None:
    """Return the first value within the node that msgspec refuses."""
    for kind in _options(node.kind):
        match node.value, get_origin(kind) or kind:
            case dict(value), container if container is dict:
                inner = _find_entry(node, value, get_args(kind)[1])
            case dict(value), type() if is_tagged(value, kind):
                inner = _find_field(node, value, kind)
            case list(value), container if container in (list, tuple):
                inner = _find_item(node, value, get_args(kind)[0])
            case _:
                inner = None
        if inner is not None:
            return inner
    return None


def _find_entry(node: BodyNode, value: dict[str, Any], kind: Any) -> BodyNode | None:
    refused = (key for key, item in value.items() if not _fits(item, kind))
    key = next(refused, None)
    return None if key is None else node.inner(key, value[key], kind)


def _find_field(
    node: BodyNode, value: dict[str, Any], kind: type[msgspec.Struct]
) -> BodyNode | None:
    """Return the first field in the body's order, or else the first one that is missing."""
    fields = {field.encode_name: field for field in structs.fields(kind)}
    for name, item in value.items():
        if name in fields and not _fits(item, fields[name].type):
            return node.inner(name, item, fields[name].type)
    for name, field in fields.items():
        if field.required and name not in value:
            return node.inner(name, None, field.type, is_missing=True)
    return None


def _find_item(node: BodyNode, items: list[Any], kind: Any) -> BodyNode | None:
    """Search by halves: msgspec reads a million items in milliseconds."""
    several = GenericAlias(list, (kind,))
    if _fits(items, several):
        return None
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(items[low:middle], several):
            low = middle
        else:
            high = middle
    return node.inner(low, items[low], kind)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return False
    return True


def _options(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [option for member in get_args(kind) for option in _options(member)]
    return [kind]


def is_tagged(value: dict[str, Any], kind: type) -> bool:
    """Whether `kind` is a class of objects with this tag."""
    # `list[int]` has an origin and is no class, for which `issubclass` raises.
    if get_origin(kind) is not None or not issubclass(kind, msgspec.Struct):
        return False
    config = kind.__struct_config__
    return config.tag_field is None or value.get(config.tag_field) == config.tag


def _explain(nodes: Sequence[BodyNode]) -> None:
    """Raise `RequestFailed` (400) for the last node, in the words of the outermost type that has
    some."""
    last = nodes[-1]
    required = f"{last.path} is required", last.path, "missing_required_parameter"
    if last.is_missing and len(nodes) == 2:
        raise bad_request(*required)
    for node in nodes:
        for extra in extras(node.info):
            if "explains" in extra:
                extra["explains"](node.value, node.path)
    for extra in extras(last.info):
        if "says" in extra:
            _say(last, *extra["says"])
    if last.is_missing:
        raise bad_request(*required)
    around = nodes[-2] if len(nodes) > 1 else last
    if is_array_of_integers(around.info) and not is_integer(last.value):
        raise _wrong_type(around)
    _explain_by_type(last)


def is_array_of_integers(info: inspect.Type) -> bool:
    items = [getattr(option, "item_type", None) for option in members(info)]
    return len(items) == 1 and isinstance(items[0] and unwrapped(items[0]), inspect.IntType)


def _say(node: BodyNode, message: str, code: str, at: str) -> NoReturn:
    value, path = node.value, node.path + at
    tagged = next(
        (info for info in members(node.info) if isinstance(info, inspect.StructType)), None
    )
    tag = value.get(tagged.tag_field or "type") if tagged and isinstance(value, dict) else None
    raise bad_request(
        message.format(path=node.path, type=json_type(value), tag=tag, value=value), path, code
    )


def _explain_by_type(node: BodyNode) -> None:
    """Raise `RequestFailed` (400) if the value does not fit the node's type without its fields."""
    value, path = node.value, node.path
    fitting = [info for info in members(node.info) if _has_json_type(value, info)]
    if not fitting:
        raise _wrong_type(node)
    for info in fitting:
        _check_limits(value, info, path)
    literals = [info for info in fitting if isinstance(info, inspect.LiteralType)]
    if literals:
        values = [str(known) for info in literals for known in info.values]
        in_order = (extra["values"] for extra in extras(node.info) if "values" in extra)
        raise _unknown(value, next(in_order, values), path)
    classes = [info for info in fitting if isinstance(info, inspect.StructType)]
    field = classes[0].tag_field if classes else None
    if field is not None and not any(is_tagged(value, info.cls) for info in classes):
        raise _unknown(value.get(field), [str(info.tag) for info in classes], f"{path}.{field}")


def _unknown(value: Any, known: Sequence[str], path: str) -> RequestFailed:
    return bad_request(
        f"{path} must be one of {', '.join(known)}, not {value!r}", path, "invalid_value"
    )


def _has_json_type(value: Any, info: inspect.Type) -> bool:
    _, types = KINDS.get(type(info), ("", (object,)))
    return (
        type(value) in types
        or object in types
        or (isinstance(info, inspect.IntType) and is_integer(value))
    )


def _wrong_type(node: BodyNode) -> RequestFailed:
    path, given = node.path, json_type(node.value)
    if not path:
        return bad_request(f"a JSON object is needed, not {given}", None, "invalid_type")
    if is_array_of_integers(node.info):
        return bad_request(f"{path}: expected an array of integers", path, "invalid_type")
    options = members(node.info)
    expected = " or ".join(dict.fromkeys(KINDS[type(info)][0] for info in options))
    in_array = any(step.isdigit() for step in path.split("."))
    if len(options) > 1 or in_array or not isinstance(options[0], SCALARS):
        return bad_request(f"{path} must be {expected}, not {given}", path, "invalid_type")
    return bad_request(f"{path}: expected {expected}, got {given}", path, "invalid_type")


def _check_limits(value: Any, info: inspect.Type, path: str) -> None:
    match info:
        case inspect.IntType() | inspect.FloatType():
            if isinstance(info, inspect.FloatType) and not _fits_float(value):
                raise bad_request(
                    f"{path}: expected a number that fits 64 bits", path, "invalid_type"
                )
            low = info.ge if info.gt is None else info.gt
            high = inf if info.le is None else info.le
            between(path, value, -inf if low is None else low, high, open_low=info.gt is not None)
        case inspect.StrType(min_length=minimum, max_length=limit):
            if limit is not None and len(value) > limit:
                raise bad_request(
                    f"{path} may have {limit} characters, not {len(value)}", path, "invalid_value"
                )
            if minimum and not value:
                raise bad_request(f"{path} is empty", path, "invalid_value")
        case (
            inspect.ListType(max_length=limit)
            | inspect.VarTupleType(max_length=limit)
            | inspect.DictType(max_length=limit)
        ):
            if limit is not None:
                at_most(path, value, limit)
            if info.min_length and not value:
                raise bad_request(f"{path} is empty; send at least one", path, "invalid_value")


def _fits_float(value: float) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True
