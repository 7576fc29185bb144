"""/v1/files. A file is seen only by the key that made the file. A key with `admin` lists and
deletes all files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from io import FileIO
from typing import cast

import trio
from quart import Response, request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout
from werkzeug.sansio.multipart import Data, Field, File, MultipartDecoder, NeedData

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.batches.batch_routes import (
    ENDPOINT,
    FILE_DELETED,
    UPLOAD_FORM,
)
from trouper.web.batches.batch_storage import BatchStorage, too_large
from trouper.web.batches.stored_files import (
    FILE_PREFIX,
    PURPOSES,
    UPLOADED,
    Purpose,
    StoredFile,
    Upload,
    on_disk,
)
from trouper.web.http.json_response import as_json
from trouper.web.http.leniency import ReadPast
from trouper.web.http.paced_body import PacedBody
from trouper.web.http.query_parameters import ORDERS, Query, list_of, page_body
from trouper.web.http.request_schema import TEXT, Json, ref
from trouper.web.serving.service import Service, now

MAX_PAGE = 10_000
CHUNK = 2**18
PAGE_QUERY: Json = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": MAX_PAGE},
    "order": {"enum": [*ORDERS], "default": "desc"},
    "after": TEXT,
    "purpose": {"enum": list(PURPOSES)},
}
FORM = "multipart/form-data"


class Files:
    def __init__(self, service: Service, storage: BatchStorage) -> None:
        self._service, self._storage = service, storage

    @ENDPOINT(
        method="POST",
        path="/v1/files",
        operation="createFile",
        summary="Store requests for a batch, or an image",
        form=UPLOAD_FORM,
        answer=ref("FileObject"),
    )
    async def upload(self) -> Response:
        boundary = request.mimetype_params.get("boundary", "")
        if request.mimetype != FORM or not boundary:
            message = f"a file is sent as a form: {FORM}, with the fields file and purpose"
            raise RequestFailed(Problem(415, message, code="unsupported_media_type"))
        self._service.hold(UPLOAD_BYTES)
        await self._storage.open(create=True)
        settings, owner = self._service.settings, self._service.key_identity
        begin = partial(self._storage.begin_file, owner, self._service.new_id(FILE_PREFIX))
        require_room = partial(self._storage.require_room, owner)
        form = UploadForm(boundary, begin, require_room, settings.max_file_bytes)
        try:
            with self._storage.written_for_client():
                await form.receive(cast("UploadBody", request.body), settings.body_timeout_s)
                upload, purpose = self._checked(form)
                with trio.CancelScope(shield=True):
                    file = await self._storage.files.keep(upload, form.filename, now(), purpose)
        finally:
            if form.upload is not None:
                await self._storage.files.end(form.upload)
        return as_json(file.body())

    def _checked(self, form: UploadForm) -> tuple[Upload, Purpose]:
        """Raises `RequestFailed` (400)."""
        sent = form.fields.pop("purpose", None)
        if sent is None:
            raise bad_request("purpose is required", "purpose", "missing_required_parameter")
        purpose = next((name for name in UPLOADED if name.encode() == sent), None)
        if purpose is None:
            raise bad_request(
                f"purpose must be one of {', '.join(UPLOADED)}: files are for batches and images",
                "purpose",
                "invalid_value",
            )
        report = self._service.report
        for name in form.fields:
            if isinstance(report, ReadPast) and not name.startswith("expires_after"):
                report.skip(name)
            else:
                message = f"{name[:80]!r} is not supported here; leave it out"
                raise bad_request(message, name[:80], "unsupported_parameter")
        if form.upload is None:
            raise bad_request("file is required", "file", "missing_required_parameter")
        return form.upload, purpose

    async def read_image(self, file_id: str, path: str) -> bytes:
        """Read a file of this key for the image part at `path`. Raises `RequestFailed` (400, 404,
        413, 429, 503)."""
        await self._storage.open(create=False)
        file = self._storage.files.get(file_id, self._service.key_identities, path)
        self._service.hold(file.bytes)
        with self._storage.read_for_client(path):
            return await self._storage.files.read_image(file, path)

    @ENDPOINT(
        method="GET",
        path="/v1/files",
        operation="listFiles",
        summary="The files of this key; with the right `admin`, of all keys",
        query=PAGE_QUERY,
        answer=list_of(ref("FileObject")),
        also=(400, 404, 503),
    )
    async def list(self) -> Response:
        query = Query(request.args, tuple(PAGE_QUERY), self._service.report)
        limit = query.number("limit", MAX_PAGE, 1, MAX_PAGE)
        order = query.choice("order", ORDERS) or "desc"
        purpose = query.choice("purpose", PURPOSES)
        await self._storage.open(create=False)
        of = self._storage.files.of(self._service.managed_identities)
        files = [file for file in of if purpose in (None, file.purpose)]
        if order == "desc":
            files.reverse()
        labels = self._service.owner_labels(file.owner for file in files)

        def body(index: int) -> Json:
            return files[index].body() | labels[files[index].owner]

        ids = [file.id for file in files]
        return as_json(page_body(ids, query.given("after"), limit, body))

    async def _file(self, file_id: str, *, managed: bool = False) -> StoredFile:
        await self._storage.open(create=False)
        service = self._service
        return self._storage.files.get(
            file_id, service.managed_identities if managed else service.key_identities
        )

    @ENDPOINT(
        method="GET",
        path="/v1/files/<file_id>",
        operation="retrieveFile",
        summary="One of them",
        answer=ref("FileObject"),
    )
    async def get(self, file_id: str) -> Response:
        return as_json((await self._file(file_id)).body())

    @ENDPOINT(
        method="GET",
        path="/v1/files/<file_id>/content",
        operation="downloadFile",
        summary="What is in it",
        answer={"type": "string", "format": "binary"},
        content_type="application/octet-stream",
    )
    async def content(self, file_id: str) -> Response:
        file = await self._file(file_id)
        path = self._storage.files.path(file.id)
        with self._storage.read_for_client():
            opened = await on_disk(partial(FileIO, path))
        self._service.at_end(opened.close)
        response = Response(_chunks(opened), content_type="application/octet-stream")
        response.headers["Content-Length"] = str(file.bytes)
        return response

    @ENDPOINT(
        method="DELETE",
        path="/v1/files/<file_id>",
        operation="deleteFile",
        summary="Delete it",
        description="The input of a batch can be deleted when the batch has ended. A key with the "
        "right `admin` deletes files of all keys.",
        answer=FILE_DELETED,
        also=(400, 503),
    )
    async def delete(self, file_id: str) -> Response:
        file = await self._file(file_id, managed=True)
        if self._storage.reads(file.id):
            message = (
                "a batch that has not ended reads this file; cancel the batch, or wait for its end"
            )
            raise bad_request(message, None, "file_in_use")
        with self._storage.written_for_client():
            await self._storage.files.remove(file)
        return as_json({"id": file.id, "object": "file", "deleted": True})


async def _chunks(file: FileIO) -> AsyncIterator[bytes]:
    while data := await on_disk(file.read, CHUNK):
        yield data


Begin = Callable[[], Awaitable[Upload]]
MAX_BUFFERED = 2**20
"""Bytes of a body that wait for their reader."""
SLICE = 2**16
MAX_HEAD = 2**18
"""Bytes of the form without the file."""
MAX_FIELD = 2**10
UPLOAD_BYTES = 4 * MAX_BUFFERED
"""Memory of an upload, for the reader and for the disk, each copied once."""
MAX_PARTS = 16
INVALID = "invalid_form"


class UploadBody(PacedBody):
    """A body of any length, little of which is in memory."""

    def __init__(self) -> None:
        super().__init__(None, None)

    async def __anext__(self) -> bytes:
        data = await super().__anext__()
        self.make_room()
        return data


class UploadForm:
    def __init__(
        self, boundary: str, begin: Begin, require_room: Callable[[int], None], max_file_bytes: int
    ) -> None:
        """`begin` begins the file. `require_room(bytes)` raises `RequestFailed` (413)."""
        self._decoder = MultipartDecoder(boundary.encode(), MAX_HEAD, max_parts=MAX_PARTS)
        self._begin_upload = begin
        self._require_room = require_room
        self._max_file_bytes = max_file_bytes
        self._field: str | None = None
        self.fields: dict[str, bytes] = {}
        self.filename = ""
        self.upload: Upload | None = None
        self._pending = bytearray()
        self._ended = False

    async def receive(self, body: UploadBody, timeout_s: float) -> None:
        """Read the whole body. A client may be silent for `timeout_s`. Raises `RequestFailed` (400,
        413), werkzeug's 408, and `OSError`."""
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
                f"the file is larger than {int(self._max_file_bytes):,} bytes (--max-file-bytes)",
                "file_too_large",
                "file",
            )
        self._require_room(added)

    async def _flush(self, upload: Upload) -> None:
        pending, self._pending = self._pending, bytearray()
        await on_disk(upload.content.write, memoryview(pending))
