"""What an answer's text must be, computed in the most naive way: all bytes so far, every stop,
every place."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def shown_so_far(data: bytes) -> str:
    """Whole characters only: a torn one at the end may still be completed."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def stopped(text: str, stops: Sequence[str], begin: int = 0) -> tuple[str, str] | None:
    """(text before it, stop) for the stop that completes first, the longest of those that complete
    together."""
    for end in range(begin + 1, len(text) + 1):
        complete = [stop for stop in stops if text.endswith(stop, 0, end)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return None


def reference(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[str, str | None, int]:
    """(text, the stop that ended it, how many pieces it took)."""
    data = b""
    if stops:
        begin = 0
        for used, piece in enumerate(pieces, 1):
            data += piece
            text = shown_so_far(data)
            if (hit := stopped(text, stops, begin)) is not None:
                return (*hit, used)
            begin = len(text)
    text = b"".join(pieces).decode("utf-8", "replace")
    hit = stopped(text, stops) if stops else None
    return (*hit, len(pieces)) if hit is not None else (text, None, len(pieces))
