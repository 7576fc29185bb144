"""Paths as people write them, and checks that never raise."""

# `Path.expanduser` raises RuntimeError, and before Python 3.14 `Path.is_dir` raises OSError for a
# name that is too long or below an unsearchable directory.

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trouper.protocol.problems import SettingsInvalid


def expanded(path: str) -> Path:
    """Replace ~ by the home directory. An unknown home (`~nobody`) stays, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - see above


def encodable(text: str) -> str:
    """Escape the bytes of a path that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def home_directory() -> Path:
    """The user's home directory. Raises `SettingsInvalid` for a user without one."""
    home = os.path.expanduser("~")  # noqa: PTH111 - see above
    if not os.path.isabs(home):  # noqa: PTH117 - see above
        raise SettingsInvalid(
            "this user has no home directory: set HOME to a directory, as in HOME=/var/lib/trouper"
        )
    return Path(home)


def xdg_directory(variable: str, default: str) -> Path:
    """The directory of XDG's variable, else the default at home. XDG ignores relative paths. Raises
    `SettingsInvalid`."""
    named = expanded(os.environ.get(variable, ""))
    return named if named.is_absolute() else home_directory() / default


def absolute_only(search_path: str) -> str:
    """A PATH without relative entries: the working directory may hold programs of strangers."""
    parts = search_path.split(os.pathsep)
    return os.pathsep.join(part for part in parts if Path(part).is_absolute())


def is_directory(path: str | Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - see above


def exists(path: str | Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - see above


def is_file(path: str | Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - see above


def within(path: str, directories: Iterable[str]) -> str | None:
    """The path without links and `..`, if inside one of these directories; else None."""
    try:
        meant = os.path.realpath(expanded(path))
    except ValueError:  # A byte that no path has.
        return None
    roots = [Path(os.path.realpath(expanded(directory))) for directory in directories]
    return meant if any(Path(meant).is_relative_to(root) for root in roots) else None
