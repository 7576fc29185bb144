"""Parses bodies as JSON, with refusals for every dialect."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import attrs
import msgspec

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.protocol.request_bounds import describe_range
from trouper.web.http.body_complexity import check_complexity
from trouper.web.http.leniency import ReadPast

NAME = "lone_surrogate"
REPLACEMENT = rb"\ufffd"
ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|"
    rb"(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""A surrogate pair, half of a pair (the group), or another escape."""


def with_replacements(body: bytes) -> bytes:
    """Replace lone surrogates with U+FFFD: JavaScript clients cut texts within an emoji."""
    if b"\\u" not in body:
        return body
    return ESCAPE.sub(lambda escape: REPLACEMENT if escape[1] else escape[0], body)


NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
}


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer; 5.0 is, as in JSON Schema."""
    return type(value) is int or (type(value) is float and value.is_integer())


def are_integers(values: list[Any]) -> bool:
    """As `is_integer`, of all."""
    return {*map(type, values)} == {int} or all(map(is_integer, values))


def json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    return NAMES.get(type(value), type(value).__name__)


def parse_json(body: bytes, past: ReadPast | None = None) -> dict[str, Any]:
    """Parse a JSON object, with or without a byte order mark. Raises `RequestFailed` (400). Lone
    surrogates become U+FFFD and are named in `past`, or refused if `past` is None."""
    body = body.removeprefix(BOM_UTF8)
    if not body.strip():
        raise bad_request(
            "the body is empty; send a JSON object, at least {}", None, "invalid_json"
        )
    check_complexity(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        value = _decoded_with_replacements(body, error, past)
    if not isinstance(value, dict):
        raise bad_request(
            f"the body must be a JSON object, not {json_type(value)}", None, "invalid_json"
        )
    return value


def checked_text(text: str, path: str) -> str:
    """Raises `RequestFailed` (400) for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{path} holds a lone surrogate", path, "invalid_text") from None
    return text


def decoded_text(text: str) -> Any:
    """Decode a model's or client's JSON; None if the text is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _decoded_with_replacements(body: bytes, error: Exception, past: ReadPast | None) -> Any:
    mended = with_replacements(body)
    if mended == body:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    try:
        value = msgspec.json.decode(mended)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as other:
        raise bad_request(f"the body is not valid JSON: {other}", None, "invalid_json") from None
    if past is None:
        message = (
            "the body is not valid JSON: a text in it holds half of a surrogate pair, as one that "
            "was cut within a character"
        )
        raise bad_request(message, None, "invalid_json") from None
    past.skip(NAME)
    return value


def between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise `RequestFailed` (400) unless low <= value <= high (low < value if `open_low`)."""
    if not (low < value if open_low else low <= value) or value > high:
        lower = "more than" if open_low else "at least"
        limits = describe_range(value, low, high, lower=lower, show=_digits)
        raise bad_request(f"{name} must be {limits}, not {_digits(value)}", name, "invalid_value")


def _digits(number: float) -> str:
    if isinstance(number, int) and abs(number) < 10**12:
        return str(number)
    # A huge integer is no float, and its digits would make the message unreadable.
    return f"{number:g}" if abs(number) < 1e300 else "that"


def at_most(name: str, values: Sized, limit: int) -> None:
    if len(values) > limit:
        raise bad_request(
            f"{name} may have {limit} entries, not {len(values)}", name, "invalid_value"
        )


def combination(message: str, param: str) -> RequestFailed:
    return bad_request(message, param, "invalid_combination")


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the runtime's parameters in refusals to the dialect's."""
    try:
        yield
    except RequestFailed as failed:
        problem = failed.problem
        raise RequestFailed(
            attrs.evolve(problem, param=names.get(problem.param or "", problem.param))
        ) from None


def too_large(limit: int) -> Problem:
    message = f"the body is larger than {limit} bytes (--max-body-bytes)"
    return Problem(413, message, code="body_too_large")
