"""Faults, drawn by a seed: what happens to a server, when in its load, and for how long."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Literal, get_args

import attrs
import psutil
import trio

from tests.chaos.house import DISK_BYTES, House

Kind = Literal[
    "killed", "stopped", "disk full", "disk slow", "clock", "descriptors", "decoder killed"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
DAY_S = 86400.0
LOAD_S = 1.2
"""The load lasts about so long on a quiet machine; faults begin within it."""


@attrs.frozen
class Fault:
    kind: Kind
    after_s: float
    lasts_s: float
    amount: float = 0.0
    """Seconds of the clock or of each operation; descriptors that are left."""

    def __str__(self) -> str:
        return f"{self.kind} at {self.after_s:.2f} for {self.lasts_s:.2f} s ({self.amount:g})"


def drawn(chance: Random) -> list[Fault]:
    """One to three, of different kinds."""
    return [_fault(chance, kind) for kind in chance.sample(KINDS, chance.choice((1, 2, 2, 3)))]


def _fault(chance: Random, kind: Kind) -> Fault:
    after_s, lasts_s = chance.uniform(0, LOAD_S), chance.uniform(0.1, 1.0)
    amounts: dict[Kind, float] = {
        "clock": chance.choice((-1, 1))
        * chance.choice((1.0, 3600.0, DAY_S, 30 * DAY_S, 3650 * DAY_S)),
        "disk slow": chance.choice((0.005, 0.05, 0.3)),
        "descriptors": chance.randrange(4),
    }
    return Fault(kind, after_s, lasts_s, amounts.get(kind, 0.0))


@attrs.define
class Hand:
    """Does the faults to a house, and takes them back. `revive`: starts it again after a kill."""

    house: House
    revive: Callable[[], None]
    moved_s: float = 0.0
    delay_s: float = 0.0
    killed: bool = False

    async def do(self, fault: Fault) -> None:
        await trio.sleep(fault.after_s)
        match fault.kind:
            case "killed":
                await self._kill()
            case "stopped":
                await self._stop(fault.lasts_s)
            case "disk full":
                await self._fill(fault.lasts_s)
            case "disk slow":
                self.delay_s = fault.amount
                self._turn()
                await trio.sleep(fault.lasts_s)
                self.delay_s = 0.0
                self._turn()
            case "clock":
                self.moved_s = fault.amount
                self._turn()
                await trio.sleep(fault.lasts_s)
                self.moved_s = 0.0
                self._turn()
            case "descriptors":
                await self._limit(int(fault.amount), fault.lasts_s)
            case "decoder killed":
                await self._kill_decoders(fault.lasts_s)

    def _turn(self) -> None:
        self.house.dials().turn(self.moved_s, self.delay_s)

    async def _kill(self) -> None:
        self.killed = True
        self.house.kill()
        self.house.start()
        self._turn()
        await trio.to_thread.run_sync(self.revive)

    async def _kill_decoders(self, seconds: float) -> None:
        """Each process that decodes images, again and again."""
        with trio.move_on_after(seconds):
            while True:
                for decoder in self.house.decoders():
                    with suppress(psutil.NoSuchProcess):
                        decoder.kill()
                await trio.sleep(0.1)

    async def _stop(self, seconds: float) -> None:
        processes = list(self.house.processes)
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGSTOP)
        await trio.sleep(seconds)
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)

    async def _fill(self, seconds: float) -> None:
        """With a file beside the cache, until nothing more is taken."""
        ballast = self.house.disk / "ballast"
        with suppress(OSError), ballast.open("wb") as file:
            for _ in range(DISK_BYTES // 4096):
                file.write(bytes(4096))
                file.flush()
        await trio.sleep(seconds)
        ballast.unlink(missing_ok=True)

    async def _limit(self, left: int, seconds: float) -> None:
        process = self.house.processes[0]
        if process.poll() is None and self.house.ready():
            # One that starts needs them for its own files, and ends without.
            before = self.house.descriptors()
            self.house.limit_descriptors(before + left)
            await trio.sleep(seconds)
        if process.poll() is None and process in self.house.processes:
            self.house.limit_descriptors(4096)
