"""Docstrings of a module, their words, and pronouns among these."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.house.source_tree import Module

PRONOUNS = re.compile(
    r"\b(?:it|its|they|them|their)\b|\b(?:that|those|these|this)\b(?=\s*(?:[.,;:!?)]|$))",
    re.IGNORECASE,
)
"""`that`, `those`, `these` and `this` only where punctuation or the end of the text follows."""


def list_docstrings(module: Module) -> Iterator[str]:
    """Docstrings of the module, classes and functions, and strings below an assignment."""
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text
            for above, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(above, ast.Assign | ast.AnnAssign) and (text := _read_string(below)):
                    yield text


def _read_string(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
        case _:
            return ""


def count_words(text: str) -> int:
    return len(text.split())


def count_pronouns(text: str) -> int:
    return len(PRONOUNS.findall(text))
