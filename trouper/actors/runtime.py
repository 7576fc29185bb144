"""The edge of the runtime: submit a request, hear its answer. No HTTP, no MLX."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

import attrs
import trio

from trouper.protocol.errors import Problem, RequestFailed
from trouper.protocol.health import ActorFacts, DirectoryFacts, MemoryStatus, SchedulerFacts
from trouper.protocol.model import ModelCard, Tokenizer
from trouper.protocol.replies import Accepted, Delta, Failed, Finished, Reply, Started
from trouper.protocol.requests import Generate, Timeouts
from trouper.protocol.settings import Settings


@attrs.frozen(kw_only=True)
class Health:
    """All that the actors publish, at one moment."""

    status: Literal["ok", "loading", "restarting", "stalled", "draining", "failed"]
    detail: str
    """One line for a person when the status is not ok."""
    scheduler: SchedulerFacts
    memory: MemoryStatus
    directory: DirectoryFacts
    actors: tuple[ActorFacts, ...]

    @property
    def ready(self) -> bool:
        return self.status == "ok"
