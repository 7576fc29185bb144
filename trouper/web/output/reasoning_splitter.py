"""Splitting of a model's output into content, reasoning and tool calls, by markers. Pure, fed with one delta at a time.

Streams and complete answers go through the same splitter, so they agree. Text that may be the beginning of a marker is
held back until it is known; a segment that is still open at the end is emitted with its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

from trouper.actors.scheduling.detokenizer import held_length

Kind = Literal["content", "reasoning", "call"]


@attrs.frozen
class TextSegment:
    """More text of one kind. A call is emitted complete and without its markers."""

    kind: Kind
    text: str


@attrs.frozen
class Markers:
    """The markers around reasoning and around calls; None where the model has none. A call without an end marker ends
    with the answer."""

    thinking: tuple[str, str] | None = None
    call: tuple[str, str] | None = None


class ReasoningSplitter:
    """Splits one answer. `thinks`: the prompt has already opened the reasoning."""

    def __init__(self, markers: Markers, *, thinks: bool = False) -> None:
        self._markers = markers
        self._state: Kind = "reasoning" if thinks else "content"
        self._held = ""
        self._begun = False
        """Whether text of the current kind was emitted: whitespace around markers belongs to no text."""

    @property
    def kind(self) -> Kind:
        """The kind of the text that is being generated."""
        return self._state

    def push(self, text: str) -> list[TextSegment]:
        self._held += text
        return list(self._parts(last=False))

    def end(self) -> list[TextSegment]:
        """Return the text that was held back."""
        return list(self._parts(last=True))

    def _parts(self, *, last: bool) -> Iterator[TextSegment]:
        while True:
            marker, following = self._awaited()
            start, found = _first(self._held, marker)
            if found is None:
                keep = 0 if last else held_length(self._held, marker)
                if self._state != "call" or last:
                    yield from self._say(len(self._held) - keep)
                return
            yield from self._say(start)
            self._held = self._held[len(found) :]
            self._state, self._begun = following[found], False

    def _awaited(self) -> tuple[tuple[str, ...], dict[str, Kind]]:
        """Return the markers that would end the current kind, and the kind that begins after each."""
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
