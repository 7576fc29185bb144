"""Bounds on a body's values: a megabyte of `[],` is 350,000 objects, whose decoding holds the GIL
for a second."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from trouper.protocol.problems import bad_request

# Arrays and objects of a body: twice those of 10,000 messages of ten parts.
MAX_CONTAINERS = 200_000
MAX_VALUES = 1_200_000  # Values of a body. An array of tokens may have 2^20.

# Bytes of an array or object, and of a value or name: twice the worst measured (`{"": {}}`, strings
# of one emoji), as parsers copy values.
CONTAINER_BYTES, VALUE_BYTES = 192, 128
SHORT = 2**14
SHORT_FACTOR = 64  # Bytes of memory per byte of a short body, at most; `{"":{}},` takes as much.
LONG = 2**17  # Bytes of a body beyond which strings are parsed instead of only counted.

# A four-byte character: every character of the string then takes four bytes.
WIDE = re.compile(rb"[\xf0-\xff]|\\u[dD][89abAB]")
OPENS, PARTS, QUOTE = b"[{", b",:", ord('"')
PIECE = 2**20  # Bytes looked at without a pause: no stream waits longer for the GIL.
ESCAPE_BYTES = 6


def check_complexity(body: bytes) -> None:
    """Raises `RequestFailed` (400). Parses strings only if a count of all characters exceeds a
    bound."""
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
    """Return the memory of a JSON body: bytes, values, and texts twice (parsed, and as a
    prompt)."""
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
    # An escape may lie on both sides of a boundary.
    is_wide = any(
        WIDE.search(body, start, start + PIECE + ESCAPE_BYTES)
        for start in range(0, len(body), PIECE)
    )
    return 4 if is_wide else 2


def _count(body: bytes, signs: bytes) -> int:
    return sum(piece.count(sign) for piece in _pieces(body) for sign in signs)


def _pieces(body: bytes) -> Iterator[bytes]:
    """Cut a body, never inside an escape."""
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + PIECE + 1]
        yield piece
        start += len(piece)


def outside_strings(body: bytes) -> bytes:
    outside, begins_inside = list[bytes](), False
    for piece in _pieces(body):
        plain = np.frombuffer(piece.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        quotes = plain == QUOTE
        inside = np.logical_xor.accumulate(quotes) ^ begins_inside
        outside.append(plain[~(inside | quotes)].tobytes())
        begins_inside ^= bool(np.count_nonzero(quotes) % 2)
    return b"".join(outside)
