"""The text of an answer, read by coroutines character by character while tokens arrive.

No parser sees where the text was cut: streamed and complete answers parse alike.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import cache
from re import Pattern
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
END = ""
SPACE = " \t\r\n"


class TextSource:
    """Unread text, and text since the last `keep`, which `rewind` returns to. Each character is
    copied a bounded number of times."""

    def __init__(self) -> None:
        self._text, self._at, self._begin, self._kept = "", 0, 0, 0
        """The newest text, characters read, positions of `_text` and of the last `keep`."""
        self._earlier: list[str] = []
        self.pinned = False
        self.ended = False
        self.cut = False
        """Whether the answer was cut by length or abort: parsers then complete nothing."""
        self._goes_on: tuple[tuple[str, ...], int] = (), 0

    def feed(self, text: str) -> None:
        at, first = self._at, max(0, self._kept - self._begin)
        if first < at:
            self._earlier.append(self._text[first:at])
        self._text, self._begin, self._at = self._text[at:] + text, self._begin + at, 0

    def keep(self) -> None:
        """Forget the text read so far."""
        if not self.pinned:
            self._kept = self._begin + self._at
            if self._earlier:
                self._earlier.clear()

    @property
    def kept(self) -> str:
        return "".join(self._earlier) + self._text[max(0, self._kept - self._begin) : self._at]

    @property
    def position(self) -> int:
        """Characters read since the last `keep`."""
        return self._begin + self._at - self._kept

    @property
    def offset(self) -> int:
        """Characters read in all."""
        return self._begin + self._at

    @property
    def kept_offset(self) -> int:
        return self._kept

    def rewind(self, position: int) -> None:
        target, again = self._kept + position, [self._text]
        while target < self._begin:
            piece = self._earlier.pop()
            self._begin -= len(piece)
            # A long piece is not copied at each step back.
            if (before := target - self._begin) > 0:
                self._earlier.append(piece[:before])
                self._begin, piece = target, piece[before:]
            again.append(piece)
        if len(again) > 1:
            self._text = "".join(reversed(again))
        self._at = target - self._begin

    def next(self) -> Steps[str]:
        """Read one character; `END` at the end."""
        while self._at == len(self._text):
            if self.ended:
                return END
            yield
        self._at += 1
        return self._text[self._at - 1]

    def peek(self) -> Steps[str]:
        while self._at == len(self._text):
            if self.ended:
                return END
            yield
        return self._text[self._at]

    def run(self, stops: Pattern[str]) -> str:
        """Read available text up to the first match of `stops`."""
        found = stops.search(self._text, self._at)
        start, self._at = self._at, found.start() if found else len(self._text)
        return self._text[start : self._at]

    def take(self, pattern: Pattern[str]) -> str:
        """Read the match of `pattern` here, if any."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    @property
    def is_dry(self) -> bool:
        """Whether all available text is read, and more will come."""
        return self._at == len(self._text) and not self.ended

    def skip(self, characters: str = SPACE) -> Steps[str]:
        skipped, several = [], _several(characters)
        while True:
            skipped.append(self.take(several))
            if not self.is_dry:
                return "".join(skipped)
            yield

    def drop(self) -> Steps[None]:
        while (yield from self.next()) != END:
            self.keep()

    def matches(self, text: str) -> Steps[bool]:
        """Read `text` if next."""
        while not self._text.startswith(text, self._at):
            here = self._text[self._at : self._at + len(text)]
            if self.ended or len(here) == len(text) or not text.startswith(here):
                return False
            yield
        self._at += len(text)
        return True

    def first_of(self, texts: tuple[str, ...]) -> Steps[str]:
        """Read the first of `texts` that is next; "" if none is."""
        for text in texts:
            if text and (yield from self.matches(text)):
                return text
        return ""

    def ends_with(self, texts: tuple[str, ...]) -> Steps[bool]:
        """Whether only whitespace and `texts` remain. Reads nothing."""
        if self._goes_on[0] == texts and self._begin + self._at < self._goes_on[1]:
            return False
        position = self.position
        while True:
            yield from self.skip()
            if not (yield from self.first_of(texts)):
                break
        if (yield from self.next()) == END:
            self.rewind(position)
            return True
        self._goes_on = texts, self._begin + self._at
        self.rewind(position)
        return False

    def until(
        self, text: str, longest: int, stops: Pattern[str] | None = None
    ) -> Steps[str | None]:
        """Read up to and with `text`; return the text before. None, with nothing read, beyond
        `longest` characters or for a match of `stops`."""
        while True:
            last, come = self._at + longest, len(self._text)
            found = self._text.find(text, self._at, last + len(text))
            before = min(last, come - len(text) + 1) if found < 0 else found
            if stops is not None and stops.search(self._text, self._at, before):
                return None
            if found >= 0:
                start, self._at = self._at, found + len(text)
                return self._text[start:found]
            if self.ended or come >= last + len(text):
                return None
            yield


@cache
def _several(characters: str) -> Pattern[str]:
    return re.compile(f"[{re.escape(characters)}]*")
