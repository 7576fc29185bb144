"""The log of recent requests. Observers (metrics, access log) get each record."""

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
    model: str
    endpoint: str
    at: float
    """trio.current_time() when the model was requested, before it was loaded."""
    adapter: str = ""
    """Name of the LoRA adapter that answers; "": the model itself."""
    key: str = ""


class RequestLog:
    """The records of ended requests, of all models."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers
        self.recent: deque[RequestRecord] = deque(maxlen=KEPT)

    def note(self, origin: RequestOrigin, record: RequestRecord) -> RequestRecord:
        """Complete a request's record, call the observers and return the record. Runs in cancelled
        cleanup: neither waits nor raises."""
        complete = attrs.evolve(
            record,
            model=origin.model,
            adapter=origin.adapter,
            key=origin.key,
            endpoint=origin.endpoint,
            arrived_at=origin.at,
            unix_offset=time.time() - trio.current_time(),
        )
        self.recent.append(complete)
        for observer in self._observers:
            try:
                observer(complete)
            except Exception:
                log.exception("the end of request %s could not be told", record.request_id)
        return complete
