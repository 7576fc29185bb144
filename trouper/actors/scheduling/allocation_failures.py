"""Steps that failed for lack of memory or of the system's resources. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.actors.scheduling.crash_attribution import Contents, Involved, Standing
from trouper.protocol.problems import Problem

BOUND_S = 300.0
"""Time for which a bound holds, and a too large content runs alone."""
AGAIN_S = 60.0
"""Time within which a second shortage of the system belongs to the first."""


# After a lack of device memory the engine restarts, and requests resume within half of the bytes in
# use, halved again until a row runs alone. A row that fails twice alone is answered 503, and the
# bound ends. The same content, sent again, runs alone for a while and costs no other row a token.
@attrs.define(eq=False)
class AllocationFailures:
    """Bounds rows and cached blocks after steps that ran out of device memory."""

    bound_bytes: int | None = None
    _until: float = 0.0
    # The row that ran alone in the last failed step.
    _lone: Standing | None = None
    _refused: Standing | None = None
    # Contents without enough memory although alone.
    _too_large: Contents = attrs.field(factory=lambda: Contents(BOUND_S))

    def failed(self, involved: Sequence[Involved], used_bytes: int, now: float) -> bool:
        """Handle a step without memory. Returns False if the failure counts as a crash."""
        if not involved:
            return False
        lone = involved[0].standing if len(involved) == 1 else None
        known = lone is not None and self.runs_alone(lone, now)
        if lone is not None and (known or lone is self._lone):
            self._too_large.add(lone.content, now)
            self._refused, self._lone = lone, None
            if not known:
                self.bound_bytes = None
            return True
        self._lone, self._until = lone, now + BOUND_S
        self.bound_bytes = max(1, min(used_bytes, self.bound_bytes or used_bytes) // 2)
        return True

    def look(self, now: float) -> int:
        """The present bound; 0 without one."""
        if now >= self._until:
            self.bound_bytes = None
        return self.bound_bytes or 0

    def runs_alone(self, standing: Standing, now: float) -> bool:
        return self._too_large.has(standing.content, now)

    def refuses(self, standing: Standing) -> bool:
        """Whether the device had no memory for this row alone; True once."""
        if standing is not self._refused:
            return False
        self._refused = None
        return True


def no_memory(tokens: int) -> Problem:
    message = (
        f"the device had no memory for a step of this request alone, which has {tokens} tokens: "
        "other programs use it, or it is too "
        "small for --prefill-step-size; try again when they have ended, or with fewer tokens"
    )
    return Problem(503, message, "server_error", None, "out_of_memory", retry_after_s=30)


@attrs.define(eq=False)
class SystemShortages:
    """Steps that failed for lack of file descriptors, processes or system memory.

    All requests resume. Rows with new work in the step run alone until past it, and are answered
    503 after a second failure."""

    _suspects: tuple[Standing, ...] = ()
    _until: float = 0.0
    _refused: tuple[Standing, ...] = ()

    def failed(self, involved: Sequence[Involved], now: float) -> None:
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
        return standing in self._refused
