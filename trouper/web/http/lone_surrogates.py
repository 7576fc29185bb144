"""Halves of surrogate pairs in JSON, which no decoder of UTF-8 text takes.

Clients in JavaScript cut a text by UTF-16 units, which may be in the middle of an emoji, and
`JSON.stringify` writes the half that remains as an escape. It stays in the conversation, whose
every later request would be refused.
"""

from __future__ import annotations

import re

NAME = "lone_surrogate"
"""What a half is called where it is named."""
REPLACEMENT = rb"\ufffd"
ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""An escape: a whole pair, half of one (the group), or another. All are matched, since a backslash
may itself be escaped."""


def with_replacements(body: bytes) -> bytes:
    """Return the JSON with U+FFFD in place of each half of a pair."""
    return ESCAPE.sub(lambda escape: REPLACEMENT if escape[1] else escape[0], body)
