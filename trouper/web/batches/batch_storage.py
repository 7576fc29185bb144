"""The index of --batch-dir in memory, and the room of each key."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import msgspec
import trio

from trouper.protocol.api_keys import Keys
from trouper.protocol.problems import Problem, RequestFailed
from trouper.web.batches.batch_table import Batch, BatchSpec, BatchTable
from trouper.web.batches.stored_files import FileStore, Upload
from trouper.web.serving.state_database import NAME, StateDatabase

log = logging.getLogger("trouper.batches")
NO_ROOM = (
    "there is no room for answers; delete files, or start the server with a larger "
    "--batch-max-bytes (of one key: max_batch_bytes)"
)
ROOM_S = 0.5
"""Interval at which requests without room look again."""
RETRY_AFTER_S = 5
RETRY_S = 5.0
"""Interval at which an unusable directory is opened again."""

# Files of a key, each with a description in memory. A batch counts as the two files that the batch
# may leave.
MAX_FILES = 10_000
MAX_ENDED = 1000  # Ended batches of a key in memory. The oldest are forgotten, and the files stay.


@attrs.frozen
class KeyShares:
    """A sole key may hold all of `max_bytes`, one of several half, unless the key's line names
    another bound."""

    keys: Keys
    max_bytes: int

    def of(self, owner: str) -> tuple[int, frozenset[str]]:
        """Return an owner's bound in bytes, and all past identities of the owner's key."""
        key, owners = self.keys.clients_of(owner)
        if key is not None and key.max_batch_bytes is not None:
            return key.max_batch_bytes, owners
        return self.max_bytes // 2 if self.keys.several else self.max_bytes, owners


def too_large(message: str, code: str, param: str) -> RequestFailed:
    return RequestFailed(Problem(413, message, param=param, code=code))


def _reason_of(error: OSError | msgspec.MsgspecError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # A later version of Trouper wrote the row, or the row is damaged.
    return f"a row of {NAME} cannot be read ({error})"


def _unavailable(message: str) -> RequestFailed:
    # The client can repeat the request later.
    return RequestFailed(
        Problem(
            503, message, "server_error", None, "batches_unavailable", retry_after_s=RETRY_AFTER_S
        )
    )


@attrs.frozen
class BatchImages:
    """Images that lines of a batch name by address; each is fetched once."""

    storage: BatchStorage
    batch: Batch

    async def read(
        self, url: str, fetch: Callable[[], Awaitable[bytes]], hold: Callable[[int], None]
    ) -> bytes:
        """Raises what `fetch` and `hold` raise, and `RequestFailed` (503). `hold` is called for
        what was kept."""
        table = self.storage.table
        async with self.batch.fetching:
            with self.storage.written_for_client():
                kept = await table.read_image(self.batch, url)
            if kept is not None:
                hold(len(kept))
                return kept
            data = await fetch()
            owner = self.batch.spec.owner
            with self.storage.written_for_client():
                async with self.storage.reserved(owner, len(data)):
                    await table.keep_image(self.batch, url, data)
            return data


class BatchStorage:
    """Only the event loop changes the index in memory."""

    def __init__(self, database: StateDatabase, directory: Path, shares: KeyShares) -> None:
        self.directory, self._shares, self._database = directory, shares, database
        self.files, self.table = FileStore(directory / "files", database), BatchTable(database)
        self.batches: dict[str, Batch] = {}
        """By id, the oldest first."""
        self._unended: list[Batch] = []
        self.opened = trio.Event()
        self.problem = ""
        """Reason why the directory is unusable, if any."""
        self.fault = ""
        """Error of the last write for a client, if any."""
        self.waiting = 0
        self._reserved = Counter[str]()
        """Bytes of answers to come, by owner."""
        self._opening = trio.Lock()

    @property
    def unended(self) -> Sequence[Batch]:
        self._unended = [batch for batch in self._unended if not batch.ended]
        return self._unended

    @property
    def bytes(self) -> int:
        """Of files, and of answers and images of batches that have not ended."""
        of_batches = sum(batch.answer_bytes + batch.image_bytes for batch in self.unended)
        return self.files.total_bytes + of_batches

    @property
    def room(self) -> int:
        return max(0, self._shares.max_bytes - self._held(self.files.total_bytes, None))

    def room_of(self, owner: str) -> int:
        limit, owners = self._shares.of(owner)
        return max(0, min(self.room, limit - self._held(self.files.bytes_of(owners), owners)))

    def _held(self, file_bytes: int, owners: Collection[str] | None) -> int:
        """Bytes that owners (None: all) hold or have reserved. A running batch's answers count
        twice, for the output file to come."""
        reserved = sum(
            size for owner, size in self._reserved.items() if owners is None or owner in owners
        )
        of_batches = sum(
            2 * batch.answer_bytes + batch.image_bytes
            for batch in self.unended
            if owners is None or batch.spec.owner in owners
        )
        return file_bytes + of_batches + reserved

    def require_room(self, owner: str, size: int) -> None:
        """Raises `RequestFailed` (413) unless the owner has room for `size` bytes of a file."""
        if size <= self.room_of(owner):
            return
        if size > self.room:
            message = (
                "there is no room for the file: delete others, or start the server with a larger "
                "--batch-max-bytes"
            )
            raise too_large(message, "no_room_for_file", "file")
        message = (
            f"files and batches of this API key may take {self._shares.of(owner)[0]} bytes: delete "
            "some; whoever runs the server gives it more by max_batch_bytes in --api-key-file, or "
            "all keys by --batch-max-bytes, of which each has half"
        )
        raise too_large(message, "no_room_for_key", "file")

    def require_number(self, owner: str, more: int, param: str) -> None:
        """Raises `RequestFailed` (413) unless the owner may have `more` files."""
        _, owners = self._shares.of(owner)
        if self.files.number_of(owners) + 2 * self.unfinished(owners) + more > MAX_FILES:
            message = (
                f"a client may have {MAX_FILES} files, two of them for each batch that has not "
                "ended; delete some"
            )
            raise too_large(message, "too_many_files", param)

    async def begin_file(self, owner: str, identifier: str) -> Upload:
        """Raises `RequestFailed` (413) and `OSError`."""
        self.require_number(owner, 1, "file")
        return await self.files.begin(owner, identifier)

    async def has_room(self, owner: str, size: int) -> None:
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
        """Wait for `size` bytes of room and reserve the room during the write."""
        await self.has_room(owner, size)
        self._reserved[owner] += size
        try:
            yield
        finally:
            self._reserved[owner] -= size

    async def open(self, *, create: bool) -> bool:
        """Open the directory and return whether one exists. `create` makes the directory. Raises
        `RequestFailed` (503) for an unusable or occupied directory."""
        async with self._opening:
            if not self.opened.is_set():
                try:
                    if await self._database.open(create=create):
                        await self._load()
                except (OSError, msgspec.MsgspecError) as error:
                    reason = _reason_of(error)
                    self.problem = self._database.problem or (
                        f"{self.directory} cannot be used: {reason}; see --batch-dir"
                    )
                    raise _unavailable(self.problem) from error
        return self.opened.is_set()

    @contextmanager
    def written_for_client(self) -> Iterator[None]:
        """Raises `RequestFailed` (503) if the disk is full or fails."""
        try:
            yield
        except OSError as error:
            self.fault = error.strerror or str(error)
            log.warning("batches: %s cannot be written: %s", self.directory, self.fault)
            reason = f"the directory of batches cannot be written: {self.fault}"
            raise _unavailable(f"{reason}; make room there, or see --batch-dir") from error
        self.fault = ""

    @contextmanager
    def read_for_client(self, param: str | None = None) -> Iterator[None]:
        """Raises `RequestFailed` (404) if the content is gone, (503) if the disk fails."""
        try:
            yield
        except FileNotFoundError as error:
            message = "the content of the file is gone: delete the file, and upload it again"
            problem = Problem(404, message, param=param, code="file_not_found")
            raise RequestFailed(problem) from error
        except OSError as error:
            fault = error.strerror or str(error)
            log.warning("batches: %s cannot be read: %s", self.directory, fault)
            raise _unavailable(f"the content of the file cannot be read: {fault}") from error

    async def open_when_possible(self) -> None:
        """Retry until the directory is open, which another server may hold."""
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

    # -- batches ----------------------------------------------------------------------------------

    async def _load(self) -> None:
        await self.files.load()
        batches = await self.table.load()
        self.batches = {batch.spec.id: batch for batch in batches}
        await self.table.delete(self._forget_surplus(batches))
        self._unended = [batch for batch in batches if not batch.ended]
        self.problem = ""
        self.opened.set()

    async def create(self, spec: BatchSpec) -> Batch:
        """Durably. Raises `OSError`."""
        await self.table.delete(self._forget_surplus(self.of((spec.owner,))))
        batch = Batch(spec)
        await self.table.create(batch)
        self.batches[spec.id] = batch
        self._unended.append(batch)
        return batch

    def _forget_surplus(self, batches: Sequence[Batch]) -> list[Batch]:
        """Forget and return each owner's surplus of ended batches. `batches` begins with the
        oldest."""
        ended = [batch for batch in batches if batch.ended]
        left, surplus = Counter(batch.spec.owner for batch in ended), list[Batch]()
        for batch in ended:
            if left[batch.spec.owner] > MAX_ENDED:
                left[batch.spec.owner] -= 1
                surplus.append(self.batches.pop(batch.spec.id))
        return surplus

    def batch(self, batch_id: str, owners: Collection[str] | None) -> Batch:
        """`owners` None: all. Raises `RequestFailed` (404)."""
        batch = self.batches.get(batch_id)
        if batch is None or (owners is not None and batch.spec.owner not in owners):
            message = f"no batch has the id {batch_id[:80]!r}; GET /v1/batches lists yours"
            raise RequestFailed(Problem(404, message, code="batch_not_found"))
        return batch

    def of(self, owners: Collection[str] | None) -> Sequence[Batch]:
        """`owners` None: all. The oldest first."""
        return [
            batch for batch in self.batches.values() if owners is None or batch.spec.owner in owners
        ]

    def unfinished(self, owners: Collection[str]) -> int:
        return sum(batch.spec.owner in owners for batch in self.unended)

    def reads(self, file_id: str) -> bool:
        """Whether a batch that has not ended needs this file."""
        return any(batch.spec.input_file_id == file_id for batch in self.unended)
