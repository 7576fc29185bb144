"""Statistics, verification and removal of a cache directory, with or without a running server."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from trouper.protocol.blocks import TOKEN_BYTES
from trouper.storage import bounded_directory
from trouper.storage.cache_directory import TEMPORARY_SUFFIX, has_tag
from trouper.storage.file_operations import Disk, File
from trouper.storage.run_format import SUFFIX
from trouper.storage.run_reading import open_run
from trouper.storage.stored_blocks import Damaged, RunInfo

DISK = Disk()
SUMMED = ("files", "bytes", "blocks", "snapshots", "tokens", "unreadable")


@attrs.frozen
class NamespaceStats:
    """One model and KV format."""

    name: str
    files: int = 0
    bytes: int = 0
    blocks: int = 0
    snapshots: int = 0
    tokens: int = 0
    """A block in several files counts once for each."""
    unreadable: int = 0
    """Files with a damaged header."""
    oldest_s: float = 0.0
    newest_s: float = 0.0
    """Age of the most recently used file; `oldest_s`: of the least recently used."""


@attrs.frozen
class FileCheck:
    path: Path
    bytes: int
    problem: str | None


@attrs.frozen
class Removed:
    files: int
    bytes: int


def namespaces(directory: Path) -> list[NamespaceStats]:
    """List namespaces, most recently used first; none for a missing directory. Raises `OSError`,
    also for a directory of others."""
    stats = [_stats(path) for path in _namespaces(directory)]
    return sorted(
        (entry for entry in stats if entry.files), key=lambda entry: (entry.newest_s, entry.name)
    )


def total(stats: Sequence[NamespaceStats]) -> NamespaceStats:
    sums = {name: sum(getattr(entry, name) for entry in stats) for name in SUMMED}
    oldest_s = max((entry.oldest_s for entry in stats), default=0.0)
    newest_s = min((entry.newest_s for entry in stats), default=0.0)
    return NamespaceStats("total", **sums, oldest_s=oldest_s, newest_s=newest_s)


def runs(directory: Path) -> list[tuple[Path, int]]:
    """List every file of blocks with its bytes. Raises as `namespaces` does."""
    return [
        (path / file.name, file.bytes)
        for path in _namespaces(directory)
        for file in _files(path)
        if file.name.endswith(SUFFIX)
    ]


def verify(files: Iterable[tuple[Path, int]], *, remove: bool = False) -> Iterator[FileCheck]:
    """Read each file; `remove`: delete damaged ones. Files that vanish are no problem, unreadable
    files stay. Raises `OSError` if a file cannot be removed."""
    for path, size in files:
        problem = None
        try:
            _verify(path)
        except Damaged as damaged:
            if damaged.reason != "vanished":
                problem = f"{damaged.reason}: {damaged.detail}"
                if remove:
                    path.unlink(missing_ok=True)
        except OSError as error:
            problem = f"unreadable: {error.strerror}"
        yield FileCheck(path, size, problem)


def clear(directory: Path) -> Removed:
    """Remove all stored files. A running server goes on, with cache misses. Raises as `namespaces`
    does."""
    files = size = 0
    for path in _namespaces(directory):
        for file in _files(path):
            if file.name.endswith((SUFFIX, TEMPORARY_SUFFIX)):
                (path / file.name).unlink(missing_ok=True)
                files, size = files + 1, size + file.bytes
        with suppress(OSError):  # A server writes there, or it holds a foreign file.
            path.rmdir()
    return Removed(files, size)


def _verify(path: Path) -> None:
    with open_run(DISK, path) as run:
        if not run.header.namespace.startswith(path.parent.name):
            raise Damaged(path.name, "foreign", "of another namespace")
        run.everything()


def _namespaces(directory: Path) -> list[Path]:
    try:
        names = sorted(bounded_directory.namespaces(DISK, directory))
    except FileNotFoundError:
        return []
    if not has_tag(directory):
        raise OSError(errno.EINVAL, "was not made by trouper", str(directory))
    return [directory / name for name in names]


def _files(path: Path) -> list[File]:
    with suppress(FileNotFoundError):
        return DISK.files(path)
    return []


def _stats(path: Path) -> NamespaceStats:
    files = [file for file in _files(path) if file.name.endswith(SUFFIX)]
    infos = [_info(path / file.name) for file in files]
    entries = [entry for info in infos if info is not None for entry in info.blocks]
    now_ns = time.time_ns()
    ages = [max(0.0, (now_ns - file.used_ns) / 1e9) for file in files]
    return NamespaceStats(
        path.name,
        files=len(files),
        bytes=sum(file.bytes for file in files),
        blocks=sum(entry.payload_bytes > 0 for entry in entries),
        snapshots=sum(entry.snapshot_bytes is not None for entry in entries),
        tokens=sum(len(entry.tokens) // TOKEN_BYTES for entry in entries if entry.payload_bytes),
        unreadable=infos.count(None),
        oldest_s=max(ages, default=0.0),
        newest_s=min(ages, default=0.0),
    )


def _info(path: Path) -> RunInfo | None:
    with suppress(Damaged, OSError), open_run(DISK, path) as opened:
        return opened.header.info
    return None
