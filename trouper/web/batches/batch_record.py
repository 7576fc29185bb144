"""Batches: the client's request, the state, and the description in the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
import trio

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
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
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    """Unix seconds, as all times here."""
    expires_at: int
    metadata: dict[str, str] | None = None
    owner: str = ""
    """Identity of the API key that made the batch; requests run for this key, no other key sees the
    batch."""
    output_file_id: str
    error_file_id: str
    """File ids are fixed here: a restart amid the writing writes the same files."""


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """The counts are final once the batch has ended."""

    status: str = "validating"
    times: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []


@attrs.frozen
class LineAnswer:
    """Lines count from 0."""

    number: int
    ok: bool
    """Whether the answer goes to the output file or to the error file."""
    output: bytes


@attrs.define(eq=False)
class Batch:
    spec: BatchSpec
    state: BatchState = attrs.field(factory=BatchState)
    total: int = 0
    """Number of lines; 0 before validation."""
    answered: set[int] = attrs.field(factory=set)
    """Lines whose answers are in the database; empty after the batch's end."""
    failed: int = 0
    answer_bytes: int = 0
    """Bytes of answers in the database."""
    scope: trio.CancelScope | None = None
    started: bool = False
    fault: str = ""
    """Error of the last write, if any."""
    entering: trio.Lock = attrs.field(factory=trio.Lock)

    @property
    def status(self) -> str:
        return self.state.status

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def unanswered(self) -> Iterator[int]:
        """Yield lines without an answer in the order of the file; some may get one meanwhile."""
        return (number for number in range(self.total) if number not in self.answered)

    def count(self, answer: LineAnswer) -> None:
        if answer.number not in self.answered:
            self.answered.add(answer.number)
            self.failed += not answer.ok
            self.answer_bytes += len(answer.output)

    def forget_answers(self) -> None:
        """Free the numbers: 50,000 take megabytes, and the state has the counts."""
        self.answered, self.failed, self.answer_bytes = set(), 0, 0

    def counted(self) -> BatchState:
        if self.ended:
            return self.state
        completed = len(self.answered) - self.failed
        return msgspec.structs.replace(
            self.state, total=self.total, completed=completed, failed=self.failed
        )

    def body(self) -> dict[str, Any]:
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
