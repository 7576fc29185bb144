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
RequestObserver = Callable[[RequestRecord], None]


@attrs.frozen
class RequestOrigin:
    """What only the edge knows of a request."""

    model: str
    endpoint: str
    at: float
    """trio.current_time() when it asked for its model, which may have had to be loaded first."""
    traceparent: str
    tracestate: str


class RequestLog:
    """One for the app, for all of its models."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers
        self.recent: deque[RequestRecord] = deque(maxlen=KEPT)
        """The last one last."""

    def note(self, origin: RequestOrigin, record: RequestRecord) -> None:
        """What became of it. Runs where a request is being closed, perhaps in cancelled cleanup: it neither waits nor
        raises."""
        complete = attrs.evolve(
            record,
            model=origin.model,
            endpoint=origin.endpoint,
            arrived_at=origin.at,
            unix_offset=time.time() - trio.current_time(),
            traceparent=origin.traceparent,
            tracestate=origin.tracestate,
        )
        self.recent.append(complete)
        for observer in self._observers:
            try:
                observer(complete)
            except Exception:
                log.exception("the end of request %s could not be told", record.request_id)
