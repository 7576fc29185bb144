"""Parsers of complete calls with mlx-lm's results, in linear time, which mlx-lm's regular
expressions exceed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

Call = dict[str, Any]
ParseTool = Callable[[str, Any], Any]
"""Takes the text between markers, and the tools. Raises an exception without a call."""
LONGEST_HEAD = 256
GEMMA_STRING = '<|"|>'
GEMMA_HEAD = re.compile(r"call:([\w-]+)\{")
GEMMA_SIGN = re.compile(r'<\|"\|>|[{}]')
GEMMA_KEY = re.compile(r"([{,])(\w+):")
KIMI_ATTRIBUTE = re.compile(r'(?<!\w)(\w+)="([^"]*)"')
KIMI_SEPARATOR = "<|sep|>"
MUSE_TAG = re.compile(r"<atem:(invoke|parameter)\b([^<>]*)>")
MUSE_NAME = re.compile(r'\bname="([^"]+)"')
M3_TAG = re.compile(r"\]<\]minimax\[>\[\s*+<(/?)([^<>]*+)>")
MAX_DEPTH = 100
PYTHON_HEAD = re.compile(r"\[([\w.]+)\(")
MAX_SIGNS = 5_000  # Commas and brackets that Python's parser reads in 40 ms.
LONGEST_LITERAL = 1_000
PYTHON_KEY = re.compile(r"(?<!\w)(\w+)=")


class NoCall(ValueError):
    pass


def _some(calls: list[Call]) -> list[Call]:
    if not calls:
        raise NoCall
    return calls


def _json_or_text(text: str, otherwise: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def gemma4(text: str, _tools: Any = None) -> list[Call]:
    """Read `call:NAME{KEY:VALUE}`, with strings between `<|"|>`."""
    ends, calls, at = _brace_ends(text), list[Call](), 0
    for head in GEMMA_HEAD.finditer(text):
        opened = head.end() - 1
        if head.start() >= at and opened in ends:
            at = ends[opened] + 1
            calls.append({"name": head[1], "arguments": _gemma_object(text[opened:at])})
    return _some(calls)


def _brace_ends(text: str) -> dict[int, int]:
    ends, opened, in_string = dict[int, int](), list[int](), False
    for sign in GEMMA_SIGN.finditer(text):
        if sign[0] == GEMMA_STRING:
            in_string = not in_string
        elif in_string:
            continue
        elif sign[0] == "{":
            opened.append(sign.start())
        elif opened:
            ends[opened.pop()] = sign.start()
    return ends


def _gemma_object(text: str) -> Any:
    parts = text.split(GEMMA_STRING)
    parts[::2] = [GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return json.loads("".join(parts))


def function_gemma(text: str, _tools: Any = None) -> Call:
    """Read `call:NAME{KEY:VALUE,KEY:<escape>TEXT<escape>}`; values without quotes are texts."""
    head, escape = GEMMA_HEAD.search(text), "<escape>"
    with suppress(ValueError):
        return gemma4(text.replace(escape, GEMMA_STRING))[0]
    end = text.find("}", head.end()) if head is not None else -1
    if head is None or end < 0:
        raise NoCall
    written, arguments, at = text[head.end() : end], dict[str, Any](), 0
    while at < len(written):
        colon = written.index(":", at)
        key, at = written[at:colon], colon + 1
        if written.startswith(escape, at):
            begin = at + len(escape)
            close = written.index(escape, begin)
            arguments[key], at = written[begin:close], close + len(escape) + 1
            continue
        comma = written.find(",", at)
        value = written[at : comma if comma >= 0 else len(written)]
        arguments[key], at = _json_or_text(value, value), at + len(value) + 1
    return {"name": head[1], "arguments": arguments}


def kimi_k3(text: str, _tools: Any = None) -> list[Call]:
    """Read tags between `<|open|>`, `<|close|>` and `<|sep|>`."""
    calls = []
    for head, body in _kimi_blocks(text, "call"):
        try:
            name = _kimi_attributes(head)["tool"]
            calls.append({"name": name, "arguments": _kimi_arguments(body)})
        except (KeyError, ValueError):
            continue
    return _some(calls)


def _kimi_blocks(text: str, tag: str) -> Iterator[tuple[str, str]]:
    start, end, at = f"<|open|>{tag}", f"<|close|>{tag}{KIMI_SEPARATOR}", 0
    while (begin := text.find(start, at)) >= 0:
        behind = text.find(KIMI_SEPARATOR, begin)
        close = text.find(end, behind) if behind >= 0 else -1
        if close < 0:
            return
        yield text[begin + len(start) : behind], text[behind + len(KIMI_SEPARATOR) : close]
        at = close + len(end)


def _kimi_attributes(head: str) -> Mapping[str, str]:
    found = KIMI_ATTRIBUTE.findall(head)
    return {name: value.replace("&quot;", '"').replace("&amp;", "&") for name, value in found}


def _kimi_arguments(body: str) -> Call:
    for _, written in _kimi_blocks(body, "json"):
        value = json.loads(written)
        if not isinstance(value, dict):
            raise NoCall
        return value
    arguments: Call = {}
    for head, value in _kimi_blocks(body, "argument"):
        given = _kimi_attributes(head)
        is_text = given.get("type", "string") == "string"
        arguments[given["key"]] = value if is_text else _json_or_text(value, value)
    return arguments


def muse_spark(text: str, _tools: Any = None) -> list[Call]:
    """Read `<atem:invoke name="NAME">` and parameters."""
    calls, at = list[Call](), 0
    while (tag := MUSE_TAG.search(text, at)) is not None:
        at, name = tag.end(), MUSE_NAME.search(tag[2])
        if tag[1] == "invoke" and name is not None:
            calls.append({"name": name[1], "arguments": {}})
        elif tag[1] == "parameter":
            close = text.find("</atem:parameter>", at)
            if close < 0:
                break
            value, at = text[at:close], close
            if calls and name is not None:
                calls[-1]["arguments"][name[1]] = _json_or_text(value, value.strip())
    return _some(calls)


def minicpm5_calls(text: str, tools: Any = None) -> Any:
    """Read `NAME><param name="KEY">VALUE</param>` by mlx-lm's parser."""
    head, found, body = text.partition(">")
    if not found or len(head) > LONGEST_HEAD:
        raise NoCall
    ended, last, _ = body.rpartition("</param>")
    written = head.strip(" \"'")
    names = [str(tool["function"]["name"]) for tool in tools or ()]
    alike = [name for name in names if name.casefold() == written.casefold()]
    name = alike[0] if len(alike) == 1 else written
    return import_module("mlx_lm.tool_parsers.minicpm5").parse_tool_call(
        f'"{name}">{ended}{last}', tools
    )


