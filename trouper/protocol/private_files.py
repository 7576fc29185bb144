# The owner of a directory may replace any file inside, and so may anybody with write access to a
# directory above, unless that one is sticky as /tmp is.

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

# The files hold users' text, or are trusted.
DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
OTHERS = 0o077


def make_private(directory: Path) -> None:
    """Make a directory that only this user may read, with missing parents. Closes an existing
    directory to others. Raises `OSError`, also for an owner or writers other than this user."""
    make_parents(directory)
    directory.mkdir(DIRECTORY_MODE, exist_ok=True)
    info = directory.stat()
    if info.st_uid != os.geteuid():
        remedy = "name a directory of your own, or make it yours with chown"
        why = f"it belongs to {user_of(info.st_uid)}: {remedy}"
        raise PermissionError(errno.EPERM, why, str(directory))
    if others_write(info) and any(directory.iterdir()):
        remedy = "remove it, or, if every file in it is yours, chmod 700"
        raise PermissionError(errno.EPERM, f"others may write there: {remedy}", str(directory))
    if info.st_mode & OTHERS:
        directory.chmod(DIRECTORY_MODE)


def make_parents(path: Path) -> None:
    """Make missing parents private; `Path.mkdir(parents=True)` would follow the umask. Raises
    `OSError`."""
    for parent in reversed(path.parents):
        if not os.path.lexists(parent):
            parent.mkdir(DIRECTORY_MODE, exist_ok=True)


def who_may_change(path: Path) -> str:
    """Say which other user may replace a file or directory, or one above; "" if only root may."""
    resolved = Path(os.path.realpath(path))
    named = path.absolute()
    for each in dict.fromkeys((resolved, *resolved.parents, named, *named.parents)):
        info = each.lstat()
        if not _is_trusted(info.st_uid):
            return f"{each} belongs to {user_of(info.st_uid)}"
        sticky = info.st_mode & stat.S_ISVTX and each not in (resolved, named)
        if others_write(info) and not sticky:
            return f"{each} may be written by others"
    return ""


def owner_or_writers(path: Path) -> str:
    """As `who_may_change`, without the directories above."""
    uid = path.stat().st_uid
    if not _is_trusted(uid):
        return f"it belongs to {user_of(uid)}"
    return "others may write to it" if others_may_write(path) else ""


def others_may_write(path: Path) -> bool:
    """Whether others may write; False for a missing file."""
    return path.exists() and others_write(path.stat())


def others_may_read(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IROTH)


def others_write(info: os.stat_result) -> bool:
    """Whether others may write. A group of the owner alone does not count."""
    if stat.S_ISLNK(info.st_mode):
        return False
    by_group = info.st_mode & stat.S_IWGRP and not _is_private_group(info)
    return bool(info.st_mode & stat.S_IWOTH or by_group)


def _is_private_group(info: os.stat_result) -> bool:
    try:
        group, owner = grp.getgrgid(info.st_gid), pwd.getpwuid(info.st_uid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def _is_trusted(uid: int) -> bool:
    # Root is also the owner of /, whom a user namespace shows as nobody.
    return uid in (os.geteuid(), 0, os.stat("/").st_uid)  # noqa: PTH116 - often called


def user_of(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"the user {uid}"
