from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from trouper.protocol.private_files import FILE_MODE, make_private

TEMPORARY_SUFFIX = ".tmp"
# Older temporary files have no writer: the slowest write takes seconds.
TEMPORARY_AGE_S = 3600.0
# Tolerance for times in the future: clocks of servers and network disks differ.
AHEAD_S = 3600.0
TAG = "CACHEDIR.TAG"
# File with the bytes of the directory, which all writers update.
USAGE = "usage"
# Backup programs skip a tagged directory. The tag also marks files as Trouper's, which may be
# removed.
TAG_TEXT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# Trouper's KV blocks; safe to remove. https://bford.info/cachedir\n"
)


@attrs.frozen
class DiskLimits:
    max_bytes: int
    keep_free_bytes: int = 0


NO_DISK_LIMITS = DiskLimits(2**63)


@attrs.frozen
class DirectoryUsage:
    files: int
    bytes: int
    free_disk_bytes: int
    swept_files: int


def prepare(directory: Path) -> None:
    """Create the directory, private. Raises `OSError`, also for a directory with foreign files."""
    is_ours = directory.exists() and _is_ours(directory)
    make_private(directory)
    probe = write_temporary(directory / TAG, TAG_TEXT)
    if is_ours:
        probe.unlink(missing_ok=True)
    else:
        probe.replace(directory / TAG)


def _is_ours(directory: Path) -> bool:
    # Whether our tag is there; False if empty. Raises `OSError` for foreign files.
    used = any(not path.name.endswith(TEMPORARY_SUFFIX) for path in directory.iterdir())
    # Checked last: another server may be writing the tag, too.
    if has_tag(directory):
        return True
    if used:
        why = "is not empty and was not made by trouper; name a new or an empty directory"
        raise OSError(errno.ENOTEMPTY, why, str(directory))
    return False


def has_tag(directory: Path) -> bool:
    """Whether the directory is Trouper's. Raises `OSError`."""
    tag = directory / TAG
    return tag.exists() and tag.read_bytes() == TAG_TEXT


def write_temporary(path: Path, data: bytes) -> Path:
    """Write a temporary file for `path`, with a random name, since servers may share a process id.
    Raises `OSError`."""
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    temporary.touch(FILE_MODE, exist_ok=False)
    try:
        temporary.write_bytes(data)
    except OSError:
        _remove(temporary)
        raise
    return temporary


def sweep(directory: Path, ttl_s: float) -> DirectoryUsage:
    """Remove abandoned temporary files and files unused for `ttl_s`. Files that vanish or cannot be
    removed are no error."""
    # A last use in the future (a wrong clock) becomes now: the file would stay for ever.
    now = time.time()
    kept = kept_bytes = swept = 0
    for entry, stat in _files(directory):
        age = now - max(stat.st_mtime, stat.st_atime)
        due = age > (TEMPORARY_AGE_S if entry.name.endswith(TEMPORARY_SUFFIX) else ttl_s)
        if due and _remove(Path(entry.path)):
            swept += 1
        else:
            if age < -AHEAD_S:
                _use_now(entry)
            kept += 1
            kept_bytes += stat.st_size
    return DirectoryUsage(kept, kept_bytes, shutil.disk_usage(directory).free, swept)


def _remove(path: Path) -> bool:
    # Return whether the file is gone.
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _use_now(entry: os.DirEntry[str]) -> None:
    with suppress(OSError):  # Vanished, or of another user.
        os.utime(entry.path, follow_symlinks=os.utime not in os.supports_follow_symlinks)


def _files(directory: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                if entry.name in {TAG, USAGE}:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    yield entry, entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
