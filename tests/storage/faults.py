"""A disk that fails, tears and forgets, by a seed; and damage to files that lie still."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from trouper.storage.file_operations import Buffer, Disk, File
from trouper.storage.run_format import SUFFIX

OFTEN = {
    "writev": 4,
    "create": 2,
    "rename": 2,
    "files": 2,
    "directories": 2,
    "close": 0.5,
    "open_shared": 0.2,
    "try_lock": 0.2,
    "pwrite": 0.2,
}
"""What happens once in a write fails more often than what happens in each read, so that both are
tried alike."""


class Crashed(BaseException):
    """The process is gone: nothing more happens on this disk, no cleaning up either."""


class FaultyDisk(Disk):
    """Each operation fails with probability `rate`, in one of the ways in which it can."""

    def __init__(self, random: Random, rate: float) -> None:
        self.random, self.rate = random, rate
        self.injected: Counter[str] = Counter()
        self.crashed = False

    def fault(self, operation: str, *kinds: str) -> str:
        """What happens now: one of `kinds`, or "" for nothing. Names of errors are raised."""
        if self.crashed:
            raise Crashed
        if self.random.random() >= self.rate * OFTEN.get(operation, 1):
            return ""
        kind = self.random.choice(kinds)
        self.injected[f"{operation} {kind}"] += 1
        if kind == "crash":
            self.crashed = True
            raise Crashed
        if number := getattr(errno, kind, 0):
            raise OSError(number, os.strerror(number))
        return kind

    def open(self, path: Path) -> int:
        if self.fault("open", "EIO", "EMFILE", "vanished"):
            path.unlink(missing_ok=True)
        return super().open(path)

    def create(self, path: Path, nbytes: int) -> int:
        self.fault("create", "ENOSPC", "EROFS", "EIO", "crash")
        return super().create(path, nbytes)

    def open_shared(self, path: Path) -> int:
        self.fault("open_shared", "EIO", "EMFILE", "EROFS", "crash")
        return super().open_shared(path)

    def try_lock(self, fd: int) -> bool:
        return not self.fault("try_lock", "EIO", "held") and super().try_lock(fd)

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        if self.fault("pwrite", "EIO", "ENOSPC", "torn", "crash"):
            os.pwrite(fd, data[: self.random.randrange(len(data))], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().pwrite(fd, data, offset)

    def close(self, fd: int) -> None:
        super().close(fd)
        self.fault("close", "EIO")

    def size(self, fd: int) -> int:
        self.fault("size", "EIO")
        return super().size(fd)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        match self.fault("pread", "EIO", "short", "torn", "flipped"):
            case "short":
                count = self.random.randint(1, count)
            case "torn":
                count = 0
            case "flipped":
                return flipped(self.random, super().pread(fd, count, offset))
        return super().pread(fd, count, offset)

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        kind = self.fault("writev", "EIO", "EDQUOT", "short", "full", "torn", "flipped", "crash")
        if not kind:
            return super().writev(fd, buffers)
        data = b"".join(buffers)
        if kind == "flipped":
            return os.write(fd, flipped(self.random, data))
        part = os.write(fd, data[: self.random.randint(1, len(data))])
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return part if kind == "short" else len(data)

    def rename(self, source: Path, target: Path) -> None:
        if self.fault("rename", "EIO", "EROFS", "crash", "power"):
            os.truncate(source, self.random.randint(0, source.stat().st_size))
            super().rename(source, target)
            self.crashed = True
            raise Crashed
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self.fault("unlink", "EIO", "EROFS", "crash")
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self.fault("mkdir", "EROFS", "ENOSPC")
        super().mkdir(path)

    def stat(self, path: Path) -> File:
        self.fault("stat", "EIO")
        return super().stat(path)

    def touch(self, path: Path) -> None:
        self.fault("touch", "EIO", "EROFS")
        super().touch(path)

    def files(self, directory: Path) -> list[File]:
        found = super().files(directory)
        if self.fault("files", "EIO", "vanished") and found:
            (directory / self.random.choice(found).name).unlink()
        return found

    def list_names(self, directory: Path) -> list[str]:
        self.fault("list_names", "EIO", "ENOENT", "crash")
        return super().list_names(directory)

    def directories(self, directory: Path) -> list[str]:
        self.fault("directories", "EIO")
        return super().directories(directory)

    def free_bytes(self, directory: Path) -> int:
        return self.random.randrange(4000) if self.fault("free", "EIO", "low") else 2**40


def flipped(random: Random, data: bytes) -> bytes:
    """One bit of it."""
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def damage(random: Random, directory: Path) -> str | None:
    """Do something bad to a random file; what it was, or None if there is no file."""
    files = sorted(path for path in directory.glob("*/*") if path.is_file())
    if not files:
        return None
    path, other = random.choice(files), random.choice(files)
    kind = random.choice(sorted(WAYS))
    WAYS[kind](random, path, other)
    return f"at rest {kind}"


def _swap(_: Random, path: Path, other: Path) -> None:
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


WAYS: dict[str, Callable[[Random, Path, Path], object]] = {
    "flipped": lambda random, path, other: path.write_bytes(flipped(random, path.read_bytes())),
    "truncated": lambda random, path, other: os.truncate(
        path, random.randint(0, path.stat().st_size)
    ),
    "emptied": lambda random, path, other: os.truncate(path, 0),
    "zeroed": lambda random, path, other: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda random, path, other: path.write_bytes(path.read_bytes() + random.randbytes(9)),
    "removed": lambda random, path, other: path.unlink(),
    "swapped": _swap,
    "moved over another": lambda random, path, other: path.replace(other),
    "garbage": lambda random, path, other: path.with_name(
        f"{random.randbytes(8).hex()}{SUFFIX}"
    ).write_bytes(b"{}"),
}
