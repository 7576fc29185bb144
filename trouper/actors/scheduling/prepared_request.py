"""A request from RequestIntake: tokenized, its grammar compiled, answerable by the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.protocol.media import PromptImage
from trouper.protocol.plans import Breakers, ThinkingLimit
from trouper.protocol.problems import NOT_PREPARED, Problem
from trouper.protocol.replies import Progress, Reply
from trouper.protocol.requests import Generate
from trouper.protocol.waits import RequestState, WaitReason


class PreparedRequest(Protocol):
    """Prompt tokens and the way back to the client. No method blocks."""

    @property
    def request(self) -> Generate: ...

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def second_at(self) -> int:
        """As in `Admit`."""

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """Images of the prompt, ascending."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens, within the context."""

    @property
    def thinking(self) -> ThinkingLimit | None: ...

    @property
    def breakers(self) -> Breakers | None: ...

    @property
    def aborted(self) -> bool: ...

    def accept(self, max_tokens: int, /) -> None:
        """Tell the client that the request is queued, and the answer's maximum length."""

    def reply(self, event: Reply, /) -> bool: ...

    def report(self, progress: Progress, /) -> None: ...

    def note(self, state: RequestState, reason: WaitReason = "", detail: str = "", /) -> None:
        """Note where the request stands, and why it waits there."""

    def fail(self, problem: Problem) -> None: ...

    def close(self) -> None: ...


@contextmanager
def failing_client(client: PreparedRequest, counters: SchedulerCounters) -> Iterator[None]:
    """Fail the client before an error of the body goes on: the request is in no queue yet."""
    try:
        yield
    except BaseException:
        counters.add(requests_errored=1)
        client.fail(NOT_PREPARED)
        raise
