"""Time limits of a request: until its row, between chunks of prefill, between tokens, and in
total."""

from __future__ import annotations

from math import inf
from typing import Literal, NamedTuple

import attrs
import trio

from trouper.protocol.problems import Problem
from trouper.protocol.replies import NEXT_STEP, Progress
from trouper.protocol.requests import Timeouts
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch

Phase = Literal["preparation", "queue", "prefill", "decode"]
Code = Literal[
    "preparation_timeout",
    "queue_timeout",
    "first_token_timeout",
    "token_timeout",
    "request_timeout",
]


class Deadline(NamedTuple):
    """`at`: trio.current_time() at which the request is too late."""

    at: float
    seconds: float
    code: Code
    flag: str
    waited: str = ""

    @property
    def problem(self) -> Problem:
        message = {
            "preparation_timeout": self.waited,
            "queue_timeout": self.waited,
            "first_token_timeout": f"the prefill made no progress within {self.seconds:g} s",
            "token_timeout": f"no further token came within {self.seconds:g} s",
            "request_timeout": f"the request took longer than {self.seconds:g} s",
        }[self.code]
        is_early = self.code in ("preparation_timeout", "queue_timeout")
        status, retry_after_s = (503, 1) if is_early else (504, None)
        return Problem(
            status,
            f"{message} ({self.flag})",
            "timeout_error",
            code=self.code,
            retry_after_s=retry_after_s,
        )


@attrs.define
class TimeLimits:
    timeouts: Timeouts
    began: float
    """trio.current_time() at submission."""
    progress: Watch[Progress] = attrs.field(factory=lambda: Watch(Progress()))
    phase: Phase = "preparation"
    _phase_began: float = attrs.field(
        default=attrs.Factory(lambda self: self.began, takes_self=True)
    )

    def enter(self, phase: Phase, now: float) -> None:
        """Begin a phase, or the wait for the next token. Time in the queue counts from the
        submission."""
        self.phase, self._phase_began = phase, now

    def next_deadline(self, *, reply_waits: bool = False) -> Deadline:
        """The first limit without further progress. `reply_waits`: a reply has arrived in time, so
        only the total limit applies."""
        limits = self.timeouts
        request = _deadline(self.began, limits.request_s, "request_timeout", "--request-timeout-s")
        if reply_waits:
            return request
        match self.phase:
            case "preparation" | "queue":
                phase = self._until_row()
            case "prefill":
                phase = _deadline(
                    self._since,
                    limits.first_token_s,
                    "first_token_timeout",
                    "--first-token-timeout-s",
                )
            case "decode":
                phase = _deadline(
                    self._since, limits.between_tokens_s, "token_timeout", "--token-timeout-s"
                )
        return min(phase, request, key=lambda deadline: deadline.at)

    def _until_row(self) -> Deadline:
        seconds, reason = self.timeouts.queue_s or 0.0, self.progress.latest.waits_for
        if self.phase == "preparation":
            code: Code = "queue_timeout" if reason == NEXT_STEP else "preparation_timeout"
            waited = f"the request waited {seconds:g} s for {reason or 'the server to take it in'}"
        else:
            code, prepared_s = "queue_timeout", self._phase_began - self.began
            share = (
                f", {prepared_s:.0f} s of which it was being prepared" if prepared_s >= 1 else ""
            )
            waited = f"the request was given no row within {seconds:g} s{share}"
        limit = _deadline(self._since, seconds, code, "--queue-timeout-s")
        return limit._replace(waited=waited)

    @property
    def _since(self) -> float:
        progress = self.progress.latest
        began = self.began if self.phase in ("preparation", "queue") else self._phase_began
        return trio.current_time() if progress.preempted else max(began, progress.at)


def _deadline(since: float, seconds: float | None, code: Code, flag: str) -> Deadline:
    return Deadline(since + (seconds or inf), seconds or 0.0, code, flag)


def default_timeouts(settings: Settings) -> Timeouts:
    return Timeouts(
        queue_s=settings.queue_timeout_s or None,
        first_token_s=settings.first_token_timeout_s or None,
        between_tokens_s=settings.token_timeout_s or None,
        request_s=settings.request_timeout_s or None,
    )
