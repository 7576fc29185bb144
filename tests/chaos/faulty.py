"""`python -m tests.chaos.faulty FILE serve ...`: the command on a disk that may be slow, with a
clock that may be moved.

FILE has 16 bytes: how far the time of day is moved, and how long each operation on a cached file
takes, in seconds. Whoever started the process writes them while it runs.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trouper.cli import main
from trouper.storage.file_operations import Disk

FORMAT = struct.Struct("dd")
SLOW = ("open", "create", "pread", "writev", "rename", "unlink", "files", "free_bytes")


class Dials:
    """The file, on either side."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(FORMAT.pack(0.0, 0.0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), FORMAT.size)

    @property
    def moved_s(self) -> float:
        return float(FORMAT.unpack(self._memory[:])[0])

    @property
    def delay_s(self) -> float:
        return float(FORMAT.unpack(self._memory[:])[1])

    def turn(self, moved_s: float = 0.0, delay_s: float = 0.0) -> None:
        self._memory[:] = FORMAT.pack(moved_s, delay_s)


def plant(dials: Dials) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + dials.moved_s
    time.time_ns = lambda: nanoseconds() + int(dials.moved_s * 1e9)
    for name in SLOW:
        setattr(Disk, name, _slow(getattr(Disk, name), dials))


def _slow(operation: Callable[..., Any], dials: Dials) -> Callable[..., Any]:
    def slowed(*arguments: Any) -> Any:
        if delay_s := dials.delay_s:
            time.sleep(delay_s)
        return operation(*arguments)

    return slowed


if __name__ == "__main__":
    plant(Dials(Path(sys.argv.pop(1))))
    main()
