"""A response that still runs, and its end in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio

from trouper.actors.runtime.answer import Answer
from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.replies import Delta
from trouper.web.output.dialect import Json
from trouper.web.responses.response_events import ResponseDialect
from trouper.web.responses.response_store import StoredResponse
from trouper.web.streaming.event_log import EventLog
from trouper.web.streaming.response_streams import DELTA_BYTES, Hold

STOPPED = Problem(
    500, "the server could not finish the response", "server_error", None, "internal_error"
)


@attrs.define(eq=False, kw_only=True)
class Live:
    """A response that still runs."""

    id: str
    dialect: ResponseDialect
    answer: Answer
    earlier: list[Json]
    """Items of the conversation that it continues."""
    previous: str | None
    """Id of the response that it continues."""
    input: tuple[Json, ...]
    background: bool
    stored: bool
    log: EventLog | None
    owner: str
    """Identity of the API key that created it."""
    hold: Hold
    """Called as more of it is kept, if it runs in the background."""
    settling: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while the ended response is stored."""

    def ended(self) -> StoredResponse:
        return StoredResponse(
            self.dialect.response(), self.input, self.previous, self.log, self.owner
        )


async def run(live: Live, settle: Callable[[], Awaitable[None]]) -> None:
    """Run a response in the background until it ends or the server does, and store it."""
    dialect, answer, held = live.dialect, live.answer, 0
    try:
        while isinstance(event := await answer.next(), Delta):
            dialect.text(0, event, answer)
            size = 0 if live.log is None else live.log.size
            live.hold(DELTA_BYTES + size - held)
            held = size
        dialect.ending(0, event, answer)
    except RequestFailed as failed:
        dialect.failure(failed.problem)
    finally:
        dialect.failure(STOPPED)  # Has no effect if the response is over.
    await settle()
