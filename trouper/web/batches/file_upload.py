"""The upload of a file: a form that goes to disk as it arrives, whatever its size.

Quart would collect the body in memory, bounded by --max-body-bytes. An `UploadBody` instead takes
from the connection only what its reader has room for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout
from werkzeug.sansio.multipart import Data, Field, File, MultipartDecoder, NeedData

from trouper.protocol.problems import bad_request
from trouper.web.batches.batch_storage import too_large
from trouper.web.batches.stored_files import Upload, on_disk
from trouper.web.http.paced_body import PacedBody

Begin = Callable[[], Awaitable[Upload]]
MAX_BUFFERED = 2**20
"""Bytes of a body that wait for their reader."""
SLICE = 2**16
MAX_HEAD = 2**18
"""Bytes of the form beside the file that are held at a time."""
MAX_FIELD = 2**10
UPLOAD_BYTES = 4 * MAX_BUFFERED
"""Memory of an upload: bytes that wait for their reader and for the disk, each twice while they are
copied."""
MAX_PARTS = 16
INVALID = "invalid_form"


class UploadBody(PacedBody):
    """A body of any length, of which little is in memory."""

    def __init__(self) -> None:
        super().__init__(None, None)

    async def __anext__(self) -> bytes:
        data = await super().__anext__()
        self._make_room()
        return data


class UploadForm:
    """The form while it is received."""

    def __init__(
        self, boundary: str, begin: Begin, require_room: Callable[[int], None], max_file_bytes: int
    ) -> None:
        """`begin` begins the file. `require_room` raises `RequestFailed` (413) if there is no room
        for so many bytes more."""
        self._decoder = MultipartDecoder(boundary.encode(), MAX_HEAD, max_parts=MAX_PARTS)
        self._begin_upload, self._require_room, self._max_file_bytes = (
            begin,
            require_room,
            max_file_bytes,
        )
        self._field: str | None = None
        self.fields: dict[str, bytes] = {}
        self.filename = ""
        self.upload: Upload | None = None
        self._pending = bytearray()
        self._ended = False

    async def receive(self, body: UploadBody, timeout_s: float) -> None:
        """Read the body to its end. A client that sends nothing for `timeout_s` is too slow. Raises
        `RequestFailed` (400, 413), werkzeug's 408, and `OSError`."""
        body.admit(MAX_BUFFERED)
        chunks = aiter(body)
        while True:
            with trio.move_on_after(timeout_s) as waiting:
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
            if waiting.cancelled_caught:
                raise RequestTimeout
            for start in range(0, len(chunk), SLICE):
                await self._take(chunk[start : start + SLICE])
        if not self._ended:
            raise bad_request("the form ends in the middle", None, INVALID)
        if self.upload is not None:
            await self._flush(self.upload)

    async def _take(self, data: bytes) -> None:
        try:
            self._decoder.receive_data(data)
            while not isinstance(event := self._decoder.next_event(), NeedData):
                await self._handle(event)
                if self._ended:
                    return
        except (ValueError, UnicodeDecodeError, RequestEntityTooLarge) as error:
            raise bad_request(f"the form cannot be read: {error}", None, INVALID) from None

    async def _handle(self, event: object) -> None:
        match event:
            case Field(name=name):
                self._begin_field(name)
            case File(name=name, filename=filename):
                await self._begin_file(name, filename)
            case Data(data=data, more_data=more):
                await self._add(data)
                if not more:
                    self._field = None
                    self._ended = self._decoder.state.name == "EPILOGUE"

    def _begin_field(self, name: str | None) -> None:
        if not name or name in self.fields or name == "file":
            message = (
                "file must be a file, with a name"
                if name == "file"
                else "a field has no name, or is given twice"
            )
            raise bad_request(message, name or None, INVALID)
        self._field, self.fields[name] = name, b""

    async def _begin_file(self, name: str | None, filename: str) -> None:
        if name != "file" or self.upload is not None:
            raise bad_request("send one file, in the field `file`", name, INVALID)
        self.filename = filename[:255]
        self.upload = await self._begin_upload()

    async def _add(self, data: bytes) -> None:
        if self._field is not None:
            self.fields[self._field] += data
            if len(self.fields[self._field]) > MAX_FIELD:
                raise bad_request(f"{self._field[:80]} is too long", self._field[:80], INVALID)
        elif self.upload is not None:
            self._check_size(self.upload.received, len(data))
            self.upload.received += len(data)
            self._pending += data
            if len(self._pending) >= MAX_BUFFERED:
                await self._flush(self.upload)

    def _check_size(self, size: int, added: int) -> None:
        if size + added > self._max_file_bytes:
            raise too_large(
                f"the file is larger than {self._max_file_bytes} bytes (--max-file-bytes)",
                "file_too_large",
                "file",
            )
        self._require_room(added)

    async def _flush(self, upload: Upload) -> None:
        pending, self._pending = self._pending, bytearray()
        await on_disk(upload.content.write, memoryview(pending))
