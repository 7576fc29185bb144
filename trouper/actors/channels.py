"""The graph's channels: what each one promises, and how full it is for whoever looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import trio

from trouper.protocol.health import ChannelFacts


@attrs.frozen
class Edge:
    """A channel's contract; docs/actors.md repeats these and a test compares."""

    source: str
    target: str
    capacity: int
    policy: str


class Channels:
    """Opened by name. Looking costs whoever looks, never a sender."""

    def __init__(self, edges: Mapping[str, Edge]) -> None:
        self._edges = edges
        self._opened: dict[str, trio.MemorySendChannel[Any]] = {}

    def open(self, name: str) -> tuple[trio.MemorySendChannel[Any], trio.MemoryReceiveChannel[Any]]:
        """A new one replaces that of a group that crashed."""
        sending, receiving = trio.open_memory_channel[Any](self._edges[name].capacity)
        self._opened[name] = sending
        return sending, receiving

    def facts(self) -> tuple[ChannelFacts, ...]:
        return tuple(_facts(name, self._edges[name], opened) for name, opened in self._opened.items())


def _facts(name: str, edge: Edge, opened: trio.MemorySendChannel[Any]) -> ChannelFacts:
    state = opened.statistics()
    return ChannelFacts(
        name=name,
        source=edge.source,
        target=edge.target,
        capacity=edge.capacity,
        policy=edge.policy,
        used=state.current_buffer_used,
        senders_waiting=state.tasks_waiting_send,
    )
