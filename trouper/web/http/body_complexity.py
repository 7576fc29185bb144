"""Bounds on the number of values in a body. A megabyte of text is one string, but a megabyte of
`[],` is 350,000 Python objects: decoding them, and each garbage collection over them, holds the GIL
for a second."""

from __future__ import annotations

import re

import numpy as np

from trouper.protocol.problems import bad_request

MAX_CONTAINERS = 200_000
"""Upper bound of the arrays and objects of a body: twice what 10,000 messages of ten parts each
have."""
MAX_VALUES = 1_200_000
"""Upper bound of the values of a body. An array of tokens may have 2^20."""
CONTAINER_BYTES, VALUE_BYTES = 192, 128
"""Memory of an array or object, and of each value and name in it: twice what was measured of the
worst ones, `{"": {}}` and strings of one emoji, since the parsers of requests make others of
them."""
SHORT = 2**14
"""Bytes of a body whose values need not be counted."""
SHORT_FACTOR = 64
"""What a byte of such a body may take: that many are in `{"":{}},`, and little else is in the worst
body."""
LONG = 2**17
"""Bytes of a body beyond which strings are parsed to see what is in them and what is between."""
WIDE = re.compile(rb"[\xf0-\xff]|\\u[dD][89abAB]")
"""A character that takes four bytes, and makes all others of its string take four."""
OPENS, PARTS, QUOTE = b"[{", b",:", ord('"')


def check_complexity(body: bytes) -> None:
    """Check the number of values. Strings are only parsed if a plain count of the characters
    exceeds a bound. Raises `RequestFailed` (400)."""
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
    """Return the memory that a JSON body and what is made of it may take: the body, its values, and
    its texts once as parsed and once more as a prompt."""
    if len(body) <= SHORT:
        return SHORT_FACTOR * len(body)
    objects = _object_bytes(body)
    if len(body) > LONG and objects > len(body):  # In many texts commas are frequent.
        objects = _object_bytes(outside_strings(body))
    return objects + len(body) * (1 + 2 * _character_bytes(body))


def _object_bytes(body: bytes) -> int:
    return CONTAINER_BYTES * _count(body, OPENS) + VALUE_BYTES * _count(body, PARTS)


def _character_bytes(body: bytes) -> int:
    """Return the most bytes that a character of the body's strings takes: Python has as many for
    all of a string."""
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
