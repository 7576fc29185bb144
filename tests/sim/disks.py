"""Disks of simulated ranks: real files and the real SSDWriter, but its threads take virtual time,
fail, and sometimes hang."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import attrs
import trio

from trouper.actors.runtime.disk_orders import DiskWriter
from trouper.actors.runtime.worker_threads import DiskThread
from trouper.actors.ssd_writer import write_to_disk

T = TypeVar("T")
QUICK_S = (0.0, 0.001, 0.01, 0.2)
HANGS_S = 200.0
"""Longer than anybody waits for a disk."""


@attrs.define(eq=False)
class SimDisks:
    """`fails`, `hangs`: the chance of each piece of work."""

    chance: Random
    fails: float = 0.0
    hangs: float = 0.0
    reads: Counter[int] = attrs.field(factory=Counter)
    """Of each rank."""
    before_read: Callable[[int], None] = lambda _: None
    """Hears which rank is about to read; may raise."""

    @classmethod
    def draw(cls, chance: Random) -> SimDisks:
        return cls(chance, chance.choice((0, 0, 0.02, 0.1)), chance.choice((0, 0, 0.01)))

    def writer(self, rank: int) -> DiskWriter:
        """The SSDWriter of a rank, on its simulated disk."""
        return partial(write_to_disk, thread=SimDiskThread(self, rank))


class SimDiskThread(DiskThread):
    def __init__(self, disks: SimDisks, rank: int) -> None:
        self._disks, self._rank = disks, rank

    async def run(self, work: Callable[[], T]) -> T:
        disks = self._disks
        if isinstance(work, partial) and work.func.__name__ == "read":
            disks.reads[self._rank] += 1
            disks.before_read(self._rank)
        hangs = disks.chance.random() < disks.hangs
        await trio.sleep(HANGS_S if hangs else disks.chance.choice(QUICK_S))
        if disks.chance.random() < disks.fails:
            raise OSError(errno.EIO, "a simulated disk")
        return work()


def lose_files(directory: Path, chance: Random) -> None:
    """Between two lives: whatever happens to files. Some go, some are damaged, of whatever rank."""
    how: list[Any] = [Path.unlink, _damage, _keep, _keep]
    for path in sorted(directory.glob("*/*.safetensors")):
        chance.choice(how)(path)


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)


def _keep(path: Path) -> None:
    assert path.exists()
