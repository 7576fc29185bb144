"""The list of mutants, read from the TOML files beside this one, and what is wrong with an entry."""

from __future__ import annotations

import ast
import tomllib
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGE = "trouper"


class Stale(Exception):
    """The source no longer has what a mutant replaces, or has it twice. The message says where it may be now."""


@attrs.frozen(kw_only=True)
class Mutant:
    """One fault: `old` occurs once in `file` and becomes `new`; one of `tests` (pytest's node ids) must then fail."""

    name: str
    file: str
    """Relative to the package."""
    breaks: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""
    """Why no test can notice it; "" if one must. Equivalents are not played."""

    @property
    def path(self) -> str:
        """Relative to the root of the checkout."""
        return f"{PACKAGE}/{self.file}"

    def matches(self, pattern: str) -> bool:
        return any(fnmatch(text, pattern) for text in (self.name, self.file, self.path))

    def applied(self, source: str) -> str:
        """The source with the fault. Raises `Stale`."""
        count = source.count(self.old)
        if count != 1:
            where = _nearest(source, self.old) if not count else _all_lines(source, self.old)
            raise Stale(f"{self.name}: {self.path} has its fragment {count} times, not once; {where}")
        return source.replace(self.old, self.new)


def _nearest(source: str, fragment: str) -> str:
    """The line that is most like the first line of the fragment."""
    lines = {line.strip(): number for number, line in enumerate(source.splitlines(), 1)}
    first = fragment.strip().splitlines()[0].strip()
    holding = [line for line in lines if first in line]
    near = holding or get_close_matches(first, lines, 1, 0.3)
    return f"the nearest line is {lines[near[0]]}: {near[0]}" if near else "no line is like it"


def _all_lines(source: str, fragment: str) -> str:
    parts = source.split(fragment)[:-1]
    places = [
        sum(part.count("\n") for part in parts[: n + 1]) + n * fragment.count("\n") + 1 for n in range(len(parts))
    ]
    return f"make it longer: it begins in lines {', '.join(map(str, places))}"


def load(directory: Path = HERE) -> list[Mutant]:
    """All of them, in the order of the files. Raises `TypeError` or `KeyError` for an entry that is not complete."""
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
        **entry | {"tests": tuple(tests), "file": file, "name": f"{file.removesuffix('.py')}:{entry['name']}"}
    )


def faults(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """What is wrong with the entry itself, without playing it."""
    found = [f"{mutant.name}: there is no {test}" for test in mutant.tests if not _is_there(test, root)]
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
        kinds = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        found = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
        if found is None:
            return False
        body = found.body
    return True


@cache
def _statements(source: str) -> list[ast.stmt]:
    """Many mutants name tests of the same file."""
    return ast.parse(source).body
