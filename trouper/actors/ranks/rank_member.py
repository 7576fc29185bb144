"""A member of the group: rank 0's end of one follower's connection, with outgoing messages and the
last reported state. A member detects the loss of its follower; the leader decides what follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from trouper.actors.ranks.rank_link import Link, LinkFailed, send_heartbeats, wait_until_silent
from trouper.protocol.health import DirectoryStats, RankState, RankStats
from trouper.protocol.link import (
    Compiled,
    Crashed,
    Fetched,
    Heartbeat,
    Leave,
    LoadFailed,
    LogRecord,
    Missing,
    Ready,
    StateMismatch,
    WriteDone,
)
from trouper.protocol.model import MemoryStats, ModelCard
from trouper.protocol.wire import encode

log = logging.getLogger("trouper.ranks")
OUTBOX = 256
DiskReport = Fetched | WriteDone | Missing | DirectoryStats


class Group(Protocol):
    def lose(self, reason: str, *, unusable: bool = False) -> None: ...

    def member_changed(self) -> None: ...

    def take_disk_report(self, rank: int, report: DiskReport) -> None: ...

    def take_compiled(self, rank: int, message: Compiled) -> None: ...


class RankMember:
    """One follower, from its `Hello` on. `timeout_s`: until a follower that is silent, or does not
    read, is lost."""

    def __init__(self, rank: int, link: Link, group: Group, timeout_s: float) -> None:
        self.rank = rank
        self.connected = True
        self.state: RankState = "loading"
        self.step = -1
        self.memory: MemoryStats | None = None
        self.card: ModelCard | None = None
        self.directory: DirectoryStats | None = None
        self._link, self._group, self._timeout_s = link, group, timeout_s
        self._outbox, self._frames = trio.open_memory_channel[bytes](OUTBOX)

    @property
    def stats(self) -> RankStats:
        return RankStats(
            rank=self.rank,
            state=self.state,
            step=self.step,
            heard_at=self._link.heard_at,
            directory=self.directory,
        )

    async def run(self, heartbeat: Callable[[], Heartbeat], heartbeat_s: float) -> None:
        """Serve the connection to its end. `heartbeat` is called for each heartbeat of rank 0."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                nursery.start_soon(send_heartbeats, self._outbox, heartbeat, heartbeat_s)
                nursery.start_soon(self._end_when_silent, heartbeat_s)
                try:
                    await self._receive()
                except LinkFailed as failed:
                    self._end(str(failed))
                nursery.cancel_scope.cancel(reason="the connection ended")
        finally:
            self.connected = False
            self._outbox.close()
            self._group.member_changed()

    def post(self, frame: bytes) -> None:
        """Send an encoded message, in order. Never waits."""
        try:
            self._outbox.send_nowait(frame)
        except trio.WouldBlock:
            self._end(f"{OUTBOX} messages wait for it")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._end("its connection ended")

    def leave(self) -> None:
        if self.state == "ready":
            self.state = "left"
            self.post(encode(Leave()))

    def _end(self, reason: str) -> None:
        if self.state != "left":
            self.state = "lost"
            self._group.lose(f"rank {self.rank}: {reason}")

    async def _end_when_silent(self, heartbeat_s: float) -> None:
        await wait_until_silent(self._link, self._timeout_s, heartbeat_s)
        self._end(f"it has been silent for {self._timeout_s:g} s (--rank-timeout-s)")

    async def _send(self) -> None:
        async for frame in self._frames:
            try:
                with trio.fail_after(self._timeout_s):
                    await self._link.send_frame(frame)
            except trio.TooSlowError:
                self._end(f"it has not read for {self._timeout_s:g} s (--rank-timeout-s)")
                return
            except LinkFailed:
                # A last message may still wait to be received, and gives a better reason.
                return

    # -- messages of the follower -----------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            message = await self._link.receive()
            match message:
                case Heartbeat():
                    self._take_heartbeat(message)
                case Fetched() | WriteDone() | Missing():
                    self._group.take_disk_report(self.rank, message)
                case Compiled():
                    self._group.take_compiled(self.rank, message)
                case LogRecord(level=level, text=text):
                    log.log(level, "rank %d: %s", self.rank, text)
                case Ready(card=card):
                    self.state, self.card = "ready", card
                    log.info("rank %d is ready", self.rank)
                    self._group.member_changed()
                case LoadFailed() | Crashed() | StateMismatch():
                    self._take_failure(message)
                case _:
                    raise LinkFailed(f"it sent {type(message).__name__}, which is not for rank 0")

    def _take_heartbeat(self, heartbeat: Heartbeat) -> None:
        before, self.directory = self.directory, heartbeat.directory
        self.step, self.memory = heartbeat.step, heartbeat.memory
        if heartbeat.directory is not None and _in_use(heartbeat.directory) != (
            before and _in_use(before)
        ):
            self._group.take_disk_report(self.rank, heartbeat.directory)

    def _take_failure(self, message: LoadFailed | Crashed | StateMismatch) -> None:
        match message:
            case LoadFailed(reason=reason):
                self._group.lose(f"rank {self.rank}: {reason}", unusable=True)
            case Crashed(reason=reason):
                self._group.lose(f"rank {self.rank} crashed: {reason}")
            case StateMismatch():
                self._group.lose(
                    f"rank {self.rank} differs at step {message.step}: its {message.field} are not "
                    "what the plan "
                    f"expects ({message.found:016x}, not {message.expected:016x})"
                )


def _in_use(directory: DirectoryStats) -> tuple[bool, str]:
    return directory.attached, directory.reason
