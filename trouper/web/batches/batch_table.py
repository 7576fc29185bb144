"""Batches, and their lines in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from sqlite3 import Connection
from typing import Any, TypeVar

import attrs
import msgspec
import trio

from trouper.web.batches.stored_files import StoredFile, insert_file
from trouper.web.serving.state_database import StateDatabase

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
    """Identity of the API key that made the batch."""
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
    image_bytes: int = 0
    scope: trio.CancelScope | None = None
    started: bool = False
    fault: str = ""
    """Error of the last write, if any."""
    entering: trio.Lock = attrs.field(factory=trio.Lock)
    fetching: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while images are fetched: lines that name the same one wait for it."""

    @property
    def status(self) -> str:
        return self.state.status

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def unanswered(self) -> Iterator[int]:
        """In the order of the file; some may get an answer meanwhile."""
        return (number for number in range(self.total) if number not in self.answered)

    def count(self, answer: LineAnswer) -> None:
        if answer.number not in self.answered:
            self.answered.add(answer.number)
            self.failed += not answer.ok
            self.answer_bytes += len(answer.output)

    def forget_answers(self) -> None:
        # Free the numbers: 50,000 take megabytes, and the state has the counts.
        self.answered, self.failed, self.answer_bytes = set(), 0, 0
        self.image_bytes = 0

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


PIECE_BYTES = 2**20
"""Bytes of answers per read."""
T = TypeVar("T")


@attrs.frozen
class Attempts:
    """Runs of a line without an end."""

    all: int = 0
    begun: int = 0
    """Runs for which a model began to work."""


# An attempt is written before its request runs, and `begun` before a model works: a request that
# kills the process is counted each time. A line without a stored answer runs again. A batch's end,
# files and deletion of lines are one transaction.
class BatchTable:
    """Writes of cancelled tasks are completed: memory and database agree. Methods raise
    `OSError`."""

    def __init__(self, database: StateDatabase) -> None:
        self._database = database

    async def _write(self, batch: Batch, work: Callable[[Connection], T], **options: bool) -> T:
        with trio.CancelScope(shield=True):
            result = await self._database.run(work, **options)
        batch.fault = ""
        return result

    async def load(self) -> list[Batch]:
        return await self._database.run(_read_batches)

    async def create(self, batch: Batch) -> None:
        await self._write(batch, partial(insert_batch, spec=batch.spec, state=batch.state))

    async def delete(self, batches: Sequence[Batch]) -> None:
        if batches:
            ids = [batch.spec.id for batch in batches]
            await self._database.run(partial(_delete_batches, ids=ids))

    async def enter(self, batch: Batch, status: str, at: int) -> None:
        """Enter a status, except in a batch that is being cancelled or has ended."""
        work = partial(enter_status, batch_id=batch.spec.id, status=status, at=at)
        with trio.CancelScope(shield=True):
            async with batch.entering:
                batch.state = await self._write(batch, work)

    async def finish(self, batch: Batch, state: BatchState, files: Sequence[StoredFile]) -> None:
        """Write the end together with the output files."""
        work = partial(_finish, batch_id=batch.spec.id, state=state, files=files)
        with trio.CancelScope(shield=True):
            async with batch.entering:  # A status that was written before is noted before, too.
                await self._write(batch, work, truncates=True)
                batch.state = state

    async def interrupted(self, batch: Batch) -> list[int]:
        """Return started lines without an answer, by number of attempts."""
        return await self._database.run(partial(_read_interrupted, batch_id=batch.spec.id))

    async def attempts(self, batch: Batch, number: int) -> Attempts:
        work = partial(_read_attempts, batch_id=batch.spec.id, number=number)
        return await self._database.run(work)

    async def begin_attempt(self, batch: Batch, number: int, limit: Attempts) -> Attempts:
        """Begin an attempt below the limit. Returns the number of earlier attempts."""
        work = partial(_begin_attempt_below, batch_id=batch.spec.id, number=number, limit=limit)
        return await self._write(batch, work)

    async def begin_work(self, batch: Batch, number: int) -> None:
        await self._write(batch, partial(begin_work, batch_id=batch.spec.id, number=number))

    async def return_attempt(self, batch: Batch, number: int) -> None:
        """Take back an attempt that ended through no fault of the request."""
        await self._write(batch, partial(return_attempt, batch_id=batch.spec.id, number=number))

    async def store_answers(self, batch: Batch, answers: Sequence[LineAnswer]) -> None:
        work = partial(insert_answers, batch_id=batch.spec.id, answers=answers)
        await self._write(batch, work)
        for answer in answers:
            batch.count(answer)

    async def read_image(self, batch: Batch, url: str) -> bytes | None:
        return await self._database.run(partial(_read_image, batch_id=batch.spec.id, url=url))

    async def keep_image(self, batch: Batch, url: str, data: bytes) -> None:
        await self._write(batch, partial(_insert_image, batch_id=batch.spec.id, url=url, data=data))
        batch.image_bytes += len(data)

    async def outputs(self, batch: Batch, *, ok: bool) -> AsyncIterator[bytes]:
        """Yield the output file or the error file in the order of the lines."""
        after: int | None = -1
        while after is not None:
            work = partial(_read_outputs, batch_id=batch.spec.id, ok=ok, after=after)
            piece, after = await self._database.run(work)
            yield piece


# -- statements ----------------------------------------------------------------------------------


