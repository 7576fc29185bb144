"""/v1/files: upload, list, describe, download and delete files. A file is seen only by requests
with the key that made it; a key with
`admin` lists and deletes those of all keys."""

from __future__ import annotations

from functools import partial
from io import FileIO
from typing import cast

import trio
from quart import Response, request

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.batches.batch_schemas import (
    ENDPOINT,
    FILE_DELETED,
    UPLOAD_FORM,
    list_of,
    page_body,
)
from trouper.web.batches.batch_storage import BatchStorage
from trouper.web.batches.file_upload import UPLOAD_BYTES, UploadBody, UploadForm
from trouper.web.batches.stored_files import PURPOSES, StoredFile, Upload, on_disk
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.leniency import ReadPast
from trouper.web.http.query_parameters import Query
from trouper.web.http.request_body import refuse
from trouper.web.http.request_schema import TEXT, Json, ref
from trouper.web.service import Service, as_json, now
from trouper.web.streaming.passive_body import PassiveBody

MAX_PAGE = 10_000
CHUNK = 2**18
PAGE_QUERY: Json = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": MAX_PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": TEXT,
    "purpose": {"enum": list(PURPOSES)},
}
FORM = "multipart/form-data"


class Files:
    """The handlers."""

    def __init__(self, service: Service, storage: BatchStorage) -> None:
        self._service, self._storage = service, storage

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            ENDPOINT(
                method="POST",
                path="/v1/files",
                handler=self.upload,
                summary="Store a file of requests for a batch",
                form=UPLOAD_FORM,
                answer=ref("File"),
            ),
            ENDPOINT(
                method="GET",
                path="/v1/files",
                handler=self.list,
                summary="The files of this key; with the right `admin`, of all keys",
                query=PAGE_QUERY,
                answer=list_of("File"),
                also=(400, 404, 503),
            ),
            *self._of_one(),
        )

    def _of_one(self) -> tuple[Endpoint, ...]:
        return (
            ENDPOINT(
                method="GET",
                path="/v1/files/<file_id>",
                handler=self.get,
                summary="One of them",
                answer=ref("File"),
            ),
            ENDPOINT(
                method="GET",
                path="/v1/files/<file_id>/content",
                handler=self.content,
                summary="What is in it",
                answer={"type": "string", "format": "binary"},
                content_type="application/octet-stream",
            ),
            ENDPOINT(
                method="DELETE",
                path="/v1/files/<file_id>",
                handler=self.delete,
                summary="Delete it",
                description=(
                    "The input of a batch can be deleted when the batch has ended. A key with the "
                    "right `admin` deletes files of all keys."
                ),
                answer=FILE_DELETED,
                also=(400, 503),
            ),
        )

    async def upload(self) -> Response:
        boundary = request.mimetype_params.get("boundary", "")
        if request.mimetype != FORM or not boundary:
            message = f"a file is sent as a form: {FORM}, with the fields file and purpose"
            raise RequestFailed(
                Problem(415, message, "invalid_request_error", None, "unsupported_media_type")
            )
        self._service.hold(UPLOAD_BYTES)
        await self._storage.open(create=True)
        settings, owner = self._service.settings, self._service.key_identity
        begin, require_room = (
            partial(self._storage.begin_file, owner),
            partial(self._storage.require_room, owner),
        )
        form = UploadForm(boundary, begin, require_room, settings.max_file_bytes)
        try:
            with self._storage.written_for_client():
                await form.receive(cast("UploadBody", request.body), settings.body_timeout_s)
                upload = self._checked(form)
                with trio.CancelScope(shield=True):
                    file = await self._storage.files.keep(upload, form.filename, now())
        finally:
            if form.upload is not None:
                self._storage.files.end(form.upload)
        return as_json(file.body())

    def _checked(self, form: UploadForm) -> Upload:
        """Check the fields. Raises `RequestFailed` (400)."""
        purpose = form.fields.pop("purpose", None)
        if purpose is None:
            raise bad_request("purpose is required", "purpose", "missing_required_parameter")
        if purpose != b"batch":
            raise bad_request(
                "purpose must be batch: files are for batches only", "purpose", "invalid_value"
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
        return form.upload

    async def list(self) -> Response:
        # Without a parameter that is not known, this would be another page.
        query = Query(request.args, tuple(PAGE_QUERY), refuse)
        limit = query.number("limit", MAX_PAGE, 1, MAX_PAGE)
        order, purpose = query.given("order") or "desc", query.given("purpose")
        if order not in ("asc", "desc"):
            raise bad_request("order must be asc or desc", "order", "invalid_value")
        if purpose is not None and purpose not in PURPOSES:
            raise bad_request(
                f"purpose must be one of {', '.join(PURPOSES)}", "purpose", "invalid_value"
            )
        await self._storage.open(create=False)
        files = self._storage.files.of(self._service.managed_identities)
        found = {file.id: file for file in files if purpose in (None, file.purpose)}
        ids = [*found] if order == "asc" else [*reversed(found)]
        labels = self._service.owner_labels(file.owner for file in files)
        after = query.given("after")
        return as_json(
            page_body(
                ids, after, limit, lambda name: found[name].body() | labels[found[name].owner]
            )
        )

    async def _file(self, file_id: str, *, managed: bool = False) -> StoredFile:
        await self._storage.open(create=False)
        service = self._service
        return self._storage.files.get(
            file_id, service.managed_identities if managed else service.key_identities
        )

    async def get(self, file_id: str) -> Response:
        return as_json((await self._file(file_id)).body())

    async def content(self, file_id: str) -> Response:
        file = await self._file(file_id)
        path = self._storage.files.path(file.id)
        opened = await on_disk(partial(FileIO, path))
        self._service.at_end(opened.close)
        response = Response(FileBody(opened), content_type="application/octet-stream")
        response.headers["Content-Length"] = str(file.bytes)
        response.timeout = None
        return response

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


class FileBody(PassiveBody):
    """The content of a file, a chunk at a time. It belongs to the request, which closes it."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    async def __anext__(self) -> bytes:
        data = await on_disk(self._file.read, CHUNK)
        if not data:
            raise StopAsyncIteration
        return data
