"""Paths as people write them, and questions about them that are never an error.

`Path.expanduser` raises RuntimeError, and before Python 3.14 `Path.is_dir` raises OSError for a
name that is too long, or one below a directory that may not be searched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trouper.protocol.problems import SettingsInvalid


def expanded(path: str) -> Path:
    """Return the path with a home directory for ~. Where that is not known (`~nobody`) the path
    stays, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - see above


def encodable(text: str) -> str:
    """Return a path, or a text that quotes one, as text that can be sent: bytes of a name that are
    no UTF-8 are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def home_directory() -> Path:
    """Return the user's home directory. Raises `SettingsInvalid` for a user who has none."""
    home = os.path.expanduser("~")  # noqa: PTH111 - see above
    if not os.path.isabs(home):  # noqa: PTH117 - see above
        raise SettingsInvalid(
            "this user has no home directory: set HOME to a directory, as in HOME=/var/lib/trouper"
        )
    return Path(home)


def xdg_directory(variable: str, default: str) -> Path:
    """Return the directory that a variable of XDG's names, else the default in the user's home. A
    relative path does not count, as XDG says: it depends on the working directory. Raises
    `SettingsInvalid`."""
    named = expanded(os.environ.get(variable, ""))
    return named if named.is_absolute() else home_directory() / default


def absolute_only(search_path: str) -> str:
    """Return a PATH without what depends on the working directory: programs of strangers."""
    parts = search_path.split(os.pathsep)
    return os.pathsep.join(part for part in parts if Path(part).is_absolute())


def is_directory(path: str | Path) -> bool:
    """Whether there is such a directory, as far as this user may know."""
    return os.path.isdir(path)  # noqa: PTH112 - see above


def exists(path: str | Path) -> bool:
    """Whether there is something, as far as this user may know."""
    return os.path.exists(path)  # noqa: PTH110 - see above


def is_file(path: str | Path) -> bool:
    """Whether there is such a file, as far as this user may know."""
    return os.path.isfile(path)  # noqa: PTH113 - see above


def within(path: str, directories: Iterable[str]) -> str | None:
    """Return the path that is meant, without links and `..`, if it is one of these directories or
    below one; None: it is not."""
    try:
        meant = os.path.realpath(expanded(path))
    except ValueError:  # A byte that no path has.
        return None
    roots = [Path(os.path.realpath(expanded(directory))) for directory in directories]
    return meant if any(Path(meant).is_relative_to(root) for root in roots) else None
