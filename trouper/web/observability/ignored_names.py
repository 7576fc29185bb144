"""Names that requests were read past: a count of each for metrics, and a log line for the first of
each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from trouper.protocol.logs import FIELDS

log = logging.getLogger("trouper.web")
HEADER = "X-Trouper-Ignored"
"""The header of a response that names what its request was read past."""
MAX_SERIES = 200
"""Maximum number of names that are counted and logged each, since clients choose them. Further ones
count as `OTHER`."""
OTHER = "other"


class IgnoredNames:
    """The counts of the app."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, names: Iterable[str], path: str) -> None:
        """Count names of one request to `path`."""
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
