"""File operations of runs, one method each, for tests of failures."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import attrs

from trouper.protocol.private_files import DIRECTORY_MODE, FILE_MODE

Buffer: TypeAlias = bytes | memoryview

# IOV_MAX of Linux and macOS.
MAX_BUFFERS: Final = 1024
LOCK_POLL_S: Final = 0.002


@attrs.frozen
class File:
    """A regular file in a listing."""

    name: str
    bytes: int
    used_ns: int
    """Modification time, as last use: runs are never rewritten."""


class Disk:
    """The real disk. Every method raises `OSError`. No fsync: a file damaged by a power loss fails
    its checksums and is a miss."""

    def open(self, path: Path) -> int:
        """Open for reading, never through a symbolic link."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)

    def create(self, path: Path, nbytes: int) -> int:
        """Create a new file of `nbytes` for writing. An existing file is an error."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open_shared(self, path: Path) -> int:
        """Open or create a file that processes read, write and lock."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)

    def try_lock(self, fd: int) -> bool:
        """Lock until `fd` is closed; False if locked elsewhere, also in this process. File systems
        without locks always succeed."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in {
                errno.ENOLCK,
                errno.ENOTSUP,
                errno.EOPNOTSUPP,
                errno.ENOSYS,
                errno.EINVAL,
            }:
                raise
        return True

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """Read up to `count` bytes; empty at the end."""
        return os.pread(fd, count, offset)

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        if os.pwrite(fd, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        """Write at most `MAX_BUFFERS` buffers. Returns the bytes written."""
        return os.writev(fd, buffers)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)

    def stat(self, path: Path) -> File:
        found = path.stat(follow_symlinks=False)
        return File(path.name, found.st_size, found.st_mtime_ns)

    def touch(self, path: Path) -> None:
        os.utime(path, follow_symlinks=os.utime not in os.supports_follow_symlinks)

    def files(self, directory: Path) -> list[File]:
        """Another server may remove some meanwhile."""
        found = []
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        found.append(File(entry.name, stat.st_size, stat.st_mtime_ns))
                except FileNotFoundError:
                    continue
        return found

    def list_names(self, directory: Path) -> list[str]:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries]

    def directories(self, directory: Path) -> list[str]:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free


def lock_within(disk: Disk, fd: int, patience_s: float) -> bool:
    """Wait for the lock; whether it is held. Raises `OSError`."""
    deadline = time.monotonic() + patience_s
    while not disk.try_lock(fd):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOCK_POLL_S)
    return True


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer]) -> None:
    remaining = [view for view in map(_flat, buffers) if view.nbytes]
    first = 0
    while first < len(remaining):
        written = disk.writev(fd, remaining[first : first + MAX_BUFFERS])
        if written <= 0:
            raise OSError("the disk takes nothing more")
        while first < len(remaining) and written >= remaining[first].nbytes:
            written -= remaining[first].nbytes
            first += 1
        if written:
            remaining[first] = remaining[first][written:]


def read_all(disk: Disk, fd: int, count: int, offset: int) -> bytes:
    """Read `count` bytes, or fewer at the end. Raises `OSError`."""
    parts: list[bytes] = []
    while count > 0 and (part := disk.pread(fd, count, offset)):
        parts.append(part)
        count -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _flat(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
