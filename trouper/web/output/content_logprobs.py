"""Log-probabilities of the tokens whose text is content, in order."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterable, Sequence

from trouper.protocol.model import Tokenizer
from trouper.protocol.replies import TokenLogprobs

UTF8 = getincrementaldecoder("utf-8")
Span = tuple[int, int]
"""Extent in an answer's text, in characters, before any parser reads it."""


class ContentLogprobs:
    """Holds each token until its text is shown, or known to be none."""

    # No text: a stop string, a marker, reasoning, a call, dropped blanks. How tokens come in deltas
    # changes nothing.

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = UTF8("replace")
        self._end = self._shown_end = 0
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._shown: list[TokenLogprobs] = []

    def add(self, logprobs: Iterable[TokenLogprobs]) -> None:
        for at in logprobs:
            start = self._end
            self._end += len(self._decoder.decode(self._tokenizer.token_bytes(at.token)))
            unfinished = bool(self._decoder.getstate()[0])
            self._waiting.append((start, self._end + unfinished, at))

    def show(self, spans: Sequence[Span], decided: int) -> None:
        """Show the tokens that overlap `spans`, and forget those before `decided`."""
        waiting = self._waiting
        for first, last in spans:
            while waiting and waiting[0][0] < last:
                start, end, at = waiting.popleft()
                if end > max(start, first):
                    self._shown.append(at)
        while waiting and waiting[0][1] <= decided:
            waiting.popleft()

    def show_text(self, characters: int) -> None:
        """Show so many further characters of an answer that is content alone; tokens without text
        are shown with them."""
        self._shown_end += characters
        waiting = self._waiting
        while waiting and (waiting[0][0] < self._shown_end or waiting[0][1] <= self._shown_end):
            self._shown.append(waiting.popleft()[2])

    def take(self) -> list[TokenLogprobs]:
        shown, self._shown = self._shown, []
        return shown
