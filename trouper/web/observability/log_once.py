"""Counts for metrics; the first of each kind is logged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from trouper.protocol.logs import FIELDS

log = logging.getLogger("trouper.web")
HEADER = "X-Trouper-Ignored"
"""Header of a response that names what its request was read past."""
MAX_SERIES = 200
"""Number of names that are counted each: clients choose them. Further names count as `OTHER`."""
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
