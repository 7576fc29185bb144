"""Decodes tokens' bytes to whole characters without stop strings. Pure."""

from __future__ import annotations

import codecs


class TextStream:
    """The growing text of one answer.

    The stop string that *completes* first wins, the longer of two, however tokens cut the text
    (F4). A possible beginning is withheld.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._held = ""
        self.stop: str | None = None

    def push(self, data: bytes, *, may_stop: bool = True) -> str:
        """Append bytes, and return text that is safe to send; none after a stop. Without
        `may_stop`, a completed stop string is text."""
        # The decoder is written in Python, and asked only about bytes that may be a part of a
        # character.
        new = (
            data.decode()
            if data.isascii() and not self._decoder.buffer
            else self._decoder.decode(data)
        )
        return self._show(new, may_stop=may_stop) if self._stops else new

    def flush(self) -> str:
        """End the text. A torn character becomes U+FFFD; withheld text is returned unless a stop
        completes."""
        new = self._decoder.decode(b"", final=True)
        text = self._show(new, may_stop=True) if self._stops else new
        rest, self._held = self._held, ""
        return text + rest

    def _show(self, new: str, *, may_stop: bool) -> str:
        text = self._held + new
        found = first_stop(text, self._stops, len(self._held)) if may_stop else None
        if found is not None:
            start, self.stop = found
            self._held = ""
            return text[:start]
        keep = len(text) - held_length(text, self._stops)
        self._held = text[keep:]
        return text[:keep]


def first_stop(text: str, stops: tuple[str, ...], seen: int = 0) -> tuple[int, str] | None:
    """The (start, stop) of the stop string that completes first, beyond `seen` characters."""
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        if (start := text.find(stop, max(0, seen + 1 - len(stop)))) >= 0
    ]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def held_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest tail that may begin a stop string or another marker."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    return next(
        (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0
    )
