"""The disk tier of the prefix cache: which blocks to read from disk, and which to write. The scheduler never waits for it.

A disk lookup has a fixed order. The prefix tree matches a prompt against memory and disk, and yields the nodes that are only
on disk (`Found.missing`). `load` compares the expected duration of reading them with that of computing them, and only then
sends a `Read`, so that a slow disk costs nothing. It pins the nodes right after the order was accepted: an eviction in the
meantime would remove the parents of what arrives. The answer, `Loaded`, first becomes blocks (`PrefixCache.loaded`), while the
pins still hold; then pieces that did not arrive are removed from the tree, so that no later request asks for them again; then
the pins are released. The next plan carries the bytes to the engine before it admits the request.

Every order may be refused, and every answer may be empty; then the prompt is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from math import exp2

import attrs

from trouper.actors.scheduling.prefix_cache import Found, PrefixCache, Saving
from trouper.actors.scheduling.prefix_tree import Node
from trouper.protocol.blocks import Payload
from trouper.protocol.health import DirectoryStats
from trouper.protocol.plans import BlockId, Load
from trouper.protocol.watch import Watch
from trouper.protocol.work import (
    Announce,
    Catalogue,
    DiskNews,
    DiskOrder,
    Gone,
    Loaded,
    NamedPiece,
    Read,
    Run,
    Written,
)

RUN_BYTES = 32 * 2**20
"""Approximate size of one file: large enough to be read at the disk's full speed, small enough to be written between two reads."""
BACKLOG_BYTES = 4 * RUN_BYTES
"""Maximum bytes in flight to the disk. Above it no more are requested from the engine."""
FIRST_BYTES_PER_S = 500e6
"""Assumed speed of a disk before any measurement: a cheap SSD."""
LATENCY_S = 0.02
"""Latency of a load besides the transfer: two threads and a plan."""
WORTH = 0.8
"""Maximum expected duration of a load, as a share of the time that computing would take."""

FORGOTTEN_S = 300.0
"""Half-life of a measured slowness: in this time half of the difference to `FIRST_BYTES_PER_S` is forgotten."""

_tickets = count()
"""Numbers of tickets. They are unique in the process, so that an answer to a crashed scheduler matches no ticket of the next."""


@attrs.define(eq=False)
class Ticket:
    """A load that a request waits for."""

    number: int
    pinned: tuple[Node, ...]
    wanted: tuple[NamedPiece, ...]
    done: bool = False
    read_tokens: int = 0
    """Number of tokens that were read."""


@attrs.define
class ReadSpeed:
    """Estimate of the disk's speed from past loads, which decides whether a load is worth it (F8). A measured slowness decays with
    time: a disk that gets no orders is not measured either, so one load in a busy moment would otherwise be the last."""

    bytes_per_s: float = FIRST_BYTES_PER_S
    measured_at: float = 0.0

    def measured(self, nbytes: int, seconds: float, now: float) -> None:
        """Learn from a load. Small loads are ignored, since they measure latency, not speed."""
        if seconds > 0 and nbytes > 2**20:
            expected = self.expected(now)
            self.bytes_per_s, self.measured_at = expected + 0.3 * (nbytes / seconds - expected), now

    def expected(self, now: float) -> float:
        """Expected speed in bytes a second."""
        slower = max(0.0, FIRST_BYTES_PER_S - self.bytes_per_s)
        return self.bytes_per_s + slower * (1 - exp2((self.measured_at - now) / FORGOTTEN_S))

    def worth(self, nbytes: int, computing_s: float, now: float) -> bool:
        """Whether reading `nbytes` is expected to be faster than computing, which takes `computing_s`."""
        return LATENCY_S + nbytes / self.expected(now) < WORTH * computing_s


