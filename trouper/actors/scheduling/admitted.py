"""A request as RequestIntake passes it on, and the way back to its client."""

from __future__ import annotations

from typing import Protocol

import attrs

from trouper.protocol.plans import ThinkingLimit
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Reply
from trouper.protocol.requests import Generate


class Client(Protocol):
    """Where the replies to one request go. Never blocks."""

    @property
    def request(self) -> Generate: ...

    @property
    def aborted(self) -> bool:
        """Whether nobody listens any more."""

    def accept(self, prompt: tuple[int, ...], max_tokens: int) -> None: ...

    def reply(self, event: Reply, /) -> bool: ...

    def fail(self, problem: Problem) -> None:
        """The terminal event, and the close."""

    def close(self) -> None: ...


@attrs.frozen(eq=False)
class Admitted:
    """A request that the model can answer: its tokens, and how many more it may have."""

    submission: Client
    prompt: tuple[int, ...]
    max_tokens: int
    thinking: ThinkingLimit | None = None
    compiled: object = None
    """Keeps the compiled grammar available to the engine."""
