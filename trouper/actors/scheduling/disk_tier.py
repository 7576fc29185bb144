"""The scheduler's dealings with SSDWriter: what to bring from disk, what to send there. It never waits for it.

Every order may be refused and every answer may be that nothing came; then the prompt is computed.
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
"""Of one file, about: large enough to be read at the disk's full speed, small enough to be written between two reads."""
BACKLOG_BYTES = 4 * RUN_BYTES
"""On their way to the disk. More is not asked from the engine."""
FIRST_BYTES_PER_S = 500e6
"""What a disk is taken for until it was measured: a cheap SSD."""
LATENCY_S = 0.02
"""Of a load, besides the bytes: two threads and a plan."""
WORTH = 0.8
"""A load must be expected to take at most so much of the time that computing takes."""

FORGOTTEN_S = 300.0
"""In so much time half of what a disk was slower than it was first taken for is forgotten."""

_tickets = count()
"""Never the same twice, so that an answer to a scheduler that crashed is not taken for one's own."""


@attrs.define(eq=False)
class Ticket:
    """A load that somebody waits for."""

    number: int
    pinned: tuple[Node, ...]
    wanted: tuple[NamedPiece, ...]
    done: bool = False
    read_tokens: int = 0
    """So many came."""


@attrs.define
class ReadSpeed:
    """Whether a load is worth asking for, by what loads took (F8). One that came while the machine was busy with something
    else must not be the last: a disk that is not asked is not measured either, so its slowness is forgotten with time."""

    bytes_per_s: float = FIRST_BYTES_PER_S
    measured_at: float = 0.0

    def measured(self, nbytes: int, seconds: float, now: float) -> None:
        """Small loads tell latency, not speed."""
        if seconds > 0 and nbytes > 2**20:
            expected = self.expected(now)
            self.bytes_per_s, self.measured_at = expected + 0.3 * (nbytes / seconds - expected), now

    def expected(self, now: float) -> float:
        """Bytes a second."""
        slower = max(0.0, FIRST_BYTES_PER_S - self.bytes_per_s)
        return self.bytes_per_s + slower * (1 - exp2((self.measured_at - now) / FORGOTTEN_S))

    def worth(self, nbytes: int, computing_s: float, now: float) -> bool:
        """Whether so many bytes are expected sooner than computing would give them."""
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
        """`send`: False if there is no room for an order, or nobody carries it out. `known`: called when all that lies on disk
        has been told."""
        self._send, self._directory, self._known, self._cache, self._clock = send, directory, known, cache, clock
        self._loading: dict[int, Ticket] = {}
        self._asked: deque[Saving] = deque()
        """Persisted by a plan that is not answered yet."""
        self._settled: list[int] = []
        """Answered since the last plan; other ranks keep what they have read for them."""
        self._underway_bytes = 0
        self._speed = ReadSpeed()
        self._send(Announce())

    @property
    def attached(self) -> bool:
        return self._directory.latest.attached

    @property
    def busy(self) -> bool:
        """Something is on its way to the disk."""
        return self._underway_bytes > 0

    # -- from disk -------------------------------------------------------------------------------

    def load(self, found: Found, tokens_per_s: float) -> Ticket | None:
        """Ask for what is missing, if reading it is expected to be faster than computing it (F8)."""
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

    def forget(self, ticket: Ticket) -> None:
        """Whoever waited for it left."""
        if not ticket.done:
            ticket.done = True
            del self._loading[ticket.number]
            self._cache.unpin(ticket.pinned)

    def hear(self, news: DiskNews) -> list[Load]:
        """What the next plan loads."""
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
        """What the next plan says so of."""
        settled, self._settled = tuple(self._settled), []
        return settled

    def _loaded(self, news: Loaded) -> list[Load]:
        if news.held:
            self._settled.append(news.ticket)
        ticket = self._loading.pop(news.ticket, None)
        if ticket is None:  # Nobody waits for it any more.
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
        """Blocks and snapshots whose bytes the next plan gives back, and what they will be: one run at a time."""
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
        """The engine's answer to what `pick` asked for."""
        if not payloads:
            return
        saving = self._asked.popleft()
        write = saving.run.filled(payloads)
        self._underway_bytes += write.nbytes - saving.nbytes
        if not self._send(write):
            self.hear(Written(tuple(piece.key for piece in write.pieces), write.nbytes, refused=True))