class _JsonWords(ast.NodeTransformer):
    # JSON's words are names in Python.
    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(words[node.id]), node) if node.id in words else node


def pythonic(text: str, _tools: Any = None) -> list[Call]:
    """Read `[NAME(KEY=VALUE)]`, as Python or nearly Python."""
    if sum(map(text.count, ",([{")) <= MAX_SIGNS:
        with suppress(SyntaxError, ValueError):
            return _python_calls(text)
    return [_nearly_python(text)]


def _python_calls(text: str) -> list[Call]:
    parsed = ast.parse(text[text.find("[") : text.rfind("]") + 1], mode="eval").body
    if not isinstance(parsed, ast.List):
        raise NoCall
    return _some([_python_call(node) for node in parsed.elts])


def _python_call(node: ast.expr) -> Call:
    if (
        not isinstance(node, ast.Call)
        or node.args
        or not isinstance(node.func, ast.Name | ast.Attribute)
    ):
        raise NoCall
    arguments: Call = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NoCall
        arguments[keyword.arg] = ast.literal_eval(_JsonWords().visit(keyword.value))
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _nearly_python(text: str) -> Call:
    head = PYTHON_HEAD.search(text)
    end = text.find(")]", head.end()) if head is not None else -1
    if head is None or end < 0:
        raise NoCall
    written, arguments, at = text[head.end() : end], dict[str, Any](), 0
    while (key := PYTHON_KEY.search(written, at)) is not None:
        value, at = _nearly_value(written, key.end())
        if value:
            arguments[key[1]] = _literal_or_text(value)
    return {"name": head[1], "arguments": arguments}


