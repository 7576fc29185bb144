"""Size and last use of all runs, for eviction."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from trouper.storage.file_operations import Disk


@attrs.frozen
class RunUse:
    bytes: int
    used_ns: int


class RunUses:
    def __init__(self, disk: Disk, uses: Mapping[Path, RunUse]) -> None:
        self._disk, self._uses = disk, dict(uses)
        self.total_bytes = sum(use.bytes for use in uses.values())

    def record(self, path: Path, use: RunUse) -> None:
        self.remove(path)
        self._uses[path] = use
        self.total_bytes += use.bytes

    def record_use(self, path: Path, used_ns: int) -> None:
        """Record a later use of a known run."""
        if path in self._uses:
            self.record(path, RunUse(self._uses[path].bytes, used_ns))

    def remove(self, path: Path) -> None:
        use = self._uses.pop(path, None)
        if use is not None:
            self.total_bytes -= use.bytes

    def least_recently_used(self) -> Iterator[Path]:
        """Paths by last use. Runs that another server has used since come later."""
        oldest = [(use.used_ns, path) for path, use in self._uses.items()]
        heapq.heapify(oldest)
        while oldest:
            used_ns, path = heapq.heappop(oldest)
            later_ns = self._used_since(path, used_ns)
            if later_ns is None:
                yield path
            else:
                heapq.heappush(oldest, (later_ns, path))

    def _used_since(self, path: Path, used_ns: int) -> int | None:
        # The later time of use by another server, or None.
        with suppress(OSError):
            file = self._disk.stat(path)
            if file.used_ns > used_ns:
                self.record(path, RunUse(file.bytes, file.used_ns))
                return file.used_ns
        return None
