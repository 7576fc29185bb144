"""What a person types or pipes in, as a request can carry it: text in UTF-8, values in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")
"""How Python keeps a byte that it could not decode (PEP 383)."""


def text_of(typed: str) -> str:
    """What was not UTF-8 is U+FFFD, as where a file is decoded with replacement."""
    return SURROGATE.sub("\ufffd", typed)


def can_be_sent(value: Any) -> bool:
    """JSON has neither NaN nor Infinity, though `json.loads` takes both, and 1e999 too; UTF-8 has no lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
