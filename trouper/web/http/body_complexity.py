"""Bounds on the number of values in a body: a megabyte of `[],` is 350,000 objects, and decoding
them holds the GIL for a second."""

from __future__ import annotations

import re

import numpy as np

from trouper.protocol.problems import bad_request

MAX_CONTAINERS = 200_000
"""Upper bound of the arrays and objects of a body: twice those of 10,000 messages of ten parts
each."""
MAX_VALUES = 1_200_000
"""Upper bound of the values of a body. An array of tokens may have 2^20."""
CONTAINER_BYTES, VALUE_BYTES = 192, 128
"""Memory of an array or object, and of each value and name: twice the worst measured (`{"": {}}`,
strings of one emoji), since parsers copy values."""
SHORT = 2**14
SHORT_FACTOR = 64
"""Upper bound of the memory of a byte of a short body, reached by `{"":{}},`."""
LONG = 2**17
"""Bytes of a body beyond which strings are parsed, not just counted."""
WIDE = re.compile(rb"[\xf0-\xff]|\\u[dD][89abAB]")
"""A character of four bytes: each character of the same string then takes four."""
OPENS, PARTS, QUOTE = b"[{", b",:", ord('"')


def check_complexity(body: bytes) -> None:
    """Check the number of values. Raises `RequestFailed` (400). Strings are only parsed if a count
    of all characters exceeds a bound."""
    if len(body) <= MAX_CONTAINERS:
        return
    if _count(body, OPENS) > MAX_CONTAINERS or _count(body, PARTS) > MAX_VALUES:
        outside = outside_strings(body)
        for signs, limit, called in (
            (OPENS, MAX_CONTAINERS, "arrays and objects"),
            (PARTS, MAX_VALUES, "values"),
        ):
            if (found := _count(outside, signs)) > limit:
                raise bad_request(
                    f"the body holds {found} {called}; there may be {limit}",
                    None,
                    "body_too_complex",
                )


def parsed_bytes(body: bytes) -> int:
    """Return the memory of a JSON body: bytes, values, and texts, once as parsed and once as a
    prompt."""
    if len(body) <= SHORT:
        return SHORT_FACTOR * len(body)
    objects = _object_bytes(body)
    if len(body) > LONG and objects > len(body):  # In many texts commas are frequent.
        objects = _object_bytes(outside_strings(body))
    return objects + len(body) * (1 + 2 * _character_bytes(body))


def _object_bytes(body: bytes) -> int:
    return CONTAINER_BYTES * _count(body, OPENS) + VALUE_BYTES * _count(body, PARTS)


def _character_bytes(body: bytes) -> int:
    if body.isascii() and b"\\u" not in body:
        return 1
    return 4 if WIDE.search(body) else 2


def _count(body: bytes, signs: bytes) -> int:
    return sum(body.count(sign) for sign in signs)


def outside_strings(body: bytes) -> bytes:
    """Return the bytes of JSON outside of strings, without quotes."""
    plain = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes = plain == QUOTE
    inside = np.logical_xor.accumulate(quotes)
    return bytes(plain[~(inside | quotes)].tobytes())
