"""The list of mutants, read from the TOML files beside this one, and what is wrong with an
entry."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGE = "trouper"
DEFINITIONS = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
LAYOUT = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
)
CLOSING = (")", "]", "}")


class Stale(Exception):
    """The source no longer has what a mutant replaces, or has it twice. The message says where it
    may be now."""


@attrs.frozen(kw_only=True)
class Mutant:
    """One fault: `old` occurs once in `file`, or in `function` of it, and becomes `new`; one of
    `tests` (pytest's node ids) must then fail. Layout does not matter: tokens are compared."""

    name: str
    file: str
    """Relative to the package; from the root of the checkout if it begins with `packages/`."""
    breaks: str
    old: str
    new: str
    tests: tuple[str, ...]
    function: str = ""
    """A qualified name, such as `Core.step`, or that of a class; "" for the whole file."""
    equivalent: str = ""
    """Why no test can notice it; "" if one must. Equivalents are not played."""

    @property
    def path(self) -> str:
        """Relative to the root of the checkout."""
        return self.file if self.file.startswith("packages/") else f"{PACKAGE}/{self.file}"

    def matches(self, pattern: str) -> bool:
        return any(fnmatch(text, pattern) for text in (self.name, self.file, self.path))

    def applied(self, source: str) -> str:
        """Return the source with the fault. Raises `Stale`."""
        begin, end = _extent(source, self.function)
        spans = _spans(source, begin, end, self.old)
        if len(spans) != 1:
            lines = [source.count("\n", 0, start) + 1 for start, _ in spans]
            where = (
                f"name its function: it begins in lines {lines}"
                if spans
                else _nearest(source, self.old)
            )
            scope = f"{self.path} {self.function}".strip()
            raise Stale(
                f"{self.name}: {scope} has its fragment {len(spans)} times, not once; {where}"
            )
        start, stop = spans[0]
        return source[:start] + self.new.strip() + source[stop:]


def _extent(source: str, function: str) -> tuple[int, int]:
    """Return the first and last offset of a function or class, or (0, 0) if there is none."""
    if not function:
        return 0, len(source)
    body: list[ast.stmt] = _statements(source)
    node: ast.stmt | None = None
    for name in function.split("."):
        node = next(
            (each for each in body if isinstance(each, DEFINITIONS) and each.name == name), None
        )
        if node is None:
            return 0, 0
        body = node.body
    lines = source.splitlines(keepends=True)
    assert node is not None and node.end_lineno is not None
    return sum(map(len, lines[: node.lineno - 1])), sum(map(len, lines[: node.end_lineno]))


def _spans(source: str, begin: int, end: int, fragment: str) -> list[tuple[int, int]]:
    """Return where the tokens of `fragment` are; its text, for one that is a part of a token."""
    tokens = [token for token in _tokens(source) if begin <= token[1] and token[2] <= end]
    texts = [text for text, _, _ in tokens]
    needed = [text for text, _, _ in _tokens("\n".join(map(str.strip, fragment.splitlines())))]
    size = len(needed)
    first = needed[0] if needed else None
    spans = [
        (tokens[n][1], tokens[n + size - 1][2])
        for n, text in enumerate(texts[: len(texts) - size + 1])
        if text == first and texts[n : n + size] == needed
    ]
    if spans or not (text := fragment.strip()):
        return spans
    starts = [n for n in range(begin, end) if source.startswith(text, n)] if text in source else []
    return [(n, n + len(text)) for n in starts]


@cache
def _tokens(source: str) -> list[tuple[str, int, int]]:
    """Return the tokens of Python, also of a part of it, each with the offsets of its text. Line
    ends, indentation, comments and a last comma in brackets are none."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    tokens: list[tuple[str, int, int]] = []
    with suppress(tokenize.TokenError, SyntaxError):  # Brackets of a part may be open.
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in LAYOUT:
                continue
            if token.string in CLOSING and tokens and tokens[-1][0] == ",":
                tokens.pop()
            begin = offsets[token.start[0] - 1] + token.start[1]
            tokens.append((token.string, begin, offsets[token.end[0] - 1] + token.end[1]))
    return tokens


def _nearest(source: str, fragment: str) -> str:
    """The line that is most like the first line of the fragment."""
    lines = {line.strip(): number for number, line in enumerate(source.splitlines(), 1)}
    first = fragment.strip().splitlines()[0].strip()
    holding = [line for line in lines if first in line]
    near = holding or get_close_matches(first, lines, 1, 0.3)
    return f"the nearest line is {lines[near[0]]}: {near[0]}" if near else "no line is like it"


def load(directory: Path = HERE) -> list[Mutant]:
    """All of them, in the order of the files. Raises `TypeError` or `KeyError` for an entry that is
    not complete."""
    return [
        _mutant(entry, section)
        for path in sorted(directory.glob("*.toml"))
        for section in tomllib.loads(path.read_text("utf-8"))["source"]
        for entry in section["mutants"]
    ]


def _mutant(entry: dict[str, Any], section: dict[str, Any]) -> Mutant:
    tests = entry.get("tests", section["tests"])
    file = section["file"]
    return Mutant(
        **entry
        | {
            "tests": tuple(tests),
            "file": file,
            "name": f"{file.removesuffix('.py')}:{entry['name']}",
        }
    )


def faults(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """What is wrong with the entry itself, without playing it."""
    found = [
        f"{mutant.name}: there is no {test}" for test in mutant.tests if not _is_there(test, root)
    ]
    try:
        ast.parse(mutant.applied((root / mutant.path).read_text("utf-8")))
    except Stale as stale:
        found.append(str(stale))
    except SyntaxError as error:
        found.append(f"{mutant.name}: the mutated source is no Python: {error}")
    if mutant.old == mutant.new:
        found.append(f"{mutant.name}: it changes nothing")
    return found


def _is_there(test: str, root: Path) -> bool:
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    if not path.exists():
        return False
    body = _statements(path.read_text("utf-8")) if names else []
    for name in names:
        found = next(
            (node for node in body if isinstance(node, DEFINITIONS) and node.name == name), None
        )
        if found is None:
            return False
        body = found.body
    return True


@cache
def _statements(source: str) -> list[ast.stmt]:
    """Many mutants name tests of the same file."""
    return ast.parse(source).body
