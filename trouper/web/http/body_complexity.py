"""Bounds on the number of values in a body. A megabyte of text is one string, but a megabyte of `[],` is 350,000 Python objects: decoding
them, and each garbage collection over them, holds the GIL for a second."""

from __future__ import annotations

import numpy as np

from trouper.protocol.problems import bad_request

MAX_CONTAINERS = 200_000
"""Upper bound of the arrays and objects of a body: twice what 10,000 messages of ten parts each have."""
MAX_VALUES = 1_200_000
"""Upper bound of the values of a body. An array of tokens may have 2^20."""
OPENS, PARTS, QUOTE = b"[{", b",:", ord('"')


def check_complexity(body: bytes) -> None:
    """Check the number of values. Strings are only parsed if a plain count of the characters exceeds a bound. Raises
    `RequestFailed` (400)."""
    if len(body) <= MAX_CONTAINERS:
        return
    if _count(body, OPENS) > MAX_CONTAINERS or _count(body, PARTS) > MAX_VALUES:
        outside = outside_strings(body)
        for signs, limit, called in ((OPENS, MAX_CONTAINERS, "arrays and objects"), (PARTS, MAX_VALUES, "values")):
            if (found := _count(outside, signs)) > limit:
                raise bad_request(f"the body holds {found} {called}; there may be {limit}", None, "body_too_complex")


def _count(body: bytes, signs: bytes) -> int:
    return sum(body.count(sign) for sign in signs)


def outside_strings(body: bytes) -> bytes:
    """Return the bytes of JSON outside of strings, without quotes."""
    plain = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes = plain == QUOTE
    inside = np.logical_xor.accumulate(quotes)
    return bytes(plain[~(inside | quotes)].tobytes())
