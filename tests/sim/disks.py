"""Disks of simulated ranks: real files and the real SSDWriter, but its threads take virtual time, fail, and sometimes hang."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest import mock

import attrs
import trio

from trouper.actors import ssd_writer

T = TypeVar("T")
RANK: ContextVar[int] = ContextVar("RANK", default=0)
"""Whose task this is."""
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

    async def in_thread(self, work: Callable[[], T]) -> T:
        rank = RANK.get()
        if isinstance(work, partial) and work.func.__name__ == "read":
            self.reads[rank] += 1
            self.before_read(rank)
        hangs = self.chance.random() < self.hangs
        await trio.sleep(HANGS_S if hangs else self.chance.choice(QUICK_S))
        if self.chance.random() < self.fails:
            raise OSError(errno.EIO, "a simulated disk")
        return work()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with mock.patch.object(ssd_writer, "_in_thread", self.in_thread):
            yield


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