def _nearly_value(written: str, at: int) -> tuple[str, int]:
    quote = written[at : at + 1]
    close = written.find(quote, at + 1) if quote in ("'", '"') else -1
    if close >= 0 and written[close + 1 : close + 2] in ("", ","):
        return written[at + 1 : close], close + 1
    comma = written.find(",", at)
    end = comma if comma >= 0 else len(written)
    return written[at:end].strip(), end


def _literal_or_text(value: str) -> Any:
    if len(value) <= LONGEST_LITERAL:
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(value)
    return value


def minimax_m3(text: str, tools: Any = None) -> list[Call]:
    """Read `<invoke name="NAME">` and a tag for each argument, with a namespace before each tag."""
    root, calls = _tree(text), list[Call]()
    for tag, inner in root.children:
        name = MUSE_NAME.search(tag)
        if tag.startswith("invoke") and name is not None:
            schema = _parameters(tools, name[1])
            arguments = {key: _m3_value(part, _part(schema, key)) for key, part in inner.children}
            calls.append({"name": name[1], "arguments": arguments})
    return _some(calls)


class _Element:
    def __init__(self) -> None:
        self.children: list[tuple[str, _Element]] = []
        self.text = ""


def _tree(text: str) -> _Element:
    root = _Element()
    opened, at = [("", root)], 0
    for tag in M3_TAG.finditer(text):
        name, inner = opened[-1]
        inner.text, at = text[at : tag.start()], tag.end()
        if not tag[1]:
            inner.children.append((tag[2], _Element()))
            opened.append(inner.children[-1])
        elif name.split(" ")[0] == tag[2] and len(opened) <= MAX_DEPTH:
            opened.pop()
        else:
            raise NoCall
    if len(opened) > 1:
        raise NoCall
    return root


def _m3_value(element: _Element, schema: Mapping[str, Any]) -> Any:
    if not element.children:
        return (
            element.text
            if schema.get("type") == "string"
            else _json_or_text(element.text, element.text)
        )
    if {key for key, _ in element.children} == {"item"} and schema.get("type") != "object":
        return [_m3_value(part, _part(schema, "items")) for _, part in element.children]
    return {key: _m3_value(part, _part(schema, key)) for key, part in element.children}


def _parameters(tools: Any, name: str) -> Mapping[str, Any]:
    functions = (tool["function"] for tool in tools or ())
    schemas = (each.get("parameters") for each in functions if each["name"] == name)
    return _mapping(next(schemas, None))


def _part(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The schema of a property; `items`: of an array's entries."""
    if key == "items":
        return _mapping(schema.get(key))
    return _mapping(_mapping(schema.get("properties")).get(key))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def apertus(text: str, _tools: Any = None) -> list[Call]:
    """Read a list of objects `{NAME: ARGUMENTS}`."""
    found = json.loads(text)
    objects = found if isinstance(found, list) else [found]
    calls = [(name, value) for each in objects for name, value in each.items()]
    return _some([{"name": name, "arguments": value} for name, value in calls])


def cwm(text: str, tools: Any = None) -> Call:
    """Read ` NAME>` and an object, or the text of the tool's only argument."""
    head, found, body = text.partition(">")
    name, body = head.strip(), body.strip("\n")
    if not found or not name or len(head) > LONGEST_HEAD:
        raise NoCall
    if isinstance(arguments := _json_or_text(body, body), dict):
        return {"name": name, "arguments": arguments}
    keys = [*_mapping(_parameters(tools, name).get("properties"))]
    if len(keys) != 1:
        raise NoCall
    return {"name": name, "arguments": {keys[0]: body}}


PARSERS: Mapping[str, ParseTool] = {
    "apertus": apertus,
    "cwm": cwm,
    "function_gemma": function_gemma,
    "gemma4": gemma4,
    "kimi_k3": kimi_k3,
    "lfm2": pythonic,
    "minicpm5": minicpm5_calls,
    "minimax_m3": minimax_m3,
    "muse_spark": muse_spark,
    "olmo3": pythonic,
    "pythonic": pythonic,
}
