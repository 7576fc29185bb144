"""Where a request stands and why it waits there.

The actor at whose hands a request waits notes the state and the reason. `GET /v1/requests/ID`, the
live page, the log and traces show the last `KEPT` transitions.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

import attrs

from trouper.protocol.logs import FIELDS, REQUEST_ID

RequestState = Literal["preparing", "queued", "prefilling", "decoding", "preempted"]
WaitReason = Literal[
    "",
    "model",
    "tokenizing",
    "grammar",
    "step",
    "rows",
    "share",
    "memory",
    "priority",
    "prefix",
    "disk",
    "image",
    "trial",
    "crash",
    "client",
    "stop_string",
    "parser",
]
WAITS_FOR: Mapping[WaitReason, str] = {
    "": "",
    "model": "its model to be loaded",
    "tokenizing": "its prompt to be tokenized",
    "grammar": "its grammar to be compiled",
    "step": "the step at hand to end, since the queue is filled between steps",
    "rows": "a row: all that may be in use are (--completion-batch-size, --prefill-batch-size)",
    "share": "a row: its key has its share of the rows",
    "memory": "memory for its KV cache",
    "priority": "requests of a higher priority",
    "prefix": "a prefix of its prompt that another request computes",
    "disk": "blocks of its prompt to be read from disk",
    "image": "an image to be decoded and encoded",
    "trial": "a request that runs alone, since it may have crashed the engine",
    "crash": "the engine, which begins again after a crash",
    "client": "its client, which does not read",
    "stop_string": "text that decides whether a stop string has begun",
    "parser": "text that decides whether a tool call or reasoning has begun",
}
KEPT = 16
LONG_WAIT_S = 5.0
"""A wait of this length has a line in the log when it ends."""
log = logging.getLogger("trouper.waits")


@attrs.frozen
class Transition:
    state: RequestState
    reason: WaitReason
    """ "": the request does not wait."""
    at: float
    """On the clock of the history."""
    detail: str = ""

    @property
    def waits_for(self) -> str:
        """The reason in words; "" without one."""
        return WAITS_FOR[self.reason] + self.detail if self.reason else ""


@attrs.define(eq=False)
class History:
    """The last transitions of one request. They decide a time limit's text alone."""

    request_id: str = ""
    clock: Callable[[], float] = time.monotonic
    transitions: deque[Transition] = attrs.field(factory=lambda: deque(maxlen=KEPT))
    preempted_s: float = 0.0
    """Without the present preemption, until `end`."""
    _held: Transition | None = None
    # The wait of the answer's reader, apart from `transitions`: readers wait for a token's time
    # again and again, which would push all other waits out.

    @property
    def is_held(self) -> bool:
        return self._held is not None

    @property
    def latest(self) -> Transition | None:
        return self._held or (self.transitions[-1] if self.transitions else None)

    def note(self, state: RequestState, reason: WaitReason = "", detail: str = "") -> None:
        """Note a state and a reason, unless they are the last ones."""
        last = self.transitions[-1] if self.transitions else None
        if last is not None and (last.state, last.reason, last.detail) == (state, reason, detail):
            return
        now = self.clock()
        self._leave(last, now)
        self.transitions.append(Transition(state, reason, now, detail))

    def hold(self, reason: WaitReason) -> None:
        """Note that the reader of the answer waits, until `release`."""
        if self._held is None or self._held.reason != reason:
            self.release()
            self._held = Transition("decoding", reason, self.clock())

    def release(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        now = self.clock()
        if self._leave(held, now):
            self.transitions += (held, Transition("decoding", "", now))

    def end(self) -> None:
        """Log the wait in which the request ended, if long."""
        self.release()
        self._leave(self.latest, self.clock())

    def _leave(self, ended: Transition | None, now: float) -> bool:
        """Count a preemption, and log a long wait. Returns whether it was one."""
        if ended is not None and ended.state == "preempted":
            self.preempted_s += now - ended.at
        if ended is None or not ended.reason or now - ended.at < LONG_WAIT_S:
            return False
        seconds = now - ended.at
        fields = {
            "event": "waited",
            "state": ended.state,
            "reason": ended.reason,
            "seconds": seconds,
        }
        log.info(
            "request %s waited %.1f s for %s",
            self.request_id,
            seconds,
            ended.waits_for,
            extra={FIELDS: fields, REQUEST_ID: self.request_id},
        )
        return True
