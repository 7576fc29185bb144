"""JSON with comments and trailing commas, changed in place: what is not changed stays as it is,
byte for byte.

Editors' settings are such files. The standard library's `json` reads no comments, and would write
the file in its own style.
"""

from __future__ import annotations

import json
import re
from typing import Any

import attrs

BLANK = re.compile(r"(?:[ \t\r\n]++|//[^\n]*+|/\*[^*]*\*+(?:[^*/][^*]*\*+)*/)*")
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
SCALAR = re.compile(r"-?\d[\d.eE+-]*|true|false|null")
INDENTED = re.compile(r"^([ \t]+)\S", re.MULTILINE)
MAX_DEPTH = 200


class NotJson(ValueError):
    """The text is not JSON, not even with comments. The message names the line."""


@attrs.define
class JsonNode:
    """A value and where it stands in the text."""

    start: int
    end: int
    value: Any
    children: dict[Any, JsonNode] = attrs.field(factory=dict)
    """Members by key, or items by index."""
    last_end: int | None = None
    """End of the last member or item; None without one."""
    trailing_comma: bool = False
    begin: int = 0
    """Where its member of an object begins, with the key; of an item where it does."""


def loads(text: str) -> Any:
    """Return the value. Raises `NotJson`."""
    return parsed(text).value


def parsed(text: str) -> JsonNode:
    """Parse the whole text. Raises `NotJson`."""
    reader = _Reader(text)
    node = reader.value(reader.blank(0), 0)
    if (end := reader.blank(node.end)) != len(text):
        raise reader.fault(end, "something follows the value")
    return node


class _Reader:
    """A recursive-descent parser that keeps positions."""

    def __init__(self, text: str) -> None:
        self._text = text

    def fault(self, at: int, message: str) -> NotJson:
        line = self._text.count("\n", 0, at) + 1
        return NotJson(f"line {line}: {message}")

    def blank(self, at: int) -> int:
        """Return the end of white space and comments."""
        match = BLANK.match(self._text, at)
        assert match is not None, "it may be empty"
        return match.end()

    def value(self, at: int, depth: int) -> JsonNode:
        if depth > MAX_DEPTH:
            raise self.fault(at, "it is nested too deep")
        begin = self._text[at : at + 1]
        if begin in ("{", "["):
            return self._container(at, depth)
        match = STRING.match(self._text, at) if begin == '"' else SCALAR.match(self._text, at)
        if match is None:
            raise self.fault(at, "a value is missing or wrong")
        return JsonNode(at, match.end(), self._scalar(match[0], at))

    def _scalar(self, raw: str, at: int) -> Any:
        try:
            return json.loads(raw)
        except ValueError as error:
            raise self.fault(at, f"{raw[:40]} is no value") from error

    def _container(self, start: int, depth: int) -> JsonNode:
        is_object = self._text[start] == "{"
        close = "}" if is_object else "]"
        node = JsonNode(start, start, {} if is_object else [])
        at = self.blank(start + 1)
        while self._text[at : at + 1] != close:
            if node.last_end is not None and not node.trailing_comma:
                raise self.fault(at, f"a comma or {close} is missing")
            at = self.blank(self._element(node, at, depth))
            node.trailing_comma = self._text[at : at + 1] == ","
            if node.trailing_comma:
                at = self.blank(at + 1)
        node.end = at + 1
        return node

    def _element(self, node: JsonNode, at: int, depth: int) -> int:
        """Read a member or an item into `node`, and return its end."""
        key: Any = len(node.children)
        begin = at
        if isinstance(node.value, dict):
            name = STRING.match(self._text, at)
            if name is None:
                raise self.fault(at, "a key in quotes or } is missing")
            key, at = self._scalar(name[0], at), self.blank(name.end())
            if self._text[at : at + 1] != ":":
                raise self.fault(name.end(), "a colon is missing")
            at = self.blank(at + 1)
        child = self.value(at, depth + 1)
        child.begin = begin
        node.children[key] = child
        if isinstance(node.value, dict):
            node.value[key] = child.value
        else:
            node.value.append(child.value)
        node.last_end = child.end
        return child.end


def with_value(text: str, path: tuple[Any, ...], value: Any) -> str:
    """Return the text with `value` at `path`, whose objects are made where they are missing. An
    index that is the length of a list appends. Raises `NotJson`."""
    node, unit = parsed(text), _unit(text)
    for depth, key in enumerate(path):
        if node.value is None:  # As good as missing.
            return _replaced(text, node, _nested(path[depth:], value), unit)
        if key not in node.children:
            return _added(text, node, key, _nested(path[depth + 1 :], value), unit)
        node = node.children[key]
    return _replaced(text, node, value, unit)


def without(text: str, path: tuple[Any, ...]) -> str:
    """Return the text without the member or item at `path`, which is there. Comments stay where
    they are. Raises `NotJson`."""
    node = parsed(text)
    for key in path[:-1]:
        node = node.children[key]
    siblings, child = list(node.children.values()), node.children[path[-1]]
    index = siblings.index(child)
    if index + 1 < len(siblings) or node.trailing_comma:
        end = _Reader(text).blank(child.end) + 1  # Behind its comma.
        return text[: child.begin].rstrip() + text[end:]
    comma = _Reader(text).blank(siblings[index - 1].end) if index else child.begin
    return text[:comma] + text[comma + 1 : child.begin].rstrip() + text[child.end :]


def _nested(path: tuple[Any, ...], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value} if isinstance(key, str) else [value]
    return value


def _replaced(text: str, node: JsonNode, value: Any, unit: str) -> str:
    return (
        text[: node.start] + _dumped(value, unit, _indent_at(text, node.start)) + text[node.end :]
    )


def _added(text: str, node: JsonNode, key: Any, value: Any, unit: str) -> str:
    """Add a member or an item behind the last one, and behind the comments that follow it."""
    closing = node.end - 1
    outer = _indent_at(text, node.start)
    indent = outer + unit
    if (
        node.children
        and "\n" in text[node.start : (first := next(iter(node.children.values()))).start]
    ):
        indent = _indent_at(text, first.start)
    name = f"{json.dumps(key, ensure_ascii=False)}: " if isinstance(key, str) else ""
    begin = node.start + 1 if node.last_end is None else node.last_end
    comma = "" if node.last_end is None or node.trailing_comma else ","
    content = text[begin:closing].rstrip()
    rest = text[begin + len(content) : closing]
    if "\n" not in rest:
        rest = f"\n{outer}"
    member = f"\n{indent}{name}{_dumped(value, unit, indent)}"
    return f"{text[:begin]}{comma}{content}{member}{rest}{text[closing:]}"


def _dumped(value: Any, unit: str, indent: str) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", f"\n{indent}")


def _indent_at(text: str, at: int) -> str:
    """Return the indentation of the line of a position."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    found = INDENTED.search(text)
    return found[1] if found else "  "
