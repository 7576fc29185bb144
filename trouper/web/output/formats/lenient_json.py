"""Normalization of a model's JSON, character by character; valid JSON stays as written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from trouper.web.output.formats.text_source import SPACE

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null"}
MEANT_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": "null",
    "Infinity": "null",
    "undefined": "null",
}
OPENERS = {"}": "{", "]": "["}
CLOSERS = {"{": "}", "[": "]"}
REPLACEMENT = "\\ufffd"


# Repaired: missing or wrong closing brackets and commas, single quotes, bare keys and words,
# Python's constants, control characters and quotes inside of strings, wrong escapes.
class LenientJson:
    def __init__(self) -> None:
        self.done = False
        self.repaired = False
        self._out: list[str] = []
        self._open: list[str] = []
        self._objects = 0  # How many of `_open` are objects.
        self._state: Callable[[str], None] = self._value
        # A comma or quote with whitespace, a bare word, digits of an escape.
        self._held: list[str] = []
        self._quote = '"'
        self._in_key = False
        self._high = ""  # The first half of a surrogate pair, as hex digits.

    @property
    def in_string(self) -> bool:
        return self._state in (self._string, self._escape, self._hex)

    @property
    def in_text(self) -> bool:
        """Whether unescaped characters need not be fed."""
        return self._state == self._string and not self._high

    def push(self, char: str) -> str:
        """Feed one character. Returns the valid JSON known since."""
        self._state(char)
        return self._flushed()

    def close(self) -> str:
        """Complete the value. Returns the rest."""
        if self.done:
            return ""
        self.repaired = self.repaired or bool(self._open) or self.in_string
        if self.in_string:
            self._surrogate_alone()
            self._state, self._held = self._after_quote, ['"']
        if self._state == self._after_quote:
            self._end_string()
        elif self._state in (self._bare, self._bare_key):
            self._end_bare()
        if self._state == self._colon:
            self._write(":null")
        elif self._state == self._value and (self._open[-1:] == ["{"] or not self._open):
            self._write("null")
        while self._open:
            self._write(CLOSERS[self._open.pop()])
        self.done = True
        return self._flushed()

    def _flushed(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _write(self, text: str) -> None:
        self._out.append(text)

    def _value(self, char: str) -> None:
        if char in SPACE:
            self._write(char)
        elif char in CLOSERS:
            self._open.append(char)
            self._objects += char == "{"
            self._write(char)
            self._state = self._first
        elif char in "\"'":
            self._begin_string(char, in_key=False)
        elif char in OPENERS or char == ",":
            self.repaired = True
            if self._open and self._open[-1] == "{":
                self._write("null")
            self._ended()
            self._state(char)
        else:
            self._held, self._state = [char], self._bare

    def _first(self, char: str) -> None:
        if char in SPACE:
            self._write(char)
        elif char in OPENERS:
            self._close_with(char)
        elif char == ",":
            self.repaired = True
        else:
            self._entry(char)

    def _entry(self, char: str) -> None:
        if self._open[-1] == "[":
            self._state = self._value
            self._value(char)
        elif char in "\"'":
            self._begin_string(char, in_key=True)
        elif char in ":=":
            self.repaired = True
            self._write('""')
            self._state = self._colon
            self._colon(char)
        else:
            self._held, self._state = [char], self._bare_key

    def _ended(self) -> None:
        self.done = not self._open
        self._state = self._after

    def _after(self, char: str) -> None:
        if char in SPACE:
            self._write(char)
        elif char == ",":
            self._held, self._state = [char], self._after_comma
        elif char in OPENERS:
            self._close_with(char)
        else:
            self.repaired = True
            self._write(",")
            self._entry(char)

    def _after_comma(self, char: str) -> None:
        if char in SPACE:
            self._held.append(char)
        elif char == ",":
            self.repaired = True
        elif char in OPENERS:
            self.repaired = True
            self._write("".join(self._held[1:]))
            self._close_with(char)
        else:
            self._write("".join(self._held))
            self._entry(char)

    def _close_with(self, char: str) -> None:
        opener, objects = OPENERS[char], self._objects
        # A search would be for each bracket.
        if not (objects if opener == "{" else len(self._open) - objects):
            self.repaired = True
            if self._state != self._first:
                self._state = self._after
            return
        while (last := self._open.pop()) != opener:
            self.repaired = True
            self._objects -= last == "{"
            self._write(CLOSERS[last])
        self._objects -= last == "{"
        self._write(char)
        self._ended()

    def _bare(self, char: str) -> None:
        if char in SPACE or char in ",}]":
            self._end_bare()
            if not self.done:
                self._state(char)
        else:
            self._held.append(char)

    def _bare_key(self, char: str) -> None:
        if char in SPACE or char in ":=,}]":
            self._end_bare()
            self._state(char)
        else:
            self._held.append(char)

    def _end_bare(self) -> None:
        word, self._held = "".join(self._held), []
        if self._state == self._bare_key:
            self.repaired = True
            self._write(json.dumps(word.strip("\"'")))
            self._state = self._colon
            return
        valid = word if NUMBER.fullmatch(word) else WORDS.get(word)
        self.repaired = self.repaired or valid is None
        self._write(valid or MEANT_WORDS.get(word) or json.dumps(word))
        self._ended()

    def _colon(self, char: str) -> None:
        if char in SPACE:
            self._write(char)
            return
        self._state = self._value
        self._write(":")
        if char != ":":
            self.repaired = True
            if char != "=":
                self._value(char)

    # -- strings ---------------------------------------------------------------------------------

    def _begin_string(self, quote: str, *, in_key: bool) -> None:
        self.repaired = self.repaired or quote != '"'
        self._quote, self._in_key, self._state = quote, in_key, self._string
        self._write('"')

    def _string(self, char: str) -> None:
        if char != "\\":
            self._surrogate_alone()
        if char == "\\":
            self._state = self._escape
        elif char == self._quote and not self._open:
            self._write('"')
            self._ended()
        elif char == self._quote:
            self._held, self._state = ['"'], self._after_quote
        elif char == '"' or char < " ":
            self.repaired = True
            self._write(json.dumps(char)[1:-1])
        else:
            self._write(char)

    def _escape(self, char: str) -> None:
        self._state = self._string
        if char == "u":
            self._held, self._state = [], self._hex
            return
        self._surrogate_alone()
        if char in '"\\/bfnrt':
            self._write("\\" + char)
            return
        self.repaired, escaped = True, ("" if char == "\n" else "\\") + char
        self._write(char if char == "'" else json.dumps(escaped, ensure_ascii=False)[1:-1])

    def _hex(self, char: str) -> None:
        if char not in "0123456789abcdefABCDEF":
            self.repaired = True
            self._surrogate_alone()
            self._write("\\\\u" + "".join(self._held))
            self._state = self._string
            self._string(char)
            return
        self._held.append(char)
        if len(self._held) < 4:
            return
        digits = "".join(self._held)
        self._state, code = self._string, int(digits, 16)
        if 0xDC00 <= code < 0xE000 and self._high:
            self._write(f"\\u{self._high}\\u{digits}")
            self._high = ""
            return
        self._surrogate_alone()
        if 0xD800 <= code < 0xDC00:
            self._high = digits
        else:
            self.repaired = self.repaired or 0xDC00 <= code < 0xE000
            self._write(REPLACEMENT if 0xDC00 <= code < 0xE000 else f"\\u{digits}")

    def _surrogate_alone(self) -> None:
        if self._high:
            self.repaired, self._high = True, ""
            self._write(REPLACEMENT)

    def _after_quote(self, char: str) -> None:
        """A quote is text unless the next characters may follow a string."""
        if char in SPACE:
            self._held.append(char)
        elif char in (":=" if self._in_key else ",}]") or char == self._quote:
            self._end_string()
            self._state(char)
        else:
            self.repaired, space = True, "".join(self._held[1:])
            self._write(json.dumps(self._quote + space)[1:-1])
            self._state = self._string
            self._string(char)

    def _end_string(self) -> None:
        self._write("".join(self._held))
        self._held = []
        if self._in_key:
            self._state = self._colon
        else:
            self._ended()


def completed(text: str) -> tuple[str, bool]:
    """Returns JSON, and whether the text was repaired."""
    value, out = LenientJson(), list[str]()
    for char in text.strip():
        if value.done:
            return "".join(out), True
        out.append(value.push(char))
    return "".join([*out, value.close()]), value.repaired
