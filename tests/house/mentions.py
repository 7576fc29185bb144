"""Mentions of modules and names in text: dotted, as paths, in pages, tests and mutants."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

HISTORY = {"CHANGELOG.md", "uv.lock"}
"""Files that say what was so, or that a program writes."""
MIN_HUMPS = 2
"""Capitals in a name that prose can only mean as a name."""


def list_texts(root: Path) -> Iterator[Path]:
    """Files in git, and new ones that git does not ignore; neither links nor binaries."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in sorted({*listed.split("\0")} - HISTORY - {""}):
        path = root / name
        if path.is_file() and not path.is_symlink() and b"\0" not in path.read_bytes():
            yield path


def rewrite(path: Path, patterns: dict[str, str]) -> bool:
    """Replaces each pattern by a fixed text. Whether the file has changed."""
    before = after = path.read_bytes().decode("utf-8")
    for pattern, replacement in patterns.items():
        after = re.sub(pattern, lambda _, text=replacement: text, after)  # type: ignore[misc]
    if after != before:
        path.write_bytes(after.encode())
    return after != before


def match_module(old: str, new: str, inside: Iterable[str] = ()) -> dict[str, str]:
    """Patterns of a module's dotted name and of its path, from the checkout and from its package.

    `inside` are the files of a package. Without the checkout's package, a path of one word is none
    (`run.py` could be any file's); those of the files inside follow.
    """
    patterns = {rf"(?<![\w.]){re.escape(old)}(?!\w)": new}
    old_path, new_path = old.replace(".", "/"), new.replace(".", "/")
    end = r"(?![\w-])" if inside else r"(?=\.py\b|:)"
    patterns |= _match_path(old_path, new_path, end)
    old_path, new_path = (path.partition("/")[2] for path in (old_path, new_path))
    if "/" in old_path:
        patterns |= _match_path(old_path, new_path, end)
    else:
        for file in inside:
            patterns |= _match_path(f"{old_path}/{file}", f"{new_path}/{file}", r"\b")
    return patterns


def _match_path(old: str, new: str, end: str) -> dict[str, str]:
    return {rf"(?<![\w/.-]){re.escape(old)}{end}": new}


def match_name(module: str, old: str, new: str) -> dict[str, str]:
    """Patterns of a name with its module before it, as in `a.b.Name` and `a/b.py::Name`."""
    path = module.replace(".", "/") + ".py"
    return {
        rf"(?<![\w.]){re.escape(module)}[.:]{re.escape(old)}(?!\w)": f"{module}.{new}",
        rf"(?<![\w/.-]){re.escape(path)}::{re.escape(old)}(?!\w)": f"{path}::{new}",
    }


def match_word(old: str, new: str) -> dict[str, str]:
    return {rf"\b{re.escape(old)}\b": new}


def rewrite_exports(path: Path, old: str, new: str) -> None:
    """In `__all__`."""
    text = path.read_text("utf-8")
    if exports := re.search(r"(?m)^__all__ = [\[(][^])]*", text):
        renamed = exports[0].replace(f'"{old}"', f'"{new}"')
        path.write_text(text.replace(exports[0], renamed), "utf-8")


def is_distinctive(name: str) -> bool:
    """Whether prose that has the word means the name: `ChunkSizer` and `free_rows`, not `Block`."""
    return "_" in name.strip("_") or sum(map(str.isupper, name)) >= MIN_HUMPS


def is_in_code(path: Path, name: str) -> bool:
    """Whether a Python file has the identifier outside strings and comments."""
    text = path.read_text("utf-8")
    if path.suffix != ".py" or name not in text:
        return False
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return any(token.type == tokenize.NAME and token.string == name for token in tokens)


def rewrite_mutants(path: Path, files: set[str], patterns: dict[str, str]) -> bool:
    """In fragments of source (`old`, `new`) of the sections of `files`, relative to the package."""
    before = path.read_text("utf-8")
    sections = re.split(r"(?m)^(?=\[\[source\]\])", before)
    for number, section in enumerate(sections):
        named = re.search(r'(?m)^file = "(.+)"$', section)
        if named and named[1] in files:
            sections[number] = _rewrite_fragments(section, patterns)
    after = "".join(sections)
    if after != before:
        path.write_text(after, "utf-8")
    return after != before


def _rewrite_fragments(section: str, patterns: dict[str, str]) -> str:
    """A fragment is one line, or several between three quotation marks."""
    fragment = r"""(?ms)^(?:old|new) = (?:('''|\"\"\").*?\1|[^\n]*)$"""

    def replace(match: re.Match[str]) -> str:
        text = match[0]
        for pattern, replacement in patterns.items():
            text = re.sub(pattern, replacement, text)
        return text

    return re.sub(fragment, replace, section)


def list_mentions(root: Path, word: str) -> Iterator[str]:
    """Lines of pages, and of Python's strings and comments, that still have a word."""
    pattern = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)")
    for path in list_texts(root):
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if pattern.search(line):
                yield f"{path.relative_to(root)}:{number}: {line.strip()}"
