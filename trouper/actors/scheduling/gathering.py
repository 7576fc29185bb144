"""Policy for gathering: whether an idle engine waits for further requests before it begins with the
first.

Prompts that begin together prefill at full speed, while one that came a moment late would have to
prefill beside the others' streams. A user with one conversation has no others, and would wait for
nothing with each request: on a fast GPU a fifth of the time to the first token. So after a few
waits in vain there is none, until requests come together again.
"""

from __future__ import annotations

from math import inf

import attrs

MAX_GATHER_S = 0.05
"""Upper bound of the wait for further requests, however steadily they come. Requests that come
within this time of the first one came together, waited for or not, unless the engine was idle
again."""
VAIN = 3
"""Number of consecutive requests to an idle engine that came alone, after which the next one is not
made to wait."""


@attrs.define
class Gathering:
    """How requests came to an idle engine. Times in seconds of the caller's clock."""

    gap_s: float
    """Time without a request after which a wait ends."""
    _alone: int = 0
    """Number of consecutive requests that came alone to an idle engine."""
    _began: float = -inf
    """When the last one came."""

    def begin(self, now: float) -> float:
        """A request has come to an idle engine: return how long to wait for each further one, 0 for
        not at all."""
        self._began, self._alone = now, self._alone + 1
        return self.gap_s if self._alone <= VAIN else 0.0

    def came(self, now: float) -> None:
        """Another request has come, while the engine works or others wait."""
        if now - self._began <= MAX_GATHER_S:
            self._alone = 0
