"""The log of a batch: what happened to its requests, appended and synced, so that a killed process
loses no answer and gives none twice.

Each line is one JSON record. The order is what makes it safe. `attempt` is on disk before its
request runs, and `begun` before a model works for it, so a request that kills the process is
counted, however often it does. `answer` is on disk before the request counts as answered. A request
whose answer is not in the log has none, and runs again; one whose answer is there never does. A
kill in the middle of an append leaves a line without its end, which is cut off when the log is
opened again: nobody relied on it, since its append had not returned.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import msgspec
import trio

from trouper.protocol.private_files import FILE_MODE
from trouper.web.batches import durable_files
from trouper.web.batches.disk_threads import on_disk

Sync = Callable[[int], None]
NOTHING = msgspec.Raw()


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record. Exactly one of the first five fields is set; requests are numbered from 0."""

    attempt: int | None = None
    """A request begins to run."""
    begun: int | None = None
    """A request that runs is given to its model, which is loaded."""
    returned: int | None = None
    """A request that began was not run to its end, through no fault of its own: the attempt does
    not count."""
    answer: int | None = None
    """A request has its answer, `output`."""
    status: str | None = None
    """The batch has this status since `at`."""
    ok: bool = True
    """Whether the answer is a success, and belongs into the output file; otherwise into the error
    file."""
    output: msgspec.Raw = NOTHING
    """The line of the output or error file."""
    at: int = 0
    """Unix seconds."""


class LogSummary(msgspec.Struct, frozen=True):
    """What the log says about answers, without their text."""

    answer: int | None = None
    attempt: int | None = None
    begun: int | None = None
    returned: int | None = None
    status: str | None = None
    ok: bool = True
    at: int = 0


class _Commit:
    """Records that are written and synced together, and those who wait for it."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.done = False
        self.error: OSError | None = None


class AnswerLog:
    """The log, to which records are appended."""

    def __init__(self, path: Path, *, sync: Sync = os.fsync) -> None:
        """`sync` makes what was written to a file descriptor durable."""
        self.path, self._sync = path, sync
        self._lock = trio.Lock()
        self._commit = _Commit()
        self._closed = True
        self.bytes = 0
        """Length of the log up to the last record that is on disk."""

    def open(self) -> Iterator[LogSummary]:
        """Begin the log, or yield the records of the one that is there. Cuts off a record without
        an end. Runs in a thread; raises `OSError`."""
        if not self.path.exists():
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE))
            durable_files.sync_directory(self.path.parent)
        self.bytes = 0
        decoder = msgspec.json.Decoder(LogSummary)
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                yield decoder.decode(line)
                self.bytes += len(line)
        os.truncate(self.path, self.bytes)
        self._closed = False

    async def append(self, *records: BatchRecord) -> None:
        """Return when the records are on disk. Those of tasks that wait together are synced once. A
        cancelled task's records are written all the same. Raises `OSError`: then none of them is in
        the log."""
        commit = self._commit
        commit.records += [msgspec.json.encode(record) + b"\n" for record in records]
        with trio.CancelScope(shield=True):
            async with self._lock:
                if not commit.done:
                    self._commit = _Commit()
                    try:
                        await on_disk(self._write, b"".join(commit.records))
                    except OSError as error:
                        commit.error = error
                    commit.done = True
        if commit.error is not None:
            raise OSError(*commit.error.args) from commit.error

    def _write(self, data: bytes) -> None:
        """Append, or leave the log as it was. It has a file descriptor only meanwhile, since any
        number of batches may wait at a time."""
        if self._closed:
            raise OSError(errno.EBADF, "the log is closed")
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            durable_files.write_all(fd, data)
            self._sync(fd)
        except OSError:
            os.ftruncate(fd, self.bytes)
            raise
        finally:
            os.close(fd)
        self.bytes += len(data)

    def outputs(self, *, ok: bool) -> Iterator[bytes]:
        """Yield the lines of the output file, or of the error file, one for each answered request.
        Runs in a thread; raises `OSError`."""
        decoder, seen = msgspec.json.Decoder(BatchRecord), set[int]()
        with self.path.open("rb") as file:
            for line in file:
                record = decoder.decode(line)
                if record.answer is None or record.answer in seen:
                    continue
                seen.add(record.answer)
                if record.ok is ok:
                    yield bytes(record.output) + b"\n"

    def close(self) -> None:
        """Let nothing be appended any more."""
        self._closed = True


@attrs.define(eq=False)
class BatchProgress:
    """What a log's records add up to."""

    status: str = "validating"
    times: dict[str, int] = attrs.field(factory=dict)
    """When the batch got each of its statuses, in Unix seconds."""
    attempts: dict[int, int] = attrs.field(factory=dict)
    """How often requests without an answer began to run."""
    begun: dict[int, int] = attrs.field(factory=dict)
    """How often a model began to work for them."""
    _at_work: set[int] = attrs.field(factory=set)
    """Requests whose last attempt has begun."""
    answered: set[int] = attrs.field(factory=set)
    failed: int = 0
    """How many of the answers are errors."""

    def add(self, record: LogSummary | BatchRecord) -> None:
        if record.status is not None:
            if self.status == "cancelling":
                # It was logged while the batch was about to enter another status: it is cancelled
                # all the same.
                return
            self.status = record.status
            self.times[record.status] = record.at
        elif record.attempt is not None:
            self.attempts[record.attempt] = self.attempts.get(record.attempt, 0) + 1
            self._at_work.discard(record.attempt)
        elif record.begun is not None:
            self.begun[record.begun] = self.begun.get(record.begun, 0) + 1
            self._at_work.add(record.begun)
        elif record.returned is not None:
            self.attempts[record.returned] = max(0, self.attempts.get(record.returned, 0) - 1)
            if record.returned in self._at_work:
                self._at_work.discard(record.returned)
                self.begun[record.returned] -= 1
        elif record.answer is not None and record.answer not in self.answered:
            self.answered.add(record.answer)
            self.failed += not record.ok
            self.attempts.pop(record.answer, None)
            self.begun.pop(record.answer, None)
            self._at_work.discard(record.answer)
