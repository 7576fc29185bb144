"""Steps that failed for lack of file descriptors, processes or system memory. Pure.

Compiling a kernel takes such resources, and a brief shortage is no crash: all requests resume. Rows
with new work in the step run alone until past that point; a second failure there is answered 503.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.actors.scheduling.crash_attribution import Involved, Standing

AGAIN_S = 60.0
"""Time within which a second failure belongs to the first."""


@attrs.define(eq=False)
class SystemShortages:
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
