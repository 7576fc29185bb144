"""Files on disk: the input of batches that clients upload, and the output that batches leave.

A file is two files: `ID` with the content and `ID.json` with its description. The description is
written last and removed first, so a file without one does not exist and is swept at the next start.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import attrs
import msgspec
import trio

from trouper.protocol.private_files import make_private
from trouper.protocol.problems import Problem, RequestFailed, is_shortage
from trouper.web.batches import durable_files
from trouper.web.batches.disk_threads import on_disk

Purpose = Literal["batch", "batch_output"]
PURPOSES: tuple[Purpose, ...] = ("batch", "batch_output")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file."""

    id: str
    filename: str
    bytes: int
    purpose: Purpose
    created_at: int
    """Unix seconds."""
    owner: str = ""
    """Identity of the API key that made it: only requests with this key see it. Empty: made without
    a key."""

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


@attrs.define(eq=False)
class Upload:
    """A file that is being received. Its methods run in threads."""

    id: str
    path: Path
    owner: str
    _fd: int
    size: int = 0
    """Bytes that were written."""
    received: int = 0
    """Bytes that were received, for which there must be room."""

    def write(self, data: memoryview) -> None:
        """Raises `OSError`."""
        durable_files.write_all(self._fd, data)
        self.size += len(data)

    def abort(self) -> None:
        """Drop what was received, unless it has its name already."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            durable_files.part_of(self.path).unlink(missing_ok=True)

    def commit(self) -> None:
        """Give the content its name, durably. Raises `OSError`."""
        fd, self._fd = self._fd, -1
        durable_files.commit(fd, self.path)


class FileStore:
    """The files in one directory, and their index in memory, which the event loop alone changes
    once it is loaded. Methods that touch the disk raise `OSError`; those that are not async run in
    threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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
        """Number of files of these owners, those that are being received among them."""
        return sum(self._stored_files[owner] for owner in owners) + sum(
            upload.owner in owners for upload in self._uploads
        )

    def load(self) -> None:
        """Read what an earlier process has left, and remove what it left half written."""
        make_private(self._directory)
        durable_files.sweep_parts(self._directory)
        found = [
            decoded
            for path in self._directory.glob("*.json")
            if (decoded := _read(path)) is not None
        ]
        for file in sorted(found, key=lambda file: (file.created_at, file.id)):
            self._note(file)
        for path in self._directory.iterdir():
            if path.name.removesuffix(".json") not in self._files:
                path.unlink(missing_ok=True)

    async def begin(self, owner: str) -> Upload:
        """Begin a file of a client. It counts until `end`."""
        identifier = new_file_id()
        path = self._directory / identifier
        fd = await on_disk(durable_files.create, durable_files.part_of(path))
        upload = Upload(identifier, path, owner, fd)
        self._uploads.add(upload)
        return upload

    def end(self, upload: Upload) -> None:
        """End an upload. What was received is dropped, unless it has its name already."""
        self._uploads.discard(upload)
        upload.abort()

    async def add(self, file: StoredFile) -> None:
        """Write the description of a file whose content is there: from now on it exists."""
        data = [msgspec.json.encode(file)]
        await on_disk(durable_files.write, self._directory / f"{file.id}.json", data)
        self._forget(file.id)
        self._note(file)

    async def put(self, file: StoredFile, parts: Iterable[bytes]) -> None:
        """Write a file of the server's own, replacing one of the same id. `parts` is read in a
        thread."""
        size = await on_disk(durable_files.write, self.path(file.id), parts)
        await self.add(msgspec.structs.replace(file, bytes=size))

    async def remove(self, file: StoredFile) -> None:
        self._forget(file.id)
        with trio.CancelScope(shield=True):
            await on_disk(self._unlink, file.id)

    def _note(self, file: StoredFile) -> None:
        self._files[file.id] = file
        self._stored_bytes[file.owner] += file.bytes
        self._stored_files[file.owner] += 1

    def _forget(self, file_id: str) -> None:
        file = self._files.pop(file_id, None)
        if file is not None:
            self._stored_bytes[file.owner] -= file.bytes
            self._stored_files[file.owner] -= 1

    def _unlink(self, file_id: str) -> None:
        (self._directory / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)
        durable_files.sync_directory(self._directory)

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


def _read(path: Path) -> StoredFile | None:
    """Read a description. None if it is damaged or its content is missing. Raises `OSError` if the
    system lacks something for the moment: what cannot be read then must not be removed."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
        return file if path.with_name(file.id).stat().st_size == file.bytes else None
    except (OSError, msgspec.MsgspecError) as error:
        if is_shortage(error):
            raise
        return None
