"""A request as RequestIntake passes it on: its prompt is tokenized, its grammar compiled, and the
model can answer it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from trouper.actors.scheduling.scheduler_counters import SchedulerCounters
from trouper.protocol.plans import Breakers, ThinkingLimit
from trouper.protocol.problems import NOT_PREPARED, Problem
from trouper.protocol.replies import Progress, Reply
from trouper.protocol.requests import Generate


class PreparedRequest(Protocol):
    """A request with its prompt's tokens, and the way back to its client. No method blocks.
    `Submission` is the only one outside of tests."""

    @property
    def request(self) -> Generate: ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """Prompt tokens, at least one."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens: what was requested, as far as the context has room."""

    @property
    def thinking(self) -> ThinkingLimit | None: ...

    @property
    def breakers(self) -> Breakers | None:
        """Sequence breakers of DRY."""

    @property
    def aborted(self) -> bool:
        """Whether the client closed the reply channel."""

    def accept(self, max_tokens: int, /) -> None:
        """Tell the client that the request is in the queue, and the maximum length of its
        answer."""

    def reply(self, event: Reply, /) -> bool: ...

    def report(self, progress: Progress, /) -> None:
        """Publish the progress of the row, which time limits read."""

    def fail(self, problem: Problem) -> None:
        """Send the terminal event and close."""

    def close(self) -> None: ...


@contextmanager
def answered(client: PreparedRequest, counters: SchedulerCounters) -> Iterator[None]:
    """A request that crashes what is done here has its terminal event: in no queue yet, it would
    wait for ever."""
    try:
        yield
    except BaseException:
        counters.add(requests_errored=1)
        client.fail(NOT_PREPARED)
        raise
