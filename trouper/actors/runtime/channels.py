"""The graph's channels: the contract of each, and its fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import trio

from trouper.protocol.health import ChannelStats

T = TypeVar("T")


@attrs.frozen
class Edge:
    """A channel's contract, which docs/actors.md repeats (a test compares)."""

    source: str
    target: str
    capacity: int
    policy: str


class Channels:
    """Channels by name. Statistics cost their reader, never a sender."""

    def __init__(self, edges: Mapping[str, Edge]) -> None:
        self._edges = edges
        self._opened: dict[str, trio.MemorySendChannel[Any]] = {}
        self._peaks = dict.fromkeys(edges, 0)

    def open(self, name: str) -> tuple[trio.MemorySendChannel[Any], trio.MemoryReceiveChannel[Any]]:
        """Open a channel, perhaps in place of that of a crashed group."""
        sending, receiving = trio.open_memory_channel[Any](self._edges[name].capacity)
        self._opened[name] = sending
        return sending, receiving

    def stats(self) -> tuple[ChannelStats, ...]:
        self.note_peaks()
        return tuple(
            _stats(name, self._edges[name], opened, self._peaks[name])
            for name, opened in self._opened.items()
        )

    def note_peaks(self) -> None:
        for name, opened in self._opened.items():
            self._peaks[name] = max(self._peaks[name], opened.statistics().current_buffer_used)


def offer(channel: trio.MemorySendChannel[T], message: T) -> bool:
    """Send without waiting. False if the channel is full, or nobody receives."""
    try:
        channel.send_nowait(message)
    except (trio.WouldBlock, trio.BrokenResourceError):
        return False
    return True


def _stats(name: str, edge: Edge, opened: trio.MemorySendChannel[Any], peak: int) -> ChannelStats:
    state = opened.statistics()
    return ChannelStats(
        name=name,
        source=edge.source,
        target=edge.target,
        capacity=edge.capacity,
        policy=edge.policy,
        used=state.current_buffer_used,
        peak=peak,
        senders_waiting=state.tasks_waiting_send,
    )