class DiskTier:
    """Outstanding loads and saves."""

    def __init__(
        self,
        send: Callable[[DiskOrder], bool],
        directory: Watch[DirectoryStats],
        known: Callable[[], object],
        cache: PrefixCache,
        clock: Callable[[], float],
    ) -> None:
        """`send` returns False if there is no room for an order, or no writer. `known` is called when the catalogue of the disk is
        complete."""
        self._send, self._directory, self._known, self._cache, self._clock = send, directory, known, cache, clock
        self._loading: dict[int, Ticket] = {}
        self._asked: deque[Saving] = deque()
        """Savings whose plan is not answered yet."""
        self._settled: list[int] = []
        """Tickets that were answered since the last plan. Other ranks hold their pieces until a plan settles them."""
        self._underway_bytes = 0
        self._speed = ReadSpeed()
        self._send(Announce())

    @property
    def attached(self) -> bool:
        return self._directory.latest.attached

    @property
    def busy(self) -> bool:
        """Whether bytes are in flight to the disk."""
        return self._underway_bytes > 0

    # -- from disk -------------------------------------------------------------------------------

    def load(self, found: Found, tokens_per_s: float) -> Ticket | None:
        """Order a read of the missing nodes, if it is expected to be faster than computing them (F8)."""
        if not found.missing or not self.attached or not self._faster(found, tokens_per_s):
            return None
        wanted = tuple(
            NamedPiece(node.key, node.tokens, node.block is None, snapshot)
            for node, snapshot in self._cache.wanted_parts(found)
        )
        ticket = Ticket(next(_tickets), (*found.match.nodes[-1:], *found.missing), wanted)
        if not self._send(Read(ticket.number, wanted)):
            return None
        self._cache.pin(ticket.pinned)
        self._loading[ticket.number] = ticket
        return ticket

    def _faster(self, found: Found, tokens_per_s: float) -> bool:
        if not tokens_per_s:
            return True
        now = self._clock()
        return self._speed.worth(self._cache.missing_bytes(found), found.missing_tokens / tokens_per_s, now)

    def forget(self, number: int) -> None:
        """Cancel a ticket whose request was aborted."""
        ticket = self._loading.pop(number, None)
        if ticket is not None:
            ticket.done = True
            self._cache.unpin(ticket.pinned)

    def hear(self, news: DiskNews) -> list[Load]:
        """Take news of the disk. Returns the loads of the next plan."""
        match news:
            case Catalogue(pieces=pieces, whole=whole):
                self._cache.on_disk(pieces)
                if whole:
                    self._known()
            case Gone(keys=keys):
                self._cache.not_on_disk(keys)
            case Written(keys=keys, nbytes=nbytes, refused=refused):
                self._underway_bytes -= min(nbytes, self._underway_bytes)
                self._cache.saved(keys, refused=refused)
            case Loaded():
                return self._loaded(news)
        return []

    def settled(self) -> tuple[int, ...]:
        """Tickets that the next plan settles."""
        settled, self._settled = tuple(self._settled), []
        return settled

    def _loaded(self, news: Loaded) -> list[Load]:
        if news.held:
            self._settled.append(news.ticket)
        ticket = self._loading.pop(news.ticket, None)
        if ticket is None:  # The request was aborted.
            return []
        self._speed.measured(news.nbytes, news.seconds, self._clock())
        got = {piece.key: piece for piece in news.pieces}
        loads = self._cache.loaded(news.ticket, news.pieces)
        self._cache.not_on_disk([wanted.key for wanted in ticket.wanted if wanted.key not in got])
        self._cache.unpin(ticket.pinned)
        ticket.done = True
        ticket.read_tokens = sum(wanted.payload_tokens for wanted in ticket.wanted if wanted.key in got)
        return loads

    # -- to disk ---------------------------------------------------------------------------------

    def pick(self) -> tuple[tuple[BlockId, ...], Run | None]:
        """Blocks and snapshots whose bytes the next plan returns, and the run that they become: one run at a time."""
        if not self.attached or self._underway_bytes + RUN_BYTES > BACKLOG_BYTES:
            return (), None
        saving = self._cache.next_run(RUN_BYTES)
        if saving is None:
            return (), None
        self._asked.append(saving)
        self._underway_bytes += saving.nbytes
        ids: list[BlockId] = []
        for node, piece in zip(saving.nodes, saving.run.pieces, strict=True):
            ids += [node.block] if piece.payload and node.block is not None else []
            ids += [node.snapshot] if piece.snapshot and node.snapshot is not None else []
        return tuple(ids), saving.run

    def persisted(self, payloads: tuple[Payload, ...]) -> None:
        """Send the engine's answer to `pick` to the disk."""
        if not payloads:
            return
        saving = self._asked.popleft()
        write = saving.run.filled(payloads)
        self._underway_bytes += write.nbytes - saving.nbytes
        if not self._send(write):
            self.hear(Written(tuple(piece.key for piece in write.pieces), write.nbytes, refused=True))
