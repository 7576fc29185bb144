"""Cleaning of typed or piped input, so that a request can carry it: text in UTF-8, values in
JSON."""

from __future__ import annotations

import json
import re
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates, as which Python keeps bytes that it could not decode (PEP 383)."""


def text_of(typed: str) -> str:
    """Return the text with U+FFFD for bytes that are no UTF-8, as where a file is decoded with
    replacement."""
    return SURROGATE.sub("\ufffd", typed)


def can_be_sent(value: Any) -> bool:
    """Whether a request can carry the value. JSON has neither NaN nor Infinity, though `json.loads`
    takes both, and 1e999 too; UTF-8 has no lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
