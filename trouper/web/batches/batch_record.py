"""A batch: what was asked for, how far it is, and how it looks in the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from trouper.web.batches.answer_log import AnswerLog, BatchProgress, BatchRecord
from trouper.web.batches.input_lines import LineError

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
SPEC, LOG, RESULT = "batch.json", "log.jsonl", "result.json"
"""Files of a batch's directory. The log is there until the result is, which is written once."""


class BatchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for. It is written when the batch is created, and never changes."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    """Unix seconds, as all times here."""
    expires_at: int
    metadata: dict[str, str] | None = None
    owner: str = ""
    """Identity of the API key that made it. Its requests run as requests of this key, and no other
    key sees it."""
    output_file_id: str
    error_file_id: str
    """Ids of the files that it will leave. They are chosen now, so that a restart in the middle of
    writing them writes the same ones.
    """


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch ended."""

    status: str
    times: dict[str, int]
    total: int
    completed: int
    failed: int
    errors: list[dict[str, Any]]
    has_output: bool
    has_errors: bool


@attrs.define(eq=False)
class Batch:
    """A batch in memory."""

    spec: BatchSpec
    directory: Path
    log: AnswerLog
    progress: BatchProgress = attrs.field(factory=BatchProgress)
    total: int = 0
    """Number of its requests; 0 until they are validated."""
    result: BatchResult | None = None
    scope: trio.CancelScope | None = None
    """Ends what runs of it."""
    started: bool = False
    """Whether the worker has it."""
    fault: str = ""
    """Why nothing of it could be written when it was tried last; empty if it was."""

    @classmethod
    def of(cls, spec: BatchSpec, directory: Path) -> Batch:
        return cls(spec, directory, AnswerLog(directory / LOG))

    @property
    def status(self) -> str:
        return self.progress.status if self.result is None else self.result.status

    @property
    def ended(self) -> bool:
        return self.result is not None

    def replay(self) -> None:
        """Open the log and read how far the batch was. Runs in a thread; raises `OSError`, or
        msgspec's error for a damaged log."""
        self.progress = BatchProgress()
        for record in self.log.open():
            self.progress.add(record)

    async def record(self, *records: BatchRecord) -> None:
        """Append to the log; counts once the records are on disk. Raises `OSError`."""
        await self.log.append(*records)
        self.fault = ""
        for record in records:
            self.progress.add(record)

    def unanswered(self) -> Iterator[int]:
        """The requests without an answer, in the order of the file. Some of them may get one while
        this is read."""
        return (number for number in range(self.total) if number not in self.progress.answered)

    def result_of(
        self, status: str, now: int, errors: list[LineError] | None = None
    ) -> BatchResult:
        """The result, if the batch ends now."""
        failed = self.progress.failed
        completed = len(self.progress.answered) - failed
        return BatchResult(
            status=status,
            times=self.progress.times | {status: now},
            total=self.total,
            completed=completed,
            failed=failed,
            errors=[error.body() for error in errors or ()],
            has_output=completed > 0,
            has_errors=failed > 0,
        )

    def body(self) -> dict[str, Any]:
        """The batch as OpenAI's API describes it."""
        spec, progress = self.spec, self.progress
        result = self.result or self.result_of(
            progress.status, progress.times.get(progress.status, 0)
        )
        ended = self.result is not None
        return {
            "id": spec.id,
            "object": "batch",
            "endpoint": spec.endpoint,
            "errors": {"object": "list", "data": result.errors} if result.errors else None,
            "input_file_id": spec.input_file_id,
            "completion_window": spec.completion_window,
            "status": self.status,
            "output_file_id": spec.output_file_id if ended and result.has_output else None,
            "error_file_id": spec.error_file_id if ended and result.has_errors else None,
            "created_at": spec.created_at,
            "expires_at": spec.expires_at,
            **{f"{name}_at": result.times.get(name) or None for name in TIMES},
            "request_counts": {
                "total": result.total,
                "completed": result.completed,
                "failed": result.failed,
            },
            "metadata": spec.metadata,
        }
