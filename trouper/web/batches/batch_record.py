"""A batch: the client's request for it, its state, and its description in the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
import trio

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses of a batch of which nothing runs any more."""
STATUSES = (
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
)
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""Statuses whose time the API names, as in `completed_at`."""


class BatchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The client's request, which never changes."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    """Unix seconds, as all times here."""
    expires_at: int
    metadata: dict[str, str] | None = None
    owner: str = ""
    """Identity of the API key that made the batch: its lines run as requests of this key, and no
    other key sees it."""
    output_file_id: str
    error_file_id: str
    """Ids of the files that the batch will leave: a restart while they are written writes the same
    ones."""


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a batch is. The counts are final once it has ended."""

    status: str = "validating"
    times: dict[str, int] = {}
    """When the batch entered each of its statuses."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []
    """The errors of a batch that could not be run."""


@attrs.frozen
class LineAnswer:
    """The answer to a line of a batch; lines count from 0."""

    number: int
    ok: bool
    """Whether the answer belongs into the output file; otherwise into the error file."""
    output: bytes
    """The line of that file."""


@attrs.define(eq=False)
class Batch:
    """A batch in memory."""

    spec: BatchSpec
    state: BatchState = attrs.field(factory=BatchState)
    total: int = 0
    """Number of its lines; 0 until they are validated."""
    answered: set[int] = attrs.field(factory=set)
    """Lines whose answers are in the database; empty once the batch has ended."""
    failed: int = 0
    """How many of the answers are errors."""
    answer_bytes: int = 0
    """Bytes of the answers in the database."""
    scope: trio.CancelScope | None = None
    """Ends what runs of it."""
    started: bool = False
    """Whether the worker has it."""
    fault: str = ""
    """Why the last write failed; empty if it did not."""
    entering: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while the batch enters a status."""

    @property
    def status(self) -> str:
        return self.state.status

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def unanswered(self) -> Iterator[int]:
        """The lines without an answer, in the order of the file. Some may get one meanwhile."""
        return (number for number in range(self.total) if number not in self.answered)

    def count(self, answer: LineAnswer) -> None:
        """Count an answer that is in the database."""
        if answer.number not in self.answered:
            self.answered.add(answer.number)
            self.failed += not answer.ok
            self.answer_bytes += len(answer.output)

    def forget_answers(self) -> None:
        """The state has the counts, and 50,000 numbers are megabytes."""
        self.answered, self.failed, self.answer_bytes = set(), 0, 0

    def counted(self) -> BatchState:
        """The state with the counts of now."""
        if self.ended:
            return self.state
        completed = len(self.answered) - self.failed
        return msgspec.structs.replace(
            self.state, total=self.total, completed=completed, failed=self.failed
        )

    def body(self) -> dict[str, Any]:
        """The batch as OpenAI's API describes it."""
        spec, state = self.spec, self.counted()
        errors = {"object": "list", "data": state.errors} if state.errors else None
        return {
            "id": spec.id,
            "object": "batch",
            "endpoint": spec.endpoint,
            "errors": errors,
            "input_file_id": spec.input_file_id,
            "completion_window": spec.completion_window,
            "status": state.status,
            "output_file_id": spec.output_file_id if self.ended and state.completed else None,
            "error_file_id": spec.error_file_id if self.ended and state.failed else None,
            "created_at": spec.created_at,
            "expires_at": spec.expires_at,
            **{f"{name}_at": state.times.get(name) or None for name in TIMES},
            "request_counts": {
                "total": state.total,
                "completed": state.completed,
                "failed": state.failed,
            },
            "metadata": spec.metadata,
        }
