"""JSON with comments and trailing commas, edited in place: the standard library parses a copy
with blanks for both."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import attrs

# A string or a comment without its end reaches as far as it may, so that each character is read
# once.
STRING = r'"(?:[^"\\\n]|\\.)*+"?'
COMMENT = re.compile(rf"{STRING}|//[^\n]*+|/\*[^*]*+(?:\*++[^*/][^*]*+)*+(?:\*++/)?", re.DOTALL)
TOKEN = re.compile(rf"{STRING}|[ \t\r\n]++|.", re.DOTALL)
BLANK = re.compile(r"[ \t\r\n]*")
INDENTED = re.compile(r"^([ \t]+)\S", re.MULTILINE)


class NotJson(ValueError):
    """The message names the line."""


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"{name} is no value")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


@attrs.frozen
class Span:
    """`begin`: of the member, with the key"""

    begin: int
    start: int
    end: int


class _Text:
    """A valid text, and copies of equal length."""

    def __init__(self, text: str) -> None:
        self.uncommented = COMMENT.sub(_blanked, text)
        self.plain = _without_trailing_commas(self.uncommented)
        self.value = _decoded(self.plain)

    def skip(self, at: int) -> int:
        match = BLANK.match(self.plain, at)
        assert match is not None, "it may be empty"
        return match.end()

    def root(self) -> Span:
        start = self.skip(0)
        return Span(start, start, len(self.plain.rstrip(" \t\r\n")))

    def children(self, span: Span) -> dict[Any, Span]:
        """Return the members by key, or the items by index."""
        found: dict[Any, Span] = {}
        opening = self.plain[span.start]
        at = self.skip(span.start + 1) if opening in "{[" else span.end - 1
        while at < span.end - 1:
            key, begin = len(found), at
            if opening == "{":
                key, at = DECODER.raw_decode(self.plain, at)
                at = self.skip(self.skip(at) + 1)  # The colon
            _, end = DECODER.raw_decode(self.plain, at)
            found[key] = Span(begin, at, end)
            at = self.skip(end)
            if self.plain[at] == ",":
                at = self.skip(at + 1)
        return found

    def find_comma(self, start: int, end: int) -> int:
        return self.uncommented.find(",", start, end)


def _blanked(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])


def _without_trailing_commas(text: str) -> str:
    """Return a copy with a blank for each comma behind the last item or member."""
    characters, comma, before = list(text), -1, ""
    for token in TOKEN.finditer(text):
        if token[0].isspace():
            continue
        if token[0] in ("]", "}") and comma >= 0:
            characters[comma] = " "
        is_behind_value = token[0] == "," and before not in ("", ",", "[", "{", ":")
        comma, before = token.start() if is_behind_value else -1, token[0]
    return "".join(characters)


def _decoded(text: str) -> Any:
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise NotJson(f"line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise NotJson("line 1: the value is nested too deep") from error
    except ValueError as error:  # A constant, or thousands of digits
        raise NotJson(str(error)) from error


def loads(text: str) -> Any:
    """Raises `NotJson`."""
    return _Text(text).value


def with_value(text: str, path: tuple[Any, ...], value: Any) -> str:
    """Missing objects are made; an index equal to a list's length appends. Raises `NotJson`."""
    read, unit = _Text(text), _unit(text)
    span = read.root()
    for depth, key in enumerate(path):
        children = read.children(span)
        if read.plain.startswith("null", span.start):  # As good as missing
            return _replaced(text, span, _nested(path[depth:], value), unit)
        if key not in children:
            name = f"{json.dumps(key, ensure_ascii=False)}: " if isinstance(key, str) else ""
            return _added(read, text, span, (name, _nested(path[depth + 1 :], value)))
        span = children[key]
    return _replaced(text, span, value, unit)


def without(text: str, path: tuple[Any, ...]) -> str:
    """Comments stay. Raises `NotJson`."""
    read = _Text(text)
    parent = read.root()
    for key in path[:-1]:
        parent = read.children(parent)[key]
    children = read.children(parent)
    siblings, child = list(children.values()), children[path[-1]]
    index = siblings.index(child)
    behind = siblings[index + 1].begin if child != siblings[-1] else parent.end
    comma = read.find_comma(child.end, behind)
    if comma >= 0:
        return text[: child.begin].rstrip() + text[comma + 1 :]
    comma = read.find_comma(siblings[index - 1].end, child.begin) if index else child.begin
    return text[:comma] + text[comma + 1 : child.begin].rstrip() + text[child.end :]


def _nested(path: tuple[Any, ...], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value} if isinstance(key, str) else [value]
    return value


def _replaced(text: str, span: Span, value: Any, unit: str) -> str:
    written = _dumped(value, unit, _indent_at(text, span.start))
    return text[: span.start] + written + text[span.end :]


def _added(read: _Text, text: str, container: Span, member: tuple[str, Any]) -> str:
    """Add a member behind the last one and the comments that follow."""
    unit, outer = _unit(text), _indent_at(text, container.start)
    indent = outer + unit
    children = list(read.children(container).values())
    begin, closing, comma = container.start + 1, container.end - 1, ""
    if children:
        begin = children[-1].end
        comma = "" if read.find_comma(begin, closing) >= 0 else ","
        if "\n" in text[container.start : children[0].start]:
            indent = _indent_at(text, children[0].start)
    content = text[begin:closing].rstrip()
    rest = text[begin + len(content) : closing]
    if "\n" not in rest:
        rest = f"\n{outer}"
    name, value = member
    written = f"\n{indent}{name}{_dumped(value, unit, indent)}"
    return f"{text[:begin]}{comma}{content}{written}{rest}{text[closing:]}"


def _dumped(value: Any, unit: str, indent: str) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", f"\n{indent}")


def _indent_at(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    found = INDENTED.search(text)
    return found[1] if found else "  "