def _read_batches(connection: Connection) -> list[Batch]:
    rows = connection.execute("SELECT spec, state FROM batches ORDER BY rowid")
    batches = {
        spec.id: Batch(spec, msgspec.json.decode(state, type=BatchState))
        for spec, state in ((msgspec.json.decode(row[0], type=BatchSpec), row[1]) for row in rows)
    }
    answers = "SELECT batch, number, ok, length(output) FROM lines WHERE output IS NOT NULL"
    for batch_id, number, ok, size in connection.execute(answers):
        batch = batches[batch_id]
        batch.answered.add(number)
        batch.failed += not ok
        batch.answer_bytes += size
    images = "SELECT batch, sum(length(data)) FROM batch_images GROUP BY batch"
    for batch_id, size in connection.execute(images):
        batches[batch_id].image_bytes = size
    return sorted(batches.values(), key=lambda batch: batch.spec.created_at)


def insert_batch(connection: Connection, spec: BatchSpec, state: BatchState) -> None:
    row = (spec.id, msgspec.json.encode(spec), msgspec.json.encode(state))
    connection.execute("INSERT INTO batches (id, spec, state) VALUES (?, ?, ?)", row)


def _delete_batches(connection: Connection, ids: Sequence[str]) -> None:
    connection.executemany("DELETE FROM batches WHERE id = ?", [(each,) for each in ids])


def enter_status(connection: Connection, batch_id: str, status: str, at: int) -> BatchState:
    select = "SELECT state FROM batches WHERE id = ?"
    [encoded] = connection.execute(select, (batch_id,)).fetchone()
    state = msgspec.json.decode(encoded, type=BatchState)
    if state.status == "cancelling" or state.status in ENDED:
        return state
    state = msgspec.structs.replace(state, status=status, times=state.times | {status: at})
    _write_state(connection, batch_id, state)
    return state


def _write_state(connection: Connection, batch_id: str, state: BatchState) -> None:
    row = (msgspec.json.encode(state), batch_id)
    connection.execute("UPDATE batches SET state = ? WHERE id = ?", row)


def _finish(
    connection: Connection, batch_id: str, state: BatchState, files: Sequence[StoredFile]
) -> None:
    for file in files:
        insert_file(connection, file)
    _write_state(connection, batch_id, state)
    connection.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
    connection.execute("DELETE FROM batch_images WHERE batch = ?", (batch_id,))


def _read_interrupted(connection: Connection, batch_id: str) -> list[int]:
    select = (
        "SELECT number FROM lines WHERE batch = ? AND output IS NULL AND attempts > 0 "
        "ORDER BY attempts, number"
    )
    return [number for (number,) in connection.execute(select, (batch_id,))]


def _read_attempts(connection: Connection, batch_id: str, number: int) -> Attempts:
    select = "SELECT attempts, begun FROM lines WHERE batch = ? AND number = ?"
    return Attempts(*connection.execute(select, (batch_id, number)).fetchone() or ())


def _begin_attempt_below(
    connection: Connection, batch_id: str, number: int, limit: Attempts
) -> Attempts:
    attempts = _read_attempts(connection, batch_id, number)
    if attempts.all < limit.all and attempts.begun < limit.begun:
        begin_attempt(connection, batch_id, number)
    return attempts


def begin_attempt(connection: Connection, batch_id: str, number: int) -> None:
    connection.execute(
        "INSERT INTO lines (batch, number, attempts) VALUES (?, ?, 1) "
        "ON CONFLICT DO UPDATE SET attempts = attempts + 1, at_work = 0",
        (batch_id, number),
    )


def begin_work(connection: Connection, batch_id: str, number: int) -> None:
    connection.execute(
        "UPDATE lines SET begun = begun + 1, at_work = 1 WHERE batch = ? AND number = ?",
        (batch_id, number),
    )


def return_attempt(connection: Connection, batch_id: str, number: int) -> None:
    connection.execute(
        "UPDATE lines SET attempts = max(0, attempts - 1), begun = begun - at_work, at_work = 0 "
        "WHERE batch = ? AND number = ?",
        (batch_id, number),
    )


def insert_answers(connection: Connection, batch_id: str, answers: Sequence[LineAnswer]) -> None:
    connection.executemany(
        "INSERT INTO lines (batch, number, ok, output) VALUES (?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET ok = excluded.ok, output = excluded.output "
        "WHERE output IS NULL",
        [(batch_id, each.number, each.ok, each.output) for each in answers],
    )


def _read_image(connection: Connection, batch_id: str, url: str) -> bytes | None:
    select = "SELECT data FROM batch_images WHERE batch = ? AND url = ?"
    row = connection.execute(select, (batch_id, url)).fetchone()
    return None if row is None else bytes(row[0])


def _insert_image(connection: Connection, batch_id: str, url: str, data: bytes) -> None:
    insert = "INSERT OR IGNORE INTO batch_images (batch, url, data) VALUES (?, ?, ?)"
    connection.execute(insert, (batch_id, url, data))


def _read_outputs(
    connection: Connection, batch_id: str, ok: bool, after: int
) -> tuple[bytes, int | None]:
    """Return lines behind that number and the last line's number (None at the end)."""
    select = (
        "SELECT number, output FROM lines WHERE batch = ? AND number > ? AND ok = ? "
        "AND output IS NOT NULL ORDER BY number"
    )
    lines, size = list[bytes](), 0
    for number, output in connection.execute(select, (batch_id, after, ok)):
        lines += (output, b"\n")
        size += len(output)
        if size >= PIECE_BYTES:
            return b"".join(lines), number
    return b"".join(lines), None
