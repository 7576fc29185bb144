"""`just move OLD NEW`: moves a module or a package, or renames a name of a module, everywhere.

    just move trouper.rooms.old_file trouper.halls.new_file
    just move trouper.rooms.old_file:OldName NewName

Rope rewrites the code. Dotted names and paths in strings, pages, pyproject.toml and mutants follow;
imports are sorted. Mentions that are left to the reader's judgement are printed.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rope.base.change import ChangeSet
from rope.base.fscommands import FileSystemCommands
from rope.base.project import Project
from rope.base.resources import Resource
from rope.refactor.move import create_move
from rope.refactor.rename import Rename

from tests.house import mentions

ROOT = Path(__file__).parent.parent.parent
SHOWN = 20
IGNORED = [".git", ".venv", "__pycache__", "*.pyc", "site", "dist", "build", "node_modules"]


class CannotMove(Exception):
    """OLD is not there, NEW is, or one of them is no name."""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="just move",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", help="a module or package, or MODULE:NAME")
    parser.add_argument("new", help="its new dotted name, or the new NAME")
    options = parser.parse_args(arguments)
    try:
        for line in move(root, options.old, options.new):
            print(line)
    except CannotMove as error:
        print(f"just move: {error}", file=sys.stderr)
        return 2
    return 0


def move(root: Path, old: str, new: str) -> list[str]:
    """Lines to show: files that have changed, and mentions that are left. Raises `CannotMove`."""
    module, _, name = old.partition(":")
    _find(root, module)
    if name:
        changed, left = _rename_name(root, module, name, new.rpartition(":")[2])
    else:
        changed, left = _move_module(root, old, new)
    _tidy(root, changed)
    there = sorted(path for path in changed if path.is_file())
    shown = [f"changed: {path.relative_to(root)}" for path in there]
    if left:
        shown += ["still mentioned, perhaps in another sense:", *left[:SHOWN]]
        shown += [f"... and {len(left) - SHOWN} more"] * (len(left) > SHOWN)
    return shown


def _find(root: Path, module: str) -> Path:
    base = root.joinpath(*module.split("."))
    for path in (base, base.with_suffix(".py")):
        if path.exists():
            return path
    raise CannotMove(f"there is no module {module}")


def _open(root: Path) -> Project:
    return Project(
        str(root),
        FileSystemCommands(),
        ropefolder=None,
        ignored_resources=IGNORED,
        ignore_syntax_errors=True,
    )


# -- modules -------------------------------------------------------------------------------------


def _move_module(root: Path, old: str, new: str) -> tuple[set[Path], list[str]]:
    parent, _, leaf = new.rpartition(".")
    _check_target(root, parent, leaf)
    source = _find(root, old)
    is_package = source.is_dir()
    inside = [path.relative_to(source).as_posix() for path in source.rglob("*.py")]
    _check_importers(root, old, leaf)
    project = _open(root)
    changed: set[Path] = set()
    old_parent, _, old_leaf = old.rpartition(".")
    # A name that is free in both packages, since either may have a file of the old or new name.
    passing = leaf if not _exists(root, f"{old_parent}.{leaf}") else f"{leaf}_moving"
    if passing != old_leaf:
        changed |= _rename_module(root, project, old, passing)
    if parent != old_parent:
        at = f"{old_parent}.{passing}"
        mover = create_move(project, _get_resource(root, project, at))
        folder = project.get_resource(parent.replace(".", "/"))
        changed |= _apply(root, project, mover.get_changes(folder))
    if passing != leaf:
        changed |= _rename_module(root, project, f"{parent}.{passing}", leaf)
    project.close()
    patterns = mentions.match_module(old, new, inside)
    bare = old_leaf + ("/" if is_package else ".py")
    if parent == old_parent and not is_package and not any(root.glob(f"*/**/{bare}")):
        patterns |= {rf"(?<![\w./-]){re.escape(bare)}\b": f"{leaf}.py"}
    changed |= {path for path in mentions.list_texts(root) if mentions.rewrite(path, patterns)}
    if leaf != old_leaf:
        changed |= _rewrite_mutants(root, changed, {rf"\b{old_leaf}\.": f"{leaf}."})
    return changed, [*mentions.list_mentions(root, bare)]


def _check_target(root: Path, parent: str, leaf: str) -> None:
    if not leaf.isidentifier() or not parent:
        raise CannotMove(f"{parent}.{leaf} is no dotted name of a module in a package")
    if not root.joinpath(*parent.split("."), "__init__.py").exists():
        raise CannotMove(f"there is no package {parent}: make its directory and __init__.py first")
    if _exists(root, f"{parent}.{leaf}"):
        raise CannotMove(f"{parent}.{leaf} is there already")


def _check_importers(root: Path, old: str, leaf: str) -> None:
    """Rope would let `from package import leaf` hide what a file calls by that name."""
    parent, _, old_leaf = old.rpartition(".")
    names = rf"[^)\n]*(?:\([^)]*)?\b{old_leaf}\b"
    line = re.compile(rf"(?m)^\s*from {re.escape(parent)} import\b{names}")
    for path in mentions.list_texts(root):
        if leaf != old_leaf and path.suffix == ".py" and line.search(path.read_text("utf-8")):
            _check_free(path, leaf)


def _check_free(path: Path, name: str) -> None:
    if mentions.is_in_code(path, name):
        fault = f"{path.name} uses the name {name} already"
        raise CannotMove(f"{fault}: choose another, or rename that first")


def _exists(root: Path, module: str) -> bool:
    base = root.joinpath(*module.split("."))
    return base.exists() or base.with_suffix(".py").exists()


def _get_resource(root: Path, project: Project, module: str) -> Resource:
    return project.get_resource(_find(root, module).relative_to(root).as_posix())


def _rename_module(root: Path, project: Project, module: str, leaf: str) -> set[Path]:
    renaming = Rename(project, _get_resource(root, project, module))
    return _apply(root, project, renaming.get_changes(leaf))


def _apply(root: Path, project: Project, changes: ChangeSet) -> set[Path]:
    """Files of the code that have changed and are still there."""
    project.do(changes)
    return {root / resource.path for resource in changes.get_changed_resources()}


# -- names ---------------------------------------------------------------------------------------


def _rename_name(root: Path, module: str, old: str, new: str) -> tuple[set[Path], list[str]]:
    if not new.isidentifier():
        raise CannotMove(f"{new} is no identifier")
    file = _find(root, module)
    file = file / "__init__.py" if file.is_dir() else file
    offset = _find_definition(file, old)
    project = _open(root)
    resource = project.get_resource(file.relative_to(root).as_posix())
    changes = Rename(project, resource, offset).get_changes(new)
    for affected in changes.get_changed_resources():
        _check_free(root / affected.path, new)
    changed = _apply(root, project, changes)
    project.close()
    for path in changed:
        mentions.rewrite_exports(path, old, new)
    changed |= _rewrite_mutants(root, changed, mentions.match_word(old, new))
    patterns = mentions.match_name(module, old, new)
    texts = [*mentions.list_texts(root)]
    if mentions.is_distinctive(old) and not any(mentions.is_in_code(path, old) for path in texts):
        patterns |= mentions.match_word(old, new)
    changed |= {path for path in texts if mentions.rewrite(path, patterns)}
    return changed, [*mentions.list_mentions(root, old)]


def _find_definition(file: Path, name: str) -> int:
    """Where a class, function or variable of a module is defined, as an offset."""
    escaped = re.escape(name)
    definition = rf"(?m)^(?:(?:async )?def |class |)(?={escaped}\b\s*[\[(:=])"
    if match := re.search(definition, file.read_text("utf-8")):
        return match.end()
    raise CannotMove(f"{file.name} defines no class, function or variable {name}")


def _rewrite_mutants(root: Path, changed: set[Path], patterns: dict[str, str]) -> set[Path]:
    package = root / "trouper"
    inside = [path for path in changed if path.is_relative_to(package)]
    files = {path.relative_to(package).as_posix() for path in inside}
    entries = (root / "tests" / "mutants").glob("*.toml")
    return {path for path in entries if mentions.rewrite_mutants(path, files, patterns)}


# -- afterwards ----------------------------------------------------------------------------------


def _tidy(root: Path, changed: set[Path]) -> None:
    """Sorts imports and formats what has changed."""
    files = [str(path) for path in changed if path.suffix == ".py" and path.exists()]
    for command in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        if files:
            words = [sys.executable, "-m", "ruff", *command, *files]
            subprocess.run(words, cwd=root, check=True)


if __name__ == "__main__":
    sys.exit(main())
