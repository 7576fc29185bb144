"""Files of clients: the input of batches, and the output that batches leave.

The content of a file is a file named by its id; the description is a row of the database, which is
written last and deleted first. Content without a row is removed at the next start.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Literal, TypeVar, TypeVarTuple, Unpack
from uuid import uuid4

import attrs
import msgspec
import trio

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.private_files import FILE_MODE, make_private
from trouper.protocol.problems import Problem, RequestFailed
from trouper.web.state_database import StateDatabase

AT_ONCE = 16
"""Threads for the content of files. Each batch, upload and download has one at a time. A file
system that does not answer (NFS, FUSE) takes none from answers, which are formatted on others."""
Purpose = Literal["batch", "batch_output"]
PURPOSES: tuple[Purpose, ...] = ("batch", "batch_output")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("threads for the content of files")


async def on_disk(function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Call a function on one of the threads, once one is free. Raises what the function raises, and
    `OSError` if no thread can be started."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := trio.CapacityLimiter(AT_ONCE))
    return await run_on_thread(partial(function, *arguments), limiter, abandon_on_cancel=False)


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file."""

    id: str
    filename: str
    bytes: int
    purpose: Purpose
    created_at: int
    """Unix seconds."""
    owner: str = ""
    """Identity of the API key that made the file and alone sees it; empty without keys."""

    def body(self) -> dict[str, Any]:
        """The file as OpenAI's API describes it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def insert_file(connection: Connection, file: StoredFile) -> None:
    row = (file.id, msgspec.json.encode(file))
    connection.execute("INSERT OR REPLACE INTO files (id, file) VALUES (?, ?)", row)


@attrs.define(eq=False)
class Content:
    """The content of a file that is being written. The methods run in threads and raise
    `OSError`."""

    path: Path
    _fd: int
    size: int = 0
    """Bytes that were written."""

    @classmethod
    def create(cls, path: Path) -> Content:
        return cls(path, create(path))

    def write(self, data: bytes | memoryview) -> None:
        write_all(self._fd, data)
        self.size += len(data)

    def sync(self) -> None:
        """Make content and name durable, and close the file."""
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self.path.parent)

    def drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.path.unlink(missing_ok=True)


def create(path: Path) -> int:
    """Open a file for writing, empty. Raises `OSError`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Raises `OSError`."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@attrs.define(eq=False)
class Upload:
    """A file that is being received."""

    id: str
    owner: str
    content: Content
    received: int = 0
    """Bytes that were received, for which there must be room."""
    is_kept: bool = False


