"""No regular expression of the package backtracks more than in proportion to the text, whatever the
text is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from re import Pattern
from typing import Any

import attrs
import pytest

import trouper
from tests.linear.automaton import Use, faults_of
from trouper.engine.loading import control_tokens
from trouper.engine.loading.layer_patterns import LayerPatterns
from trouper.engine.loading.output_format_detection import RENDERED
from trouper.engine.vision import towers
from trouper.protocol.output_formats import THINKING
from trouper.web.http import leniency
from trouper.web.output.formats import json_calls, text_source
from trouper.web.output.formats.call_sink import CallSink
from trouper.web.output.formats.marked_answer import MarkedAnswer
from trouper.web.output.formats.registry import FORMATS
from trouper.web.output.formats.text_source import SPACE, TextSource
from trouper.web.output.tool_calls import Tools

PACKAGE = Path(trouper.__file__).parent
FUNCTIONS: Mapping[str, Use] = {
    "compile": "search",
    "match": "match",
    "fullmatch": "fullmatch",
    "search": "search",
    "sub": "search",
    "subn": "search",
    "split": "search",
    "findall": "search",
    "finditer": "search",
}


@attrs.frozen
class Expression:
    where: str
    pattern: str | bytes
    flags: int
    use: Use


def _answers() -> Iterator[MarkedAnswer]:
    for form in FORMATS.values():
        for thinking in THINKING.values():
            yield MarkedAnswer(
                TextSource(), CallSink(Tools(), lambda _outcome: None), thinking, form
            )


MARKERS = {"<|im_start|>": 1, "<|im_end|>": 1, "<s>": 1, "</s>": 1, "[INST]": 4}


MADE: Mapping[tuple[str, str], Any] = {
    ("engine/vision/towers.py", "_renamings"): lambda: [
        ("match", pattern)
        for name, renamings in vars(towers).items()
        if name.endswith("_NAMES")
        for pattern, _ in renamings
    ],
    ("engine/loading/control_tokens.py", "compiled"): lambda: [
        ("search", control_tokens.compiled(MARKERS)),
        ("search", control_tokens.compiled(MARKERS, MARKERS)),
        ("match", control_tokens.compiled(["im_end|>", "s>"], {"s>": 1}, r"[^\w\s]*+{}")),
    ],
    ("web/http/leniency.py", "word"): lambda: [("search", leniency.word("max_tokens"))],
    ("web/output/formats/marked_answer.py", "_stops"): lambda: [
        ("search", answer._stops) for answer in _answers()
    ],
    ("web/output/formats/marked_answer.py", "_words"): lambda: [
        ("match", answer._words) for answer in _answers()
    ],
    ("web/output/formats/marked_answer.py", "_blanks"): lambda: [
        ("match", answer._blanks) for answer in _answers()
    ],
    ("web/output/formats/json_calls.py", "_plain_text"): lambda: [
        ("match", json_calls._plain_text(first)) for first in ("", "<", "[")
    ],
    ("engine/loading/output_format_detection.py", "detect"): lambda: [
        ("search", re.compile(pattern)) for pattern in RENDERED.values()
    ],
    ("engine/loading/layer_patterns.py", "__init__"): lambda: [
        ("fullmatch", expression)
        for *_, expression, _ in LayerPatterns(
            dict.fromkeys(
                [r"^model\.layers\.[0-5]\.mlp", r"layers\.\d+\.[a-z]+.down_proj$", r"[0-9]\.\d"], 8
            )
        )._others
    ],
    ("web/output/formats/text_source.py", "_several"): lambda: [
        ("match", text_source._several(SPACE + "[],;"))
    ],
}
"""Expressions that a function makes, with what they are made for: all that there are, or some that
stand for all."""


@cache
def _trees() -> Mapping[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths
    }


def _calls(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of `re`, each with the name of the function or of the constant it stands
    in."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not within:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else within
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=attr)) if (
                attr in FUNCTIONS
            ):
                yield name, node
        yield from _calls(node, name)


@cache
def _uses() -> Mapping[tuple[str, str], set[Use]]:
    """How constants are used, by their modules and names; an expression that is handed on may be
    used in any way."""
    found: dict[tuple[str, str], set[Use]] = {}
    for where, tree in _trees().items():
        imported = {
            name.name: f"{node.module}.py".removeprefix("trouper.").replace(
                ".", "/", node.module.count(".") - 1
            )
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("trouper.")
            for name in node.names
        }
        called = {
            id(name): FUNCTIONS.get(node.attr, "search")
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            for name in (
                [node.value.body, node.value.orelse]
                if isinstance(node.value, ast.IfExp)
                else [node.value]
            )
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id.isupper():
                of = imported.get(node.id, where), node.id
                found.setdefault(of, set()).add(called.get(id(node), "search"))
    return found


def _of_constant(where: str, pattern: Pattern[Any], name: str) -> Iterator[Expression]:
    for use in sorted(_uses().get((where, name), {"search"})):
        yield Expression(f"{where}: {name}", pattern.pattern, pattern.flags, use)


def _has_flags(call: ast.Call, function: str) -> bool:
    positional = {"compile": 1, "split": 3, "sub": 4, "subn": 4}.get(function, 2)
    return len(call.args) > positional or any(keyword.arg == "flags" for keyword in call.keywords)


def _expressions() -> Iterator[Expression]:
    for where, tree in _trees().items():
        for name, call in _calls(tree):
            module = import_module(
                "trouper." + where.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
            argument = call.args[0]
            function: str = call.func.attr  # type: ignore[attr-defined]
            constant = getattr(module, name, None)
            if isinstance(constant, Pattern):
                yield from _of_constant(where, constant, name)
            elif (
                isinstance(argument, ast.Constant)
                and isinstance(argument.value, str | bytes)
                and not _has_flags(call, function)
            ):
                yield Expression(f"{where}: {name}", argument.value, 0, FUNCTIONS[function])
            elif (where, name) in MADE:
                for use, pattern in MADE[where, name]():
                    yield Expression(f"{where}: {name}", pattern.pattern, pattern.flags, use)
            else:
                yield Expression(
                    f"{where}: {name} in line {call.lineno} is made: add it to MADE",
                    "(?:a|a)*b",
                    0,
                    "match",
                )


def test_all_expressions_are_linear() -> None:
    """What is refused here: write it possessively (`++`, `*+`), with parts that cannot read the
    same, or by hand."""
    found = sorted({*_expressions()}, key=str)
    assert len(found) > 80
    faults = [
        (each.where, each.pattern, each.use, why[0])
        for each in found
        if (why := faults_of(each.pattern, each.flags & ~int(re.UNICODE), each.use))
    ]
    assert not faults, "\n".join(map(str, faults))


def test_nobody_hides_expressions() -> None:
    """`re` is called by its name, and no other library's expressions are used."""
    for where, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(
                    name.name == "regex" or (name.name == "re" and name.asname)
                    for name in node.names
                ), where
            if isinstance(node, ast.ImportFrom) and node.module in ("re", "regex"):
                assert {name.name for name in node.names} <= {"Pattern", "Match"}, where


