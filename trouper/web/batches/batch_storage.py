"""The directory of files and batches (--batch-dir): one server at a time owns it.

The owner holds a lock on the file `lock`, which the system releases however the process ends.
Nothing is created before a client uploads the first file, so a server that is never used for
batches leaves no directory behind.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import trio

from trouper.protocol.paths import exists
from trouper.protocol.private_files import FILE_MODE, make_private
from trouper.protocol.problems import Problem, RequestFailed, is_shortage
from trouper.web.batches import durable_files
from trouper.web.batches.batch_record import RESULT, SPEC, Batch, BatchResult, BatchSpec
from trouper.web.batches.disk_threads import on_disk
from trouper.web.batches.key_shares import (
    MAX_ENDED,
    KeyShares,
    no_room,
    no_room_for_key,
    require_number,
)
from trouper.web.batches.stored_files import FileStore, Upload

log = logging.getLogger("trouper.batches")
NO_ROOM = (
    "there is no room for answers; delete files, or start the server with a larger "
    "--batch-max-bytes (of one key: max_batch_bytes)"
)
ROOM_S = 0.5
"""Time until requests without room for their answers look again."""
RETRY_AFTER_S = 5
"""Retry-After of what is refused because of the directory."""
RETRY_S = 5.0
"""Time until a directory that another server has, or that cannot be read, is tried again."""


def _unavailable(message: str) -> RequestFailed:
    """The request can be sent again, when the directory is well."""
    return RequestFailed(
        Problem(
            503, message, "server_error", None, "batches_unavailable", retry_after_s=RETRY_AFTER_S
        )
    )


class BatchStorage:
    """Files and batches on disk, and their index in memory, which the event loop alone changes once
    it is loaded."""

    def __init__(self, directory: Path, shares: KeyShares) -> None:
        """`shares`: bounds on what all files and logs take, and those of each owner."""
        self.directory, self._shares = directory, shares
        self.files = FileStore(directory / "files")
        self.batches: dict[str, Batch] = {}
        """By id, the oldest first."""
        self._unended: list[Batch] = []
        self.opened = trio.Event()
        self.problem = ""
        """Why the directory cannot be used; empty if it can."""
        self.fault = ""
        """Why the last write for a client failed; empty if it did not."""
        self.waiting = 0
        """Number of requests that wait for room."""
        self._reserved = Counter[str]()
        """Bytes that answers will take, by owner."""
        self._opening = trio.Lock()
        self._lock_fd = -1

    @property
    def unended(self) -> Sequence[Batch]:
        """The batches that have not ended, the oldest first."""
        self._unended = [batch for batch in self._unended if not batch.ended]
        return self._unended

    def _log_bytes(self, owners: Collection[str] | None = None) -> int:
        return sum(
            batch.log.bytes
            for batch in self.unended
            if owners is None or batch.spec.owner in owners
        )

    @property
    def bytes(self) -> int:
        """Bytes of files and logs."""
        return self.files.total_bytes + self._log_bytes()

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return max(0, self._shares.max_bytes - self._held(self.files.total_bytes, None))

    def room_of(self, owner: str) -> int:
        """Bytes that are left for this owner."""
        limit, owners = self._shares.of(owner)
        return max(0, min(self.room, limit - self._held(self.files.bytes_of(owners), owners)))

    def _held(self, file_bytes: int, owners: Collection[str] | None) -> int:
        """Bytes that these owners hold, None: all, with those of answers to come. A batch that has
        not ended has as many as its log
        for the files that it will leave."""
        reserved = sum(
            size for owner, size in self._reserved.items() if owners is None or owner in owners
        )
        return file_bytes + 2 * self._log_bytes(owners) + reserved

    def require_room(self, owner: str, size: int) -> None:
        """Raises `RequestFailed` (413) if there is no room for `size` bytes more of a file of this
        owner."""
        if size > self.room_of(owner):
            raise no_room() if size > self.room else no_room_for_key(self._shares.of(owner)[0])

    def require_number(self, owner: str, more: int, param: str) -> None:
        """Raises `RequestFailed` (413) if this owner may not have so many files more."""
        _, owners = self._shares.of(owner)
        require_number(self.files.number_of(owners) + 2 * self.unfinished(owners) + more, param)

    async def begin_file(self, owner: str) -> Upload:
        """Begin a file of a client. Raises `RequestFailed` (413), and `OSError`."""
        self.require_number(owner, 1, "file")
        return await self.files.begin(owner)

    async def has_room(self, owner: str, size: int) -> None:
        """Wait until there is room for `size` bytes of this owner."""
        if self.room_of(owner) >= size:
            return
        if not self.waiting:
            log.warning("batches: %s", NO_ROOM)
        self.waiting += 1
        try:
            # Files, logs and uploads change it in many places
            while self.room_of(owner) < size:  # noqa: ASYNC110
                await trio.sleep(ROOM_S)
        finally:
            self.waiting -= 1

    @asynccontextmanager
    async def reserved(self, owner: str, size: int) -> AsyncIterator[None]:
        """Wait until there is room for `size` bytes, and reserve it until they are written."""
        await self.has_room(owner, size)
        self._reserved[owner] += size
        try:
            yield
        finally:
            self._reserved[owner] -= size

    async def open(self, *, create: bool) -> bool:
        """Take the directory, unless that is done. Returns whether it is there; `create` makes it.
        Raises `RequestFailed` (503) if another server has it, or it cannot be read."""
        async with self._opening:
            if not self.opened.is_set() and (create or await self._exists()):
                await self._open()
        return self.opened.is_set()

    async def _exists(self) -> bool:
        """On a thread: a file system that does not answer must not stop the server, which then
        would not even hear SIGTERM."""
        return await on_disk(exists, self.directory, abandon_on_cancel=True)

    async def _open(self) -> None:
        try:
            await on_disk(self._take)
            await on_disk(self._load)
        except BlockingIOError:
            self.problem = (
                f"another server uses {self.directory}; give this one another --batch-dir"
            )
        except OSError as error:
            self.problem = (
                f"{self.directory} cannot be used: {error.strerror or error}; see --batch-dir"
            )
        else:
            self.problem = ""
            self.opened.set()
            return
        self.close()
        raise _unavailable(self.problem)

    @contextmanager
    def written_for_client(self) -> Iterator[None]:
        """Raises `RequestFailed` (503) for a disk that takes no more, or is ill: the request can be
        sent again when it is not."""
        try:
            yield
        except OSError as error:
            self.fault = error.strerror or str(error)
            log.warning("batches: %s cannot be written: %s", self.directory, self.fault)
            reason = f"the directory of batches cannot be written: {self.fault}"
            raise _unavailable(f"{reason}; make room there, or see --batch-dir") from error
        self.fault = ""

    async def open_when_possible(self) -> None:
        """Return when the directory is open. One that another server has is tried again: that
        server may be about to end."""
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
        make_private(self.directory)
        if self._lock_fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._lock_fd = os.open(self.directory / "lock", flags, FILE_MODE)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Leave the directory to others."""
        for batch in self.batches.values():
            batch.log.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- batches ----------------------------------------------------------------------------------

    def _load(self) -> None:
        self.files.load()
        make_private(self._batch_directory)
        found = sorted(self._found(), key=lambda batch: (batch.spec.created_at, batch.spec.id))
        self.batches = {batch.spec.id: batch for batch in found}
        for batch in self._forget_surplus(found):
            shutil.rmtree(batch.directory, ignore_errors=True)
        self._unended = [batch for batch in found if not batch.ended]

    @property
    def _batch_directory(self) -> Path:
        return self.directory / "batches"

    def _found(self) -> Iterator[Batch]:
        for directory in self._batch_directory.iterdir():
            try:
                batch = Batch.of(
                    msgspec.json.decode((directory / SPEC).read_bytes(), type=BatchSpec), directory
                )
                if (directory / RESULT).exists():
                    batch.result = msgspec.json.decode(
                        (directory / RESULT).read_bytes(), type=BatchResult
                    )
                    batch.log.path.unlink(missing_ok=True)
                else:
                    batch.replay()
            except FileNotFoundError:
                # Its client was not told that it was created.
                shutil.rmtree(directory, ignore_errors=True)
            except (OSError, msgspec.MsgspecError) as error:
                if is_shortage(error):  # The directory is opened again soon.
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
        for surplus in self._forget_surplus(self.of((spec.owner,))):
            await on_disk(shutil.rmtree, surplus.directory, True)
        return batch

    def _forget_surplus(self, batches: Sequence[Batch]) -> list[Batch]:
        """Forget the ended ones that are too many for their owner, and return them. `batches`: the
        oldest first."""
        ended = [batch for batch in batches if batch.ended]
        left, surplus = Counter(batch.spec.owner for batch in ended), list[Batch]()
        for batch in ended:
            if left[batch.spec.owner] > MAX_ENDED:
                left[batch.spec.owner] -= 1
                surplus.append(self.batches.pop(batch.spec.id))
        return surplus

    def _write(self, batch: Batch) -> None:
        make_private(batch.directory)
        durable_files.write(batch.directory / SPEC, [msgspec.json.encode(batch.spec)])
        durable_files.sync_directory(self._batch_directory)
        batch.replay()

    def finish(self, batch: Batch, result: BatchResult) -> None:
        """Write the result; the log is not needed after it. Runs in a thread; raises `OSError`."""
        durable_files.write(batch.directory / RESULT, [msgspec.json.encode(result)])
        batch.result = result
        batch.log.close()
        batch.log.path.unlink(missing_ok=True)

    def batch(self, batch_id: str, owners: Collection[str] | None) -> Batch:
        """Return a batch of one of these owners; None: of any. Raises `RequestFailed` (404), also
        for the batch of another owner."""
        batch = self.batches.get(batch_id)
        if batch is None or (owners is not None and batch.spec.owner not in owners):
            message = f"no batch has the id {batch_id[:80]!r}; GET /v1/batches lists yours"
            raise RequestFailed(
                Problem(404, message, "invalid_request_error", None, "batch_not_found")
            )
        return batch

    def of(self, owners: Collection[str] | None) -> Sequence[Batch]:
        """The batches of these owners, the oldest first; None: of all."""
        return [
            batch for batch in self.batches.values() if owners is None or batch.spec.owner in owners
        ]

    def unfinished(self, owners: Collection[str]) -> int:
        """Number of batches of these owners that have not ended."""
        return sum(batch.spec.owner in owners for batch in self.unended)

    def reads(self, file_id: str) -> bool:
        """Whether a batch that has not ended needs this file."""
        return any(batch.spec.input_file_id == file_id for batch in self.unended)
