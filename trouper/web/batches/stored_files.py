"""Input and output files of batches, and images that requests name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Literal, TypeVar, TypeVarTuple, Unpack

import attrs
import msgspec
import trio

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.private_files import FILE_MODE, make_private
from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.http.image_source import MAX_IMAGE_BYTES
from trouper.web.http.image_source import too_large as image_too_large
from trouper.web.serving.state_database import StateDatabase

AT_ONCE = 16
"""Threads for content; a batch, upload or download uses one at a time. Answers are formatted on
other threads: a file system that hangs (NFS, FUSE) leaves those free."""
Purpose = Literal["batch", "batch_output", "vision", "user_data"]
PURPOSES: tuple[Purpose, ...] = ("batch", "batch_output", "vision", "user_data")
FILE_PREFIX = "file-"
UPLOADED: tuple[Purpose, ...] = ("batch", "vision", "user_data")
IMAGES: tuple[Purpose, ...] = ("vision", "user_data")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("threads for the content of files")


async def on_disk(function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Call a function on one of the `AT_ONCE` threads. Raises the function's errors, and `OSError`
    if no thread starts."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := trio.CapacityLimiter(AT_ONCE))
    return await run_on_thread(partial(function, *arguments), limiter, abandon_on_cancel=False)


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    filename: str
    bytes: int
    purpose: Purpose
    created_at: int
    """Unix seconds."""
    owner: str = ""
    """Identity of the API key that alone sees the file; empty without keys."""

    def body(self) -> dict[str, Any]:
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
    """Content being written. Methods run in threads and raise `OSError`."""

    path: Path
    _fd: int
    size: int = 0

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
    """Raises `OSError`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Raises `OSError`."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


def sync_directory(path: Path) -> None:
    """Make names in a directory durable. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@attrs.define(eq=False)
class Upload:
    id: str
    owner: str
    content: Content
    received: int = 0
    """Bytes received, which need room."""
    is_kept: bool = False


# Content is a file named by id. The description is a row of the database, written last and deleted
# first. The next start removes content without a row.
class FileStore:
    """Only the event loop changes the index in memory. Methods that use the disk raise
    `OSError`."""

    def __init__(self, directory: Path, database: StateDatabase) -> None:
        self._directory, self._database = directory, database
        self._files: dict[str, StoredFile] = {}
        self._stored_bytes = Counter[str]()
        self._stored_files = Counter[str]()
        self._uploads: set[Upload] = set()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def total_bytes(self) -> int:
        """Unfinished uploads included."""
        return self._stored_bytes.total() + sum(upload.received for upload in self._uploads)

    def bytes_of(self, owners: Collection[str]) -> int:
        received = sum(upload.received for upload in self._uploads if upload.owner in owners)
        return received + sum(self._stored_bytes[owner] for owner in owners)

    def number_of(self, owners: Collection[str]) -> int:
        """Unfinished uploads included."""
        return sum(self._stored_files[owner] for owner in owners) + sum(
            upload.owner in owners for upload in self._uploads
        )

    async def load(self) -> None:
        """Read the index; remove content without description and the reverse."""
        rows = await self._database.run(_read_files)
        files, broken = await on_disk(self._sweep, rows)
        if broken:
            await self._database.run(partial(_delete_files, ids=broken))
        for file in files:
            self.note(file)

    def _sweep(self, files: Sequence[StoredFile]) -> tuple[list[StoredFile], list[str]]:
        make_private(self._directory)
        sizes = {path.name: path.lstat().st_size for path in self._directory.iterdir()}
        complete = [file for file in files if sizes.get(file.id) == file.bytes]
        for name in sizes.keys() - {file.id for file in complete}:
            with suppress(OSError):  # What cannot be removed, as a directory of others, harms none.
                (self._directory / name).unlink()
        return complete, [file.id for file in files if sizes.get(file.id) != file.bytes]

    async def begin(self, owner: str, identifier: str) -> Upload:
        """Begin a client's file. The bytes count until `end`."""
        content = await on_disk(Content.create, self.path(identifier))
        upload = Upload(identifier, owner, content)
        self._uploads.add(upload)
        return upload

    async def keep(
        self, upload: Upload, filename: str, created_at: int, purpose: Purpose = "batch"
    ) -> StoredFile:
        """Make a received file durable and visible."""
        await on_disk(upload.content.sync)
        file = StoredFile(
            id=upload.id,
            filename=filename,
            bytes=upload.content.size,
            purpose=purpose,
            created_at=created_at,
            owner=upload.owner,
        )
        await self._database.run(partial(insert_file, file=file))
        upload.is_kept = True
        self.note(file)
        return file

    async def end(self, upload: Upload) -> None:
        """End an upload, and drop content that was not kept."""
        self._uploads.discard(upload)
        if not upload.is_kept:
            await _drop(upload.content)

    async def write(self, file_id: str, pieces: AsyncIterable[bytes]) -> int:
        """Write a file durably and return the size in bytes. Replaces content of the same id."""
        content = await on_disk(Content.create, self.path(file_id))
        try:
            async for piece in pieces:
                await on_disk(content.write, piece)
            await on_disk(content.sync)
        except BaseException:
            await _drop(content)
            raise
        return content.size

    async def remove(self, file: StoredFile) -> None:
        with trio.CancelScope(shield=True):
            await self._database.run(partial(_delete_files, ids=[file.id]))
            self._forget(file.id)
            await on_disk(self._unlink, file.id)

    def note(self, file: StoredFile) -> None:
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
        return self._directory / file_id

    def get(
        self, file_id: str, owners: Collection[str] | None, param: str | None = None
    ) -> StoredFile:
        """`owners` None: all. Raises `RequestFailed` (404)."""
        file = self._files.get(file_id)
        if file is None or (owners is not None and file.owner not in owners):
            message = f"no file has the id {file_id[:80]!r}; GET /v1/files lists yours"
            raise RequestFailed(Problem(404, message, param=param, code="file_not_found"))
        return file

    async def read_image(self, file: StoredFile, path: str) -> bytes:
        """Read a file for the image part at `path`. Raises `RequestFailed` (400)."""
        if file.purpose not in IMAGES:
            message = f"{path}: the purpose of this file is {file.purpose}, not vision or user_data"
            raise bad_request(message, path, "invalid_value")
        if file.bytes > MAX_IMAGE_BYTES:
            raise image_too_large(path)
        return await on_disk(self.path(file.id).read_bytes)

    def of(self, owners: Collection[str] | None) -> Sequence[StoredFile]:
        """`owners` None: all. The oldest first."""
        return [file for file in self._files.values() if owners is None or file.owner in owners]


async def _drop(content: Content) -> None:
    # The next start removes what stays.
    with trio.CancelScope(shield=True), suppress(OSError):
        await on_disk(content.drop)


def _read_files(connection: Connection) -> list[StoredFile]:
    rows = connection.execute("SELECT file FROM files ORDER BY rowid")
    files = [msgspec.json.decode(file, type=StoredFile) for (file,) in rows]
    return sorted(files, key=lambda file: file.created_at)


def _delete_files(connection: Connection, ids: Sequence[str]) -> None:
    connection.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in ids])
