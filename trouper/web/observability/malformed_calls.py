"""Calls that a model did not write as its format has them: a count for metrics, and a log line for
the first of each kind."""

from __future__ import annotations

import logging
from collections import Counter

from trouper.protocol.logs import FIELDS

log = logging.getLogger("trouper.web")
MEANINGS = {
    "repaired": "a call that was not quite as its format has it was repaired",
    "no_call": "what looked like a call is no call of an offered tool, and is given as text",
}
"""Outcomes, with what the log says of them."""


class MalformedCalls:
    """The counts of the app."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """By the model's name and the outcome."""

    def note(self, model: str, outcome: str) -> None:
        """Count a call."""
        if (model, outcome) not in self.counts:
            fields = {"event": "malformed_call", "model": model, "outcome": outcome}
            log.info(
                "%s: %s (logged once; trouper_malformed_calls_total counts them)",
                model,
                MEANINGS[outcome],
                extra={FIELDS: fields},
            )
        self.counts[model, outcome] += 1
