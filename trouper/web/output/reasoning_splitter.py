"""What a model says, taken apart: what it thinks, what it answers, which tools it calls. Pure, fed piece by piece.

Streams and whole answers go through the same splitter, so they agree. Text that may be the beginning of a
marker is held back until it is known; what stays open at the end is still given to whom it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

Kind = Literal["content", "reasoning", "call"]


@attrs.frozen
class TextSegment:
    """More of one kind. A call comes whole, without its markers."""

    kind: Kind
    text: str


@attrs.frozen
class Markers:
    """Where thinking and calls begin and end; None where the model has no such thing. A call without an end marker ends
    with the answer."""

    thinking: tuple[str, str] | None = None
    call: tuple[str, str] | None = None


class ReasoningSplitter:
    """One answer. `thinks`: the prompt has already opened the thinking."""

    def __init__(self, markers: Markers, *, thinks: bool = False) -> None:
        self._markers = markers
        self._state: Kind = "reasoning" if thinks else "content"
        self._held = ""
        self._begun = False
        """Something of the present kind was said: blanks around markers are nobody's text."""

    @property
    def kind(self) -> Kind:
        """What is being said."""
        return self._state

    def push(self, text: str) -> list[TextSegment]:
        self._held += text
        return list(self._parts(last=False))

    def end(self) -> list[TextSegment]:
        """What was held back."""
        return list(self._parts(last=True))

    def _parts(self, *, last: bool) -> Iterator[TextSegment]:
        while True:
            marker, following = self._awaited()
            start, found = _first(self._held, marker)
            if found is None:
                keep = 0 if last else _beginning(self._held, marker)
                if self._state != "call" or last:
                    yield from self._say(len(self._held) - keep)
                return
            yield from self._say(start)
            self._held = self._held[len(found) :]
            self._state, self._begun = following[found], False

    def _awaited(self) -> tuple[tuple[str, ...], dict[str, Kind]]:
        """The markers that would end the present kind, and what begins after each."""
        thinking, call = self._markers.thinking, self._markers.call
        following: dict[str, Kind] = {}
        if self._state == "reasoning" and thinking:
            following[thinking[1]] = "content"
        if self._state == "content" and thinking:
            following[thinking[0]] = "reasoning"
        if self._state == "content" and call:
            following[call[0]] = "call"
        if self._state == "call" and call and call[1]:
            following[call[1]] = "content"
        return tuple(following), following

    def _say(self, length: int) -> Iterator[TextSegment]:
        text, self._held = self._held[:length], self._held[length:]
        if not self._begun and self._state != "content":
            text = text.lstrip("\n")
        if text or self._state == "call":
            self._begun = True
            yield TextSegment(self._state, text)


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    found = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    return min(found) if found else (0, None)


def _beginning(text: str, markers: tuple[str, ...]) -> int:
    """How long a tail of `text` could be the beginning of a marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(marker.startswith(text[-n:]) for marker in markers)), 0)
