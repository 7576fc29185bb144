"""The log of recent requests, whose observers (metrics, access log) get each record; and counts
of parameters that were read past and of malformed calls."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import attrs
import trio

from trouper.protocol.logs import FIELDS
from trouper.protocol.record import RequestRecord

log = logging.getLogger("trouper.web")
KEPT = 200
CHOICE_SUFFIX = re.compile(r"(-\d+)?")
"""Behind the id of a request, in the ids of its choices."""
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
    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers
        self.recent: deque[RequestRecord] = deque(maxlen=KEPT)

    def of(self, request_id: str) -> list[RequestRecord]:
        """Return the kept records of a request, one for each choice. Clients may use an id again:
        the newest one counts."""
        newest = {
            record.request_id: record
            for record in self.recent
            if record.request_id.startswith(request_id)
            and CHOICE_SUFFIX.fullmatch(record.request_id, len(request_id))
        }
        return [*newest.values()]

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


HEADER = "X-Trouper-Ignored"
"""Header of a response that names what its request was read past."""

# Number of names that are counted each: clients choose them. Further names count as `OTHER`.
MAX_SERIES = 200
OTHER = "other"
MEANINGS = {
    "repaired": "a call that was not quite as its format has it was repaired",
    "no_call": "what looked like a call is no call of an offered tool, and is given as text",
}


class IgnoredNames:
    """Parameters and keys of messages that requests were read past."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, names: Iterable[str], path: str) -> None:
        for name in names:
            known = name in self.counts or len(self.counts) < MAX_SERIES
            if name not in self.counts and known:
                fields = {"event": "ignored", "name": name, "path": path}
                log.info(
                    "%s: %r is read past; --strict refuses it (logged once)",
                    path,
                    name,
                    extra={FIELDS: fields},
                )
            self.counts[name if known else OTHER] += 1


class MalformedCalls:
    """Calls that a model did not write as its format has them."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def note(self, model: str, outcome: str) -> None:
        if (model, outcome) not in self.counts:
            fields = {"event": "malformed_call", "model": model, "outcome": outcome}
            log.info(
                "%s: %s (logged once; trouper_malformed_calls_total counts them)",
                model,
                MEANINGS[outcome],
                extra={FIELDS: fields},
            )
        self.counts[model, outcome] += 1
