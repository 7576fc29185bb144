"""The directory of files and batches (--batch-dir): one server at a time owns it.

The owner holds a lock on the file `lock`, which the system releases however the process ends. Nothing is created before a client
uploads the first file, so a server that is never used for batches leaves no directory behind.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import trio

from trouper.protocol.paths import exists
from trouper.protocol.problems import Problem, RequestFailed, is_scarcity
from trouper.web.batches import durable_files
from trouper.web.batches.batch_record import RESULT, SPEC, Batch, BatchResult, BatchSpec
from trouper.web.batches.disk_threads import on_disk
from trouper.web.batches.stored_files import FileStore

log = logging.getLogger("trouper.batches")
MAX_ENDED = 10_000
"""Number of ended batches that are remembered; the oldest are forgotten at a start. Their files stay."""
NO_ROOM = "there is no room for answers; delete files, or start the server with a larger --batch-max-bytes"
ROOM_S = 0.5
"""Time until requests without room for their answers look again."""
RETRY_AFTER_S = 5
"""Retry-After of what is refused because of the directory."""
RETRY_S = 5.0
"""Time until a directory that another server has, or that cannot be read, is tried again."""


def _unavailable(message: str) -> RequestFailed:
    """The request can be sent again, when the directory is well."""
    return RequestFailed(
        Problem(503, message, "server_error", None, "batches_unavailable", retry_after_s=RETRY_AFTER_S)
    )


class BatchStorage:
    """Files and batches on disk, and their index in memory, which the event loop alone changes once it is loaded."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """`max_bytes`: bound on what all files and logs take."""
        self.directory, self.max_bytes = directory, max_bytes
        self.files = FileStore(directory / "files")
        self.batches: dict[str, Batch] = {}
        """By id, the oldest first."""
        self._unended: list[Batch] = []
        self.opened = trio.Event()
        self.problem = ""
        """Why the directory cannot be used; empty if it can."""
        self.waiting = 0
        """Number of requests that wait for room."""
        self._reserved = 0
        self._opening = trio.Lock()
        self._lock_fd = -1

    @property
    def unended(self) -> Sequence[Batch]:
        """The batches that have not ended, the oldest first."""
        self._unended = [batch for batch in self._unended if not batch.ended]
        return self._unended

    @property
    def _log_bytes(self) -> int:
        return sum(batch.log.bytes for batch in self.unended)

    @property
    def bytes(self) -> int:
        """Bytes of files and logs."""
        return self.files.total_bytes + self._log_bytes

    @property
    def room(self) -> int:
        """Bytes that are left. A batch that has not ended has as many as its log for the files that it will leave."""
        return max(0, self.max_bytes - self.files.total_bytes - 2 * self._log_bytes - self._reserved)

    async def has_room(self, size: int) -> None:
        """Wait until there is room for `size` bytes."""
        if self.room >= size:
            return
        if not self.waiting:
            log.warning("batches: %s", NO_ROOM)
        self.waiting += 1
        try:
            while self.room < size:  # noqa: ASYNC110 - files, logs and uploads change it in many places
                await trio.sleep(ROOM_S)
        finally:
            self.waiting -= 1

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Wait until there is room for `size` bytes, and reserve it until they are written."""
        await self.has_room(size)
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size

    async def open(self, *, create: bool) -> bool:
        """Take the directory, unless that is done. Returns whether it is there; `create` makes it. Raises `RequestFailed` (503) if
        another server has it, or it cannot be read."""
        async with self._opening:
            if not self.opened.is_set() and (create or await self._exists()):
                await self._open()
        return self.opened.is_set()

    async def _exists(self) -> bool:
        """On a thread: a file system that does not answer must not stop the server, which then would not even hear SIGTERM."""
        return await on_disk(exists, self.directory, abandon_on_cancel=True)

    async def _open(self) -> None:
        try:
            await on_disk(self._take)
            await on_disk(self._load)
        except BlockingIOError:
            self.problem = f"another server uses {self.directory}; give this one another --batch-dir"
        except OSError as error:
            self.problem = f"{self.directory} cannot be used: {error.strerror or error}; see --batch-dir"
        else:
            self.problem = ""
            self.opened.set()
            return
        self.close()
        raise _unavailable(self.problem)

    @contextmanager
    def written_for_client(self) -> Iterator[None]:
        """Raises `RequestFailed` (503) for a disk that takes no more, or is ill: the request can be sent again when it is not."""
        try:
            yield
        except OSError as error:
            log.warning("batches: %s cannot be written: %s", self.directory, error.strerror or error)
            message = f"the directory of batches cannot be written: {error.strerror or error}; make room there, or see --batch-dir"
            raise _unavailable(message) from error

    async def open_when_possible(self) -> None:
        """Return when the directory is open. One that another server has is tried again: that server may be about to end."""
        known = ""
        while not self.opened.is_set():
            try:
                if not await self.open(create=False):
                    await self.opened.wait()
            except RequestFailed as failed:
                if known != (known := failed.problem.message):
                    log.warning("batches: %s", known)
                with trio.move_on_after(RETRY_S):
                    await self.opened.wait()

    def _take(self) -> None:
        durable_files.make_directory(self.directory)
        if self._lock_fd < 0:
            self._lock_fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, durable_files.FILE_MODE)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Leave the directory to others."""
        for batch in self.batches.values():
            batch.log.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- batches -----------------------------------------------------------------------------------

    def _load(self) -> None:
        self.files.load()
        durable_files.make_directory(self._batch_directory)
        found = sorted(self._found(), key=lambda batch: (batch.spec.created_at, batch.spec.id))
        ended = [batch for batch in found if batch.ended]
        for batch in ended[:-MAX_ENDED]:
            shutil.rmtree(batch.directory, ignore_errors=True)
            found.remove(batch)
        self.batches = {batch.spec.id: batch for batch in found}
        self._unended = [batch for batch in found if not batch.ended]

    @property
    def _batch_directory(self) -> Path:
        return self.directory / "batches"

    def _found(self) -> Iterator[Batch]:
        for directory in self._batch_directory.iterdir():
            try:
                batch = Batch.of(msgspec.json.decode((directory / SPEC).read_bytes(), type=BatchSpec), directory)
                if (directory / RESULT).exists():
                    batch.result = msgspec.json.decode((directory / RESULT).read_bytes(), type=BatchResult)
                    batch.log.path.unlink(missing_ok=True)
                else:
                    batch.replay()
            except FileNotFoundError:
                shutil.rmtree(directory, ignore_errors=True)  # Its client was not told that it was created.
            except (OSError, msgspec.MsgspecError) as error:
                if is_scarcity(error):  # The directory is opened again soon.
                    raise
                log.warning("batches: %s cannot be read and is left alone: %s", directory, error)
            else:
                yield batch

    async def create(self, spec: BatchSpec) -> Batch:
        """Create a batch durably. Raises `OSError`."""
        batch = Batch.of(spec, self._batch_directory / spec.id)
        await on_disk(self._write, batch)
        self.batches[spec.id] = batch
        self._unended.append(batch)
        return batch

    def _write(self, batch: Batch) -> None:
        durable_files.make_directory(batch.directory)
        durable_files.write(batch.directory / SPEC, [msgspec.json.encode(batch.spec)])
        durable_files.sync_directory(self._batch_directory)
        batch.replay()

    def finish(self, batch: Batch, result: BatchResult) -> None:
        """Write the result; the log is not needed after it. Runs in a thread; raises `OSError`."""
        durable_files.write(batch.directory / RESULT, [msgspec.json.encode(result)])
        batch.result = result
        batch.log.close()
        batch.log.path.unlink(missing_ok=True)

    def batch(self, batch_id: str, owners: Collection[str]) -> Batch:
        """Return a batch of one of these owners. Raises `RequestFailed` (404), also for the batch of another owner."""
        batch = self.batches.get(batch_id)
        if batch is None or batch.spec.owner not in owners:
            message = f"no batch has the id {batch_id[:80]!r}; GET /v1/batches lists yours"
            raise RequestFailed(Problem(404, message, "invalid_request_error", None, "batch_not_found"))
        return batch

    def of(self, owners: Collection[str]) -> Sequence[Batch]:
        """The batches of these owners, the oldest first."""
        return [batch for batch in self.batches.values() if batch.spec.owner in owners]

    def unfinished(self, owners: Collection[str]) -> int:
        """Number of batches of these owners that have not ended."""
        return sum(batch.spec.owner in owners for batch in self.unended)

    def reads(self, file_id: str) -> bool:
        """Whether a batch that has not ended needs this file."""
        return any(batch.spec.input_file_id == file_id for batch in self.unended)
