"""The cache directory: private, measured, and free of what a crash left behind."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

TEMPORARY_SUFFIX = ".tmp"
ORPHAN_AGE_S = 3600.0
"""A temporary file older than this has no writer: the slowest write takes seconds."""


@attrs.frozen
class Measured:
    """A directory after a sweep."""

    files: int
    bytes: int
    free_disk_bytes: int
    swept_files: int


def prepare(directory: Path) -> None:
    """Make the directory, readable by its owner only: its files hold users' text. Raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    directory.chmod(0o700)
    probe = directory / f"probe-{os.getpid()}{TEMPORARY_SUFFIX}"
    probe.write_bytes(b"")
    probe.unlink()


def sweep(directory: Path, ttl_s: float) -> Measured:
    """Remove orphans and files unused for `ttl_s`; another server may share the directory, so a vanished file is fine."""
    now = time.time()
    kept = kept_bytes = swept = 0
    for entry, stat in _files(directory):
        age = now - max(stat.st_mtime, stat.st_atime)
        if age > (ORPHAN_AGE_S if entry.name.endswith(TEMPORARY_SUFFIX) else ttl_s):
            Path(entry.path).unlink(missing_ok=True)
            swept += 1
        else:
            kept += 1
            kept_bytes += stat.st_size
    return Measured(kept, kept_bytes, shutil.disk_usage(directory).free, swept)


def _files(directory: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    yield entry, entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
