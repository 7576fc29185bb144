"""msgspec's refusals in the server's words, with the parameter at fault. Types may explain faults
themselves (`says`, `explains`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf
from typing import Any, NoReturn, get_args

import attrs
from msgspec import Meta, inspect

from trouper.protocol.problems import RequestFailed, bad_request
from trouper.web.http.body_parsing import at_most, between, is_integer, json_type

STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
MISSING = re.compile(r"Object missing required field `(\w+)`")
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
    info: inspect.Type
    path: str


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
    """Return a union's types without null, or the type alone."""
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
    message, _, where = str(error).rpartition("`$")
    steps = [name or index for name, index in STEP.findall(where)] if message else []
    if missing := MISSING.match(str(error)):
        steps.append(missing[1])
    nodes = [BodyNode(body, info_of(kind), "")]
    for step in steps:
        if (inner := _inside(nodes[-1], step)) is None:
            break  # The step is the tag of the object.
        nodes.append(inner)
    try:
        _explain(nodes, required=missing is not None and len(steps) == 1)
    except RequestFailed as failed:
        return failed
    return bad_request(
        f"the body is not as expected: {error}", nodes[-1].path or None, "invalid_value"
    )


def _inside(node: BodyNode, step: str) -> BodyNode | None:
    value, within = node.value, node.path and f"{node.path}."
    for info in members(node.info):
        match info:
            case inspect.StructType() if isinstance(value, dict) and is_tagged(value, info):
                for field in info.fields:
                    if field.encode_name == step:
                        return BodyNode(value.get(step), field.type, within + step)
            case inspect.ListType() | inspect.VarTupleType() if isinstance(value, list):
                return BodyNode(value[int(step)], info.item_type, within + step)
            case inspect.DictType() if isinstance(value, dict):
                inner = (
                    BodyNode(item, info.value_type, within + key) for key, item in value.items()
                )
                return next((node for node in inner if _fault_of(node) is not None), None)
    return None


def is_tagged(value: dict[str, Any], info: inspect.StructType) -> bool:
    return info.tag_field is None or value.get(info.tag_field) == info.tag


def _explain(nodes: list[BodyNode], *, required: bool) -> None:
    last = nodes[-1]
    if required and last.path:
        raise bad_request(f"{last.path} is required", last.path, "missing_required_parameter")
    for node in nodes:
        for extra in extras(node.info):
            if "explains" in extra:
                extra["explains"](node.value, node.path)
    for extra in extras(last.info):
        if "says" in extra:
            _say(last, *extra["says"])
    if (failed := _fault_of(last)) is not None:
        array = nodes[-2] if len(nodes) > 1 and is_array_of_integers(nodes[-2].info) else None
        raise failed if array is None or is_integer(last.value) else _wrong_type(array)


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


def _fault_of(node: BodyNode) -> RequestFailed | None:
    value, path = node.value, node.path
    options = members(node.info)
    fitting = [info for info in options if _has_json_type(value, info)]
    if not fitting:
        return _wrong_type(node)
    try:
        for info in fitting:
            _check_limits(value, info, path)
    except RequestFailed as failed:
        return failed
    literals = [
        str(known)
        for info in fitting
        if isinstance(info, inspect.LiteralType)
        for known in info.values
    ]
    if literals and value not in literals:
        known = next(
            (extra["values"] for extra in extras(node.info) if "values" in extra), literals
        )
        return _unknown(value, known, path)
    classes = [info for info in fitting if isinstance(info, inspect.StructType)]
    field = classes[0].tag_field if classes else None
    if field is not None and not any(is_tagged(value, info) for info in classes):
        return _unknown(value.get(field), [str(info.tag) for info in classes], f"{path}.{field}")
    return None


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
        case inspect.StrType(max_length=limit):
            if limit is not None and len(value) > limit:
                raise bad_request(
                    f"{path} may have {limit} characters, not {len(value)}", path, "invalid_value"
                )
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
