"""Snapshots for whoever looks: each is made once for all viewers, by the one who comes first, and none without viewers.

There is no task. Viewers wait for the same ticks of the clock; so nothing has to be started, counted or ended with them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec
import trio

from trouper.actors.runtime.model_manager import Models
from trouper.protocol.record import RequestRecord
from trouper.protocol.version import VERSION
from trouper.web.live.snapshot import NewGaps, model_body
from trouper.web.streaming.passive_body import PassiveBody

TICK_S = 1.0
"""A frame costs a browser without a GPU 10 ms of the cores that a model on the same machine computes with."""
QUIET_S = 2.0
"""While nothing changes, viewers hear so seldom that it is so."""
RECENT = 50
"""Requests that a new viewer is told of."""


class Feed:
    """One for the app."""

    def __init__(self, models: Models, recent: Sequence[RequestRecord]) -> None:
        self._models, self._recent = models, recent
        self._server = {"version": VERSION, "started": time.time()}
        """`started` also tells one server from the next at the same address."""
        self._gaps: dict[str, NewGaps] = {}
        self._tick = -1
        self._last: RequestRecord | None = None
        """The last request of the last snapshot."""
        self.number = 0
        """Of snapshots that were told."""
        self._sent_at = -inf
        self._last_models = b""
        """What the last one says of the models."""
        self._body: dict[str, Any] = {}
        self._latest = b""

    @property
    def over(self) -> trio.Event:
        """Nothing will change any more."""
        return self._models.finished

    def snapshot(self) -> tuple[int, bytes]:
        """The number of the latest one, and it as an event. It is made anew at most once a tick, and is another one if
        anything has changed."""
        tick = int(trio.current_time() / TICK_S)
        if tick != self._tick:
            self._tick = tick
            models = [
                model_body(entry, self._gaps.setdefault(entry.names[0], NewGaps())) for entry in self._models.listed()
            ]
            self._tell(msgspec.json.encode(models), self._ended())
        return self.number, self._latest

    def _tell(self, models: bytes, ended: list[RequestRecord]) -> None:
        now = trio.current_time()
        if models == self._last_models and not ended and now - self._sent_at < QUIET_S:
            return
        self.number += 1
        self._last_models, self._sent_at = models, now
        self._body = self._server | {"number": self.number, "at": now, "models": msgspec.Raw(models), "ended": ended}
        self._latest = event("snapshot", self._body)

    async def once(self) -> dict[str, Any]:
        """For whoever asks once: the batch is there a tick after the first look."""
        self.snapshot()
        await trio.sleep_until(next_tick())
        self.snapshot()
        return self._body | {"recent": self.recent()}

    def recent(self) -> list[RequestRecord]:
        """The last one last."""
        return list(self._recent)[-RECENT:]

    def _ended(self) -> list[RequestRecord]:
        """Requests that ended since the last snapshot."""
        ended: list[RequestRecord] = []
        for record in reversed(self._recent):
            if record is self._last or len(ended) == RECENT:
                break
            ended.append(record)
        if ended:
            self._last = ended[0]
        return ended[::-1]


def next_tick() -> float:
    return (int(trio.current_time() / TICK_S) + 1) * TICK_S


def event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


class Viewer(PassiveBody):
    """The body of one viewer's stream.

    One that is slow misses snapshots; then it is told of the recent requests anew, as at its beginning.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._seen = -1

    async def __anext__(self) -> bytes:
        number = self._seen
        while number == self._seen:
            if await self._over():
                raise StopAsyncIteration
            number, data = self._feed.snapshot()
        missed, self._seen = number != self._seen + 1, number
        return (event("recent", self._feed.recent()) if missed else b"") + data

    async def _over(self) -> bool:
        """The first snapshot comes at once, each further one at the next tick."""
        with trio.move_on_at(-inf if self._seen < 0 else next_tick()):
            await self._feed.over.wait()
        return self._feed.over.is_set()