class FileStore:
    """The files in one directory. The event loop alone changes the index of them in memory. Methods
    that touch the disk raise `OSError`."""

    def __init__(self, directory: Path, database: StateDatabase) -> None:
        self._directory, self._database = directory, database
        self._files: dict[str, StoredFile] = {}
        self._stored_bytes = Counter[str]()
        """Bytes of their content, by owner."""
        self._stored_files = Counter[str]()
        """Number of them, by owner."""
        self._uploads: set[Upload] = set()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def total_bytes(self) -> int:
        """Bytes of the content of all files, and of those that are being received."""
        return self._stored_bytes.total() + sum(upload.received for upload in self._uploads)

    def bytes_of(self, owners: Collection[str]) -> int:
        """Bytes of these owners."""
        received = sum(upload.received for upload in self._uploads if upload.owner in owners)
        return received + sum(self._stored_bytes[owner] for owner in owners)

    def number_of(self, owners: Collection[str]) -> int:
        """Number of files of these owners, with those that are being received."""
        return sum(self._stored_files[owner] for owner in owners) + sum(
            upload.owner in owners for upload in self._uploads
        )

    async def load(self) -> None:
        """Read the index, and remove content and descriptions that lack the other one."""
        rows = await self._database.run(_read_files)
        files, broken = await on_disk(self._sweep, rows)
        if broken:
            await self._database.run(partial(_delete_files, ids=broken))
        for file in files:
            self.note(file)

    def _sweep(self, files: Sequence[StoredFile]) -> tuple[list[StoredFile], list[str]]:
        make_private(self._directory)
        sizes = {path.name: path.stat().st_size for path in self._directory.iterdir()}
        complete = [file for file in files if sizes.get(file.id) == file.bytes]
        for name in sizes.keys() - {file.id for file in complete}:
            (self._directory / name).unlink(missing_ok=True)
        return complete, [file.id for file in files if sizes.get(file.id) != file.bytes]

    async def begin(self, owner: str) -> Upload:
        """Begin a file of a client. The bytes count until `end`."""
        identifier = new_file_id()
        content = await on_disk(Content.create, self.path(identifier))
        upload = Upload(identifier, owner, content)
        self._uploads.add(upload)
        return upload

    async def keep(self, upload: Upload, filename: str, created_at: int) -> StoredFile:
        """Make a received file durable: from now on the file exists."""
        await on_disk(upload.content.sync)
        file = StoredFile(
            id=upload.id,
            filename=filename,
            bytes=upload.content.size,
            purpose="batch",
            created_at=created_at,
            owner=upload.owner,
        )
        await self._database.run(partial(insert_file, file=file))
        upload.is_kept = True
        self.note(file)
        return file

    def end(self, upload: Upload) -> None:
        """End an upload, and drop what was received unless the file is kept."""
        self._uploads.discard(upload)
        if not upload.is_kept:
            upload.content.drop()

    async def write(self, file_id: str, pieces: AsyncIterable[bytes]) -> int:
        """Write the content of a file, durably, and return its size. Content of the same id is
        replaced."""
        content = await on_disk(Content.create, self.path(file_id))
        try:
            async for piece in pieces:
                await on_disk(content.write, piece)
            await on_disk(content.sync)
        except BaseException:
            content.drop()
            raise
        return content.size

    async def remove(self, file: StoredFile) -> None:
        with trio.CancelScope(shield=True):
            await self._database.run(partial(_delete_files, ids=[file.id]))
            self._forget(file.id)
            await on_disk(self._unlink, file.id)

    def note(self, file: StoredFile) -> None:
        """Enter a file, whose description is in the database, into the index."""
        self._forget(file.id)
        self._files[file.id] = file
        self._stored_bytes[file.owner] += file.bytes
        self._stored_files[file.owner] += 1

    def _forget(self, file_id: str) -> None:
        file = self._files.pop(file_id, None)
        if file is not None:
            self._stored_bytes[file.owner] -= file.bytes
            self._stored_files[file.owner] -= 1

    def _unlink(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def path(self, file_id: str) -> Path:
        """Path of a file's content."""
        return self._directory / file_id

    def get(
        self, file_id: str, owners: Collection[str] | None, param: str | None = None
    ) -> StoredFile:
        """Return a file of one of these owners; None: of any. Raises `RequestFailed` (404), also
        for the file of another owner."""
        file = self._files.get(file_id)
        if file is None or (owners is not None and file.owner not in owners):
            message = f"no file has the id {file_id[:80]!r}; GET /v1/files lists yours"
            raise RequestFailed(
                Problem(404, message, "invalid_request_error", param, "file_not_found")
            )
        return file

    def of(self, owners: Collection[str] | None) -> Sequence[StoredFile]:
        """The files of these owners, the oldest first; None: of all."""
        return [file for file in self._files.values() if owners is None or file.owner in owners]


def new_file_id() -> str:
    return f"file-{uuid4().hex}"


def _read_files(connection: Connection) -> list[StoredFile]:
    rows = connection.execute("SELECT file FROM files ORDER BY rowid")
    files = [msgspec.json.decode(file, type=StoredFile) for (file,) in rows]
    return sorted(files, key=lambda file: file.created_at)


def _delete_files(connection: Connection, ids: Sequence[str]) -> None:
    connection.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in ids])
