"""The text of an answer as a coroutine reads it: while the text is generated, character by
character.

Parsers of answers are generators that yield when they need more text. They see single characters
and never where the text was cut, so a streamed answer and a complete one give the same result by
construction.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import cache
from re import Pattern
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A coroutine that yields when it needs more text."""
END = ""
"""What `next` returns at the end of the answer."""
SPACE = " \t\r\n"


class TextSource:
    """Text that was generated and is not yet read. What was read since the last `keep` can be read
    again.

    Positions count from the beginning of the answer. Each character that comes is copied a bounded
    number of times, however much was read and may be read again."""

    def __init__(self) -> None:
        self._text, self._at, self._begin, self._kept = "", 0, 0, 0
        """The newest text, what was read of it, and the positions of its beginning and of the last
        `keep`."""
        self._earlier: list[str] = []
        """What is between the last `keep` and the newest text, if anything."""
        self.pinned = False
        """Whether `keep` forgets nothing, since all may be read again."""
        self.ended = False
        """Whether no more text will come."""
        self.cut = False
        """Whether the answer ended in the middle, at its length or by an abort: then nothing is
        completed."""
        self._goes_on: tuple[tuple[str, ...], int] = (), 0
        """What `ends_with` has searched, and up to where it was in vain: each place in between
        would give the same answer."""

    def feed(self, text: str) -> None:
        at, first = self._at, max(0, self._kept - self._begin)
        if first < at:
            self._earlier.append(self._text[first:at])
        self._text, self._begin, self._at = self._text[at:] + text, self._begin + at, 0

    def keep(self) -> None:
        """Forget what was read: it can neither be read again nor be given by `kept`."""
        if not self.pinned:
            self._kept = self._begin + self._at
            if self._earlier:
                self._earlier.clear()

    @property
    def kept(self) -> str:
        """What was read since the last `keep`."""
        return "".join(self._earlier) + self._text[max(0, self._kept - self._begin) : self._at]

    @property
    def position(self) -> int:
        """Number of characters that were read since the last `keep`; for `rewind`."""
        return self._begin + self._at - self._kept

    def rewind(self, position: int) -> None:
        """Read again from an earlier `position`."""
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
        """Read what is there, up to the first match of `stops`; perhaps nothing."""
        found = stops.search(self._text, self._at)
        start, self._at = self._at, found.start() if found else len(self._text)
        return self._text[start : self._at]

    def take(self, pattern: Pattern[str]) -> str:
        """Read what `pattern` matches here; perhaps nothing."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    @property
    def is_dry(self) -> bool:
        """Whether all that has come was read, and more will come."""
        return self._at == len(self._text) and not self.ended

    def skip(self, characters: str = SPACE) -> Steps[str]:
        """Read these characters as long as they come. Returns them."""
        skipped, several = [], _several(characters)
        while True:
            skipped.append(self.take(several))
            if not self.is_dry:
                return "".join(skipped)
            yield

    def drop(self) -> Steps[None]:
        """Read all that comes, such as half a tag where an answer was cut."""
        while (yield from self.next()) != END:
            self.keep()

    def matches(self, text: str) -> Steps[bool]:
        """Read `text` if it comes next; otherwise read nothing."""
        while not self._text.startswith(text, self._at):
            here = self._text[self._at : self._at + len(text)]
            if self.ended or len(here) == len(text) or not text.startswith(here):
                return False
            yield
        self._at += len(text)
        return True

    def first_of(self, texts: tuple[str, ...]) -> Steps[str]:
        """Read the first of `texts` that comes next. Returns "" and reads nothing if none does."""
        for text in texts:
            if text and (yield from self.matches(text)):
                return text
        return ""

    def ends_with(self, texts: tuple[str, ...]) -> Steps[bool]:
        """Whether only whitespace and `texts` are between here and the end of the answer. Reads
        nothing."""
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
        """Read up to and with `text`. Returns what is before it; None, with nothing read, if it
        does not come within `longest` characters, or if what is before it matches `stops`."""
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
