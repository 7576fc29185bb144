"""Time limits of a request: until it has a row, between chunks of its prefill, between tokens, and for the whole request."""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

import attrs
import trio

from trouper.protocol.problems import Problem
from trouper.protocol.replies import Progress
from trouper.protocol.requests import Timeouts
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch

Phase = Literal["queue", "prefill", "decode"]
Code = Literal["queue_timeout", "first_token_timeout", "token_timeout", "request_timeout"]


class Deadline(NamedTuple):
    """A time limit that applies now. `at`: trio.current_time() when the request is too late."""

    at: float
    seconds: float
    code: Code
    flag: str

    @property
    def problem(self) -> Problem:
        """The problem of a request that has met the limit."""
        message = {
            "queue_timeout": f"no row became free within {self.seconds:g} s",
            "first_token_timeout": f"the prefill made no progress within {self.seconds:g} s",
            "token_timeout": f"no further token came within {self.seconds:g} s",
            "request_timeout": f"the request took longer than {self.seconds:g} s",
        }[self.code]
        status, retry_after_s = (503, 1) if self.code == "queue_timeout" else (504, None)
        return Problem(status, f"{message} ({self.flag})", "timeout_error", code=self.code, retry_after_s=retry_after_s)


@attrs.define
class TimeLimits:
    """The limits of one request, and the phase that it is in."""

    timeouts: Timeouts
    began: float
    """trio.current_time() at submission."""
    progress: Watch[Progress] = attrs.field(factory=lambda: Watch(Progress()))
    phase: Phase = "queue"
    _phase_began: float = attrs.field(default=attrs.Factory(lambda self: self.began, takes_self=True))

    def enter(self, phase: Phase, now: float) -> None:
        """Begin a phase, or the wait for the next token, at trio.current_time() `now`."""
        self.phase, self._phase_began = phase, now

    def next_deadline(self, *, reply_waits: bool = False) -> Deadline:
        """The limit that comes first, unless there is progress before it. `reply_waits`: a reply has arrived in time and its reader
        was slow, so that only the limit of the whole request applies."""
        limits = self.timeouts
        request = _deadline(self.began, limits.request_s, "request_timeout", "--request-timeout-s")
        if reply_waits:
            return request
        match self.phase:
            case "queue":
                phase = _deadline(self._since, limits.queue_s, "queue_timeout", "--queue-timeout-s")
            case "prefill":
                phase = _deadline(self._since, limits.first_token_s, "first_token_timeout", "--first-token-timeout-s")
            case "decode":
                phase = _deadline(self._since, limits.between_tokens_s, "token_timeout", "--token-timeout-s")
        return min(phase, request, key=lambda deadline: deadline.at)

    @property
    def _since(self) -> float:
        """Time from which the limit of the phase counts: the last chunk counts as the last reply does."""
        progress = self.progress.latest
        return trio.current_time() if progress.preempted else max(self._phase_began, progress.at)


def _deadline(since: float, seconds: float | None, code: Code, flag: str) -> Deadline:
    """No `seconds`: the limit is never met."""
    return Deadline(since + (seconds or inf), seconds or 0.0, code, flag)


def default_timeouts(settings: Settings) -> Timeouts:
    """Timeouts of a request that sets none."""
    return Timeouts(
        queue_s=settings.queue_timeout_s or None,
        first_token_s=settings.first_token_timeout_s or None,
        between_tokens_s=settings.token_timeout_s or None,
        request_s=settings.request_timeout_s or None,
    )
