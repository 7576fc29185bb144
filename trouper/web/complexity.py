"""How much a body may hold. A megabyte of text is one string, but a megabyte of `[],` is 350,000 objects of Python: decoding them, and
each search for garbage among them, takes a second in which nothing else runs in this process, on any thread."""

from __future__ import annotations

import numpy as np

from trouper.protocol.errors import bad_request

MOST_CONTAINERS = 200_000
"""Arrays and objects of a body: 10,000 messages of ten parts each, twice."""
MOST_VALUES = 1_200_000
"""An array of tokens may have a million."""
OPENS, PARTS, QUOTE = b"[{", b",:", ord('"')


def check_complexity(body: bytes) -> None:
    """Raises `RequestFailed` (400). What looks harmless is only counted."""
    if len(body) <= MOST_CONTAINERS:
        return
    if _count(body, OPENS) > MOST_CONTAINERS or _count(body, PARTS) > MOST_VALUES:
        outside = outside_strings(body)
        for signs, most, called in ((OPENS, MOST_CONTAINERS, "arrays and objects"), (PARTS, MOST_VALUES, "values")):
            if (found := _count(outside, signs)) > most:
                raise bad_request(f"the body holds {found} {called}; there may be {most}", None, "body_too_complex")


def _count(body: bytes, signs: bytes) -> int:
    return sum(body.count(sign) for sign in signs)


def outside_strings(body: bytes) -> bytes:
    """What of JSON does not stand in strings, quotes left out."""
    plain = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes = plain == QUOTE
    inside = np.logical_xor.accumulate(quotes)
    return bytes(plain[~(inside | quotes)].tobytes())
