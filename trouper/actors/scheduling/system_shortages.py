"""Steps that failed since the process had no file descriptor, process or memory to spare.

Pure; the caller passes the time. A device may compile a kernel for a step, which takes a process
and some descriptors. A moment without them says nothing about the engine and counts as no crash:
all requests resume, and mostly the moment is over. Those that had new work in the step run alone
until they are beyond it, and one whose step fails then for the same reason is answered 503.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.actors.scheduling.crash_attribution import Involved, Standing

AGAIN_S = 60.0
"""Time within which a second failure has to do with the first."""


@attrs.define(eq=False)
class SystemShortages:
    """Such steps of one model. It outlives restarts of the engine."""

    _suspects: tuple[Standing, ...] = ()
    _until: float = 0.0
    _refused: tuple[Standing, ...] = ()

    def failed(self, involved: Sequence[Involved], now: float) -> None:
        """Note that a step of these rows failed."""
        known = self._suspects if now < self._until else ()
        tried = [row.standing for row in involved if row.standing.suspect]
        self._refused = tuple(standing for standing in tried if standing in known)
        if not self._refused:
            suspects = [row for row in involved if row.fresh] or involved
            for row in suspects:
                row.standing.suspect = True
                row.standing.passes_at = max(row.output_tokens + 1, row.planned_tokens)
            self._suspects = tuple(row.standing for row in suspects)
        self._until = now + AGAIN_S

    def refuses(self, standing: Standing) -> bool:
        """Whether a row that was carried over ends here."""
        return standing in self._refused
