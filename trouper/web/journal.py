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


class Journal:
    """One for the app, for all of its models."""

    def __init__(self, *readers: Reader) -> None:
        self._readers = readers
        self.recent: deque[RequestRecord] = deque(maxlen=KEPT)
        """The last one last."""

    def note(self, model: str, endpoint: str, traceparent: str, tracestate: str, record: RequestRecord) -> None:
        """A record, and what only the edge knows of it. Runs where a request is being closed, perhaps in cancelled cleanup:
        it neither waits nor raises."""
        whole = attrs.evolve(
            record,
            model=model,
            endpoint=endpoint,
            unix_offset=time.time() - trio.current_time(),
            traceparent=traceparent,
            tracestate=tracestate,
        )
        self.recent.append(whole)
        for reader in self._readers:
            try:
                reader(whole)
            except Exception:
                log.exception("the end of request %s could not be told", record.request_id)