@pytest.mark.parametrize(
    ("pattern", "use"),
    [
        (r"(a+)+b", "match"),
        (r"(a|a)*b", "match"),
        (r"(a*)*b", "match"),
        (r"(a?){20}b", "match"),
        (r"\s*\s*x", "match"),
        (r"\s*(?:b)?\s*x", "match"),
        (r"a+b", "search"),
        (r"(.*) - at (.*)", "fullmatch"),
        (r"(?:/\*.*?\*/|[/*])*", "match"),
        (r"(?=a*b)c", "match"),
        (r"(a+)\1", "match"),
        (r"^\s*\S[^\n]*:", "search"),
    ],
)
def test_what_backtracks_is_found(pattern: str, use: Use) -> None:
    assert faults_of(pattern, re.MULTILINE, use)


@pytest.mark.parametrize(
    ("pattern", "use"),
    [
        (r"a+", "search"),
        (r"\s*+\s*x", "match"),
        (r"\s*+(?:b\s*+)?x", "match"),
        (r"(?<!\w)\w++x", "search"),
        (r"[\w-]+(?:\.[\w-]+)*", "fullmatch"),
        (r'"(?:[^"\\]|\\.)*"', "match"),
        (r"(?: ++|/\*[^*]*\*+(?:[^*/][^*]*\*+)*/)*", "match"),
        (r"(.*\S)\s+(\w+)=(\S*)", "fullmatch"),
    ],
)
def test_what_does_not_is_not(pattern: str, use: Use) -> None:
    assert not faults_of(pattern, re.DOTALL, use)
