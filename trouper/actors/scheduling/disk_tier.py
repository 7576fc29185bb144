"""The disk tier of the prefix cache, for which the scheduler never waits.

A disk lookup has a fixed order:

1. The prefix tree, which knows the catalogue, yields the nodes on disk only (`Found.missing`).
2. `load` sends a `Read` if reading should be faster than computing.
3. An accepted order pins the nodes, lest eviction remove parents of arriving blocks.
4. The answer, `Loaded`, comes in parts. Each part becomes blocks under the pins, and the engine
   takes a part while the next is read.
5. After the last part, missing blocks leave the tree: no request asks again.
6. The pins are released, and the request is looked up again. The admitting plan carries the last
   part: the engine loads before admission.

Orders may be refused, answers empty or missing; then the prompt is computed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import count
from math import exp2, inf

import attrs

from trouper.actors.scheduling.prefix_cache import Found, PrefixCache
from trouper.actors.scheduling.row_storing import InFlightWrite
from trouper.actors.scheduling.tree_node import Node
from trouper.protocol.blocks import BlockRef, Tensors
from trouper.protocol.health import DirectoryStats
from trouper.protocol.plans import BlockId, Load
from trouper.protocol.watch import Watch
from trouper.protocol.work import (
    Announce,
    Catalogue,
    DiskNews,
    DiskOrder,
    Loaded,
    OrdersForgotten,
    Read,
    RemovedFromDisk,
    Run,
    Written,
)

log = logging.getLogger("trouper.scheduler")

# Large enough for the disk's full speed, small enough to be written between two reads.
RUN_BYTES = 32 * 2**20
"""Approximate size of one file."""
BACKLOG_BYTES = 4 * RUN_BYTES
"""In-flight bytes above which the engine sends no more."""
# A cheap SSD, before any measurement.
FIRST_BYTES_PER_S = 500e6
# Two threads and a plan, besides the transfer.
LATENCY_S = 0.02
WORTH = 0.8
"""Largest expected load time, as a share of the time of computing."""
HALF_LIFE_S = 300.0
# Each file takes less than a second.
ANSWER_S = 15.0
"""Longest silence of the disk while a request waits."""
PAUSE_S = 60.0
"""Time for which a silent disk is not asked, unless news comes."""

# Unique in the process: an answer to a crashed scheduler matches no ticket of the next.
_tickets = count()


@attrs.define(eq=False)
class Ticket:
    number: int
    pinned: tuple[Node, ...]
    requested: tuple[BlockRef, ...]
    arrived: set[bytes] = attrs.field(factory=set)
    nbytes: int = 0
    seconds: float = 0.0
    done: bool = False
    read_tokens: int = 0
    sizes: dict[bytes, int] = attrs.field(init=False)

    @sizes.default
    def _sizes_of_requested(self) -> dict[bytes, int]:
        return {ref.key: ref.payload_tokens for ref in self.requested}


@attrs.define
class ReadSpeed:
    """Estimate from past loads (F8)."""

    # A measured slowness decays: a disk without orders is not measured, so one load in a busy
    # moment would be the last.

    bytes_per_s: float = FIRST_BYTES_PER_S
    measured_at: float = 0.0

    def measured(self, nbytes: int, seconds: float, now: float) -> None:
        # Small loads measure latency, not speed.
        if seconds > 0 and nbytes > 2**20:
            expected = self.expected(now)
            self.bytes_per_s, self.measured_at = expected + 0.3 * (nbytes / seconds - expected), now

    def expected(self, now: float) -> float:
        slower = max(0.0, FIRST_BYTES_PER_S - self.bytes_per_s)
        return self.bytes_per_s + slower * (1 - exp2((self.measured_at - now) / HALF_LIFE_S))

    def worth(self, nbytes: int, computing_s: float, now: float) -> bool:
        return LATENCY_S + nbytes / self.expected(now) < WORTH * computing_s


class DiskTier:
    def __init__(
        self,
        send: Callable[[DiskOrder], bool],
        directory: Watch[DirectoryStats],
        on_catalogue: Callable[[], object],
        cache: PrefixCache,
        clock: Callable[[], float],
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`send` returns False for a refused order. `on_catalogue` is called when the catalogue is
        complete. `answer_s`: longest silence of the disk."""
        self._send, self._directory, self._on_catalogue = send, directory, on_catalogue
        self._cache, self._clock = cache, clock
        self._loading: dict[int, Ticket] = {}
        # Writes whose bytes an unanswered plan requests.
        self._requested: deque[InFlightWrite] = deque()
        # Tickets answered since the last plan. Other ranks hold their blocks until a plan settles
        # them.
        self._settled: list[int] = []
        self._in_flight_bytes = 0
        self._speed, self._answer_s = ReadSpeed(), answer_s
        # Time of the last news, or of the first unanswered order.
        self._heard_at = -inf
        self._silent_until = -inf
        self._send(Announce())

    @property
    def attached(self) -> bool:
        return self._directory.latest.attached

    @property
    def busy(self) -> bool:
        return self._in_flight_bytes > 0

    # -- from disk -------------------------------------------------------------------------------

    def load(self, found: Found, tokens_per_s: float) -> Ticket | None:
        """Order a read of missing nodes, if faster than computing (F8)."""
        can_read = self.attached and not self._is_silent
        if not found.missing or not can_read or not self._faster(found, tokens_per_s):
            return None
        requested = self._cache.missing_refs(found)
        ticket = Ticket(next(_tickets), (*found.match.nodes[-1:], *found.missing), requested)
        if not self._send(Read(ticket.number, requested)):
            return None
        self._cache.pin(ticket.pinned)
        if not self._loading:
            self._heard_at = self._clock()
        self._loading[ticket.number] = ticket
        return ticket

    @property
    def _is_silent(self) -> bool:
        return self._clock() < self._silent_until

    @property
    def answer_due_at(self) -> float:
        """Deadline of a silent disk; inf while no request waits."""
        return self._heard_at + self._answer_s if self._loading else inf

    def give_up_silent(self) -> None:
        """Let requests compute a silent disk's blocks. Called before each plan."""
        if self._clock() >= self.answer_due_at:
            log.warning(
                "the disk of the cache has said nothing for %g s; %d requests go on without it",
                self._answer_s,
                len(self._loading),
            )
            self._silent_until = self._clock() + PAUSE_S
            self._forget_reads()

    def _forget_reads(self) -> None:
        for number in tuple(self._loading):
            self.forget(number)

    def _faster(self, found: Found, tokens_per_s: float) -> bool:
        if not tokens_per_s:
            return True
        now = self._clock()
        return self._speed.worth(
            self._cache.missing_bytes(found), found.missing_tokens / tokens_per_s, now
        )

    def forget(self, number: int) -> None:
        ticket = self._loading.pop(number, None)
        if ticket is not None:
            ticket.done = True
            self._cache.unpin(ticket.pinned)

    def hear(self, news: DiskNews) -> list[Load]:
        """Handle news of the disk. Returns the loads of the next plan."""
        self._heard_at, self._silent_until = self._clock(), -inf
        match news:
            case Catalogue(runs=runs, complete=complete):
                for run in runs:
                    self._cache.on_disk(run.linked())
                if complete:
                    self._on_catalogue()
            case RemovedFromDisk(keys=keys):
                self._cache.not_on_disk(keys)
            case Written():
                self._written(news)
            case OrdersForgotten():
                self._forget_orders()
            case Loaded():
                return self._loaded(news)
        return []

    def _forget_orders(self) -> None:
        # Bytes from plans in flight can still be written. The catalogue comes again: its order may
        # be among the forgotten.
        self._forget_reads()
        self._in_flight_bytes = sum(write.nbytes for write in self._requested)
        self._cache.writes.keep_in_flight(
            ref.key for write in self._requested for ref in write.run.blocks
        )
        if not self._send(Announce()):
            self._on_catalogue()

    def settled(self) -> tuple[int, ...]:
        settled, self._settled = tuple(self._settled), []
        return settled

    def _loaded(self, news: Loaded) -> list[Load]:
        if news.must_settle:
            self._settled.append(news.ticket)
        ticket = self._loading.get(news.ticket)
        if ticket is None:  # The request was aborted.
            return []
        ticket.arrived |= {block.key for block in news.blocks}
        ticket.read_tokens += sum(ticket.sizes.get(block.key, 0) for block in news.blocks)
        ticket.nbytes += news.nbytes
        ticket.seconds += news.seconds
        loads = self._cache.loaded(news.ticket, news.blocks)
        if news.complete:
            self._complete(ticket)
        return loads

    def _complete(self, ticket: Ticket) -> None:
        del self._loading[ticket.number]
        self._speed.measured(ticket.nbytes, ticket.seconds, self._clock())
        self._cache.not_on_disk(
            [ref.key for ref in ticket.requested if ref.key not in ticket.arrived]
        )
        self._cache.unpin(ticket.pinned)
        ticket.done = True

    # -- to disk ---------------------------------------------------------------------------------

    def pick(self) -> tuple[tuple[BlockId, ...], Run | None]:
        """Blocks and snapshots to fetch with the next plan, and the resulting run."""
        if not self.attached or self._in_flight_bytes + RUN_BYTES > BACKLOG_BYTES:
            return (), None
        pending = self._cache.writes.next_run(RUN_BYTES)
        if pending is None:
            return (), None
        self._requested.append(pending)
        self._in_flight_bytes += pending.nbytes
        ids: list[BlockId] = []
        for node, ref in zip(pending.nodes, pending.run.blocks, strict=True):
            ids += [node.block] if ref.payload and node.block is not None else []
            ids += [node.snapshot] if ref.snapshot and node.snapshot is not None else []
        return tuple(ids), pending.run

    def persisted(self, data: tuple[Tensors, ...]) -> None:
        if not data:
            return
        pending = self._requested.popleft()
        write = pending.run.filled(data)
        self._in_flight_bytes += write.nbytes - pending.nbytes
        if not self._send(write):
            self._written(
                Written(tuple(block.key for block in write.blocks), write.nbytes, refused=True)
            )

    def _written(self, news: Written) -> None:
        self._in_flight_bytes -= min(news.nbytes, self._in_flight_bytes)
        self._cache.saved(news.keys, refused=news.refused)
