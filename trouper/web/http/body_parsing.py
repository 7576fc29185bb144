"""Parsing of a request's body to typed fields: strict, and every refusal names its parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sized
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

import attrs
import cattrs
import msgspec
from cattrs.preconf.msgspec import make_converter

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.http.body_complexity import check_complexity
from trouper.web.http.request_schema import Json, Refused, among

T = TypeVar("T")


def _strict() -> cattrs.Converter:
    """Build the converter. cattrs coerces by default ("false" -> True, 3.9 -> 3); here a value has its type or is
    refused."""
    converter = make_converter(forbid_extra_keys=True, detailed_validation=True)

    def accept(kind: type, *types: type) -> None:
        def hook(value: Any, _: Any) -> Any:
            if type(value) not in types and not (kind is int and is_integer(value)):
                raise TypeError(f"expected {NAMES[kind]}, got {json_type(value)}")
            try:
                return kind(value)
            except OverflowError:
                raise ValueError("expected a number that fits 64 bits") from None

        converter.register_structure_hook(kind, hook)

    def array_of_integers(value: Any, _: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(map(is_integer, value)):
            raise TypeError("expected an array of integers")
        return tuple(map(int, value))

    def an_object(value: Any, _: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {json_type(value)}")
        return value

    converter.register_structure_hook_func(lambda kind: kind == tuple[int, ...], array_of_integers)
    converter.register_structure_hook_func(lambda kind: kind == dict[str, Any], an_object)
    accept(str, str)
    accept(bool, bool)
    accept(int, int)
    accept(float, int, float)
    return converter


NAMES: Mapping[type, str] = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
CONVERTER = _strict()


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer. Neither JSON nor JSON Schema distinguishes 5 from 5.0."""
    return type(value) is int or (type(value) is float and value.is_integer())


def json_type(value: object) -> str:
    """Return the name of a JSON value's type."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return NAMES.get(type(value), type(value).__name__)


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `RequestFailed` (400)."""
    check_complexity(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {json_type(value)}", None, "invalid_json")
    return value


def structure(body: Mapping[str, Any], kind: type[T], refused: Refused, *, within: str = "") -> T:
    """Build `kind` from `body`, within the limits in its fields' metadata. `refused`: parameters of the API that are
    not supported, and the values of them that request nothing; any other value would be ignored, so it is refused by
    name (D13). Null means absent. `within` is the path of an object inside the body."""
    known = {field.name for field in attrs.fields(kind)}  # type: ignore[arg-type]
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name in refused:
            if value is not None and not among(value, refused[name]):
                path = within + name
                raise bad_request(f"{path!r} is not supported here; leave it out", path, "unsupported_parameter")
        elif name not in known:
            raise bad_request(f"unknown parameter {within + name!r}", within + name, "unknown_parameter")
        elif value is not None:
            fields[name] = value
    try:
        parsed = CONVERTER.structure(fields, kind)
    except cattrs.BaseValidationError as error:
        raise _fault(error, within) from None
    for name in fields:
        _within_limits(within + name, getattr(parsed, name), _field_schema(kind, name))
    return parsed


def _field_schema(kind: type, name: str) -> Json:
    """Return the schema in a field's metadata, if the field has one type; `Any` fields are checked by hand."""
    field: attrs.Attribute[Any] = getattr(attrs.fields(kind), name)
    return {} if field.type in (Any, "Any") else field.metadata.get("schema", {})


def _within_limits(name: str, value: Any, field_schema: Json) -> None:
    """Raise `RequestFailed` (400) if the value is outside of what the schema allows."""
    if isinstance(value, tuple):
        if len(value) > field_schema.get("maxItems", inf):
            message = f"{name} may have {field_schema['maxItems']} entries, not {len(value)}"
            raise bad_request(message, name, "invalid_value")
        for index, item in enumerate(value):
            _within_limits(f"{name}.{index}", item, field_schema.get("items", {}))
    elif isinstance(value, str):
        if len(value) > field_schema.get("maxLength", inf):
            message = f"{name} may have {field_schema['maxLength']} characters, not {len(value)}"
            raise bad_request(message, name, "invalid_value")
        if value not in field_schema.get("enum", (value,)):
            known = ", ".join(option for option in field_schema["enum"] if option is not None)
            raise bad_request(f"{name} must be one of {known}, not {value!r}", name, "invalid_value")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        above = field_schema.get("exclusiveMinimum")
        low = field_schema.get("minimum", -inf) if above is None else above
        between(name, value, low, field_schema.get("maximum", inf), open_low=above is not None)


def _fault(error: BaseException, within: str) -> RequestFailed:
    """Convert the first fault to a refusal, with its path as the parameter."""
    message, _, location = cattrs.transform_error(error)[0].partition(" @ ")
    param = location.removeprefix("$.").replace("[", ".").replace("]", "").replace("'", "") if location != "$" else None
    param = within + param if param else param
    leaf = error
    while isinstance(leaf, BaseExceptionGroup) and leaf.exceptions:
        leaf = leaf.exceptions[0]
    if isinstance(leaf, TypeError | ValueError) and str(leaf).startswith("expected"):
        message = str(leaf)
    if message.startswith("required field missing"):
        return bad_request(f"{param} is required", param, "missing_required_parameter")
    return bad_request(f"{param}: {message}" if param else message, param, "invalid_type")


def flag(value: Any, name: str) -> bool:
    """Return a boolean of an `Any` field; absent is false. Raises `RequestFailed` (400)."""
    if value is not None and type(value) is not bool:
        raise bad_request(f"{name} must be a boolean, not {json_type(value)}", name, "invalid_type")
    return bool(value)


def between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise `RequestFailed` (400) unless low <= value <= high (low < value if `open_low`)."""
    if not (low < value if open_low else low <= value) or value > high:
        relation = "more than" if open_low else "at least"
        # A huge integer is no float, and its digits would make the message unreadable.
        given = f"{value:g}" if abs(value) < 1e300 else "that"
        raise bad_request(f"{name} must be {relation} {low:g} and at most {high:g}, not {given}", name, "invalid_value")


def only(value: Mapping[str, Any], names: Collection[str], path: str) -> None:
    """Raise `RequestFailed` (400) for a name inside of an object that is never read."""
    for name in value:
        if name not in names:
            raise bad_request(f"unknown parameter '{path}.{name}'", f"{path}.{name}", "unknown_parameter")


def at_most(name: str, values: Sized, limit: int) -> None:
    """Raise `RequestFailed` (400) if there are more than `limit` values."""
    if len(values) > limit:
        raise bad_request(f"{name} may have {limit} entries, not {len(values)}", name, "invalid_value")


def combination(message: str, param: str) -> RequestFailed:
    """Return the refusal of parameters that are each valid but contradict each other."""
    return bad_request(message, param, "invalid_combination")


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Rename parameters in refusals of the runtime. `names` maps the runtime's names to the dialect's."""
    try:
        yield
    except RequestFailed as failed:
        problem = failed.problem
        raise RequestFailed(attrs.evolve(problem, param=names.get(problem.param or "", problem.param))) from None


def too_large(limit: int) -> Problem:
    return Problem(
        413,
        f"the body is larger than {limit} bytes (--max-body-bytes)",
        "invalid_request_error",
        None,
        "body_too_large",
    )
