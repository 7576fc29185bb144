"""What became of the requests of late: each is written down once, and whoever counts, logs or traces is told."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import attrs
import trio

from trouper.protocol.record import RequestRecord

log = logging.getLogger("trouper.web")
KEPT = 200
Reader = Callable[[RequestRecord], None]


@attrs.frozen
class Asked:
    """What only the edge knows of a request."""

    model: str
    endpoint: str
    at: float
    """trio.current_time() when it asked for its model, which may have had to be loaded first."""
    traceparent: str
    tracestate: str


class Journal:
    """One for the app, for all of its models."""

    def __init__(self, *readers: Reader) -> None:
        self._readers = readers
        self.recent: deque[RequestRecord] = deque(maxlen=KEPT)
        """The last one last."""

    def note(self, asked: Asked, record: RequestRecord) -> None:
        """What became of it. Runs where a request is being closed, perhaps in cancelled cleanup: it neither waits nor
        raises."""
        whole = attrs.evolve(
            record,
            model=asked.model,
            endpoint=asked.endpoint,
            arrived_at=asked.at,
            unix_offset=time.time() - trio.current_time(),
            traceparent=asked.traceparent,
            tracestate=asked.tracestate,
        )
        self.recent.append(whole)
        for reader in self._readers:
            try:
                reader(whole)
            except Exception:
                log.exception("the end of request %s could not be told", record.request_id)
