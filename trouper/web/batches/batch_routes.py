"""/v1/batches. A batch is seen only by the key that made the batch. A key with `admin` lists and
cancels all batches, without text from other clients."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, ClassVar

import trio
from quart import Response, request

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.batches.batch_storage import BatchStorage
from trouper.web.batches.batch_table import STATUSES, TIMES, Batch, BatchSpec
from trouper.web.batches.batch_worker import BatchWorker
from trouper.web.batches.input_lines import BatchEndpoint
from trouper.web.batches.stored_files import FILE_PREFIX, PURPOSES, UPLOADED
from trouper.web.http.body_faults import ordered, says
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.field_types import Filled
from trouper.web.http.json_response import as_json
from trouper.web.http.query_parameters import Query, list_of, page_body
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import (
    COUNT,
    FLAG,
    TEXT,
    Json,
    Unsupported,
    array,
    full,
    nullable,
    ref,
)
from trouper.web.responses.response_request import ResponseMetadata
from trouper.web.serving.service import Service, now

ENDPOINT = partial(Endpoint, tag="Batches", also=(503,))
WINDOW = re.compile(r"([1-9]\d{0,2})([hd])")
SECONDS = {"h": 3600, "d": 86400}
Window = Annotated[
    str,
    says(
        "{path} must be hours or days, as in 24h or 7d, not {value!r}",
        pattern=rf"^{WINDOW.pattern}$",
        description=(
            "Within this time it is done, or expires: 24h, as in OpenAI's API, or other hours or "
            "days, as in 7d."
        ),
    ),
]


class BatchRequest(Body, kw_only=True, frozen=True):
    """The body of POST /v1/batches."""

    unsupported: ClassVar[Unsupported] = {"output_expires_after": ()}
    essential: ClassVar[frozenset[str]] = frozenset(unsupported)
    input_file_id: Filled
    endpoint: Annotated[BatchEndpoint, ordered(BatchEndpoint)]
    completion_window: Window
    metadata: ResponseMetadata | None = None


def window_s(window: str) -> int:
    """Return the seconds of a completion window. Raises `RequestFailed` (400)."""
    match = WINDOW.fullmatch(window)
    if match is None:
        raise bad_request(
            "completion_window must be hours or days, as in 24h",
            "completion_window",
            "invalid_value",
        )
    return int(match[1]) * SECONDS[match[2]]


OWNER: Json = {
    "type": "string",
    "description": "The key that made it, in answers to a key with `admin`.",
}
FILE = full(
    {
        "id": TEXT,
        "object": {"const": "file"},
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": nullable(COUNT),
        "filename": TEXT,
        "purpose": {"enum": list(PURPOSES)},
        "status": {"const": "processed"},
        "status_details": nullable(TEXT),
        "owner": OWNER,
    },
    optional=("owner",),
)
FILE_DELETED = full({"id": TEXT, "object": {"const": "file"}, "deleted": FLAG})
LINE_ERROR = full({"code": TEXT, "message": TEXT, "param": nullable(TEXT), "line": nullable(COUNT)})
BATCH = full(
    {
        "id": TEXT,
        "object": {"const": "batch"},
        "endpoint": TEXT,
        "errors": nullable(full({"object": {"const": "list"}, "data": array(LINE_ERROR)})),
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": {"enum": list(STATUSES)},
        "output_file_id": nullable(TEXT),
        "error_file_id": nullable(TEXT),
        "created_at": COUNT,
        "expires_at": COUNT,
        **{f"{name}_at": nullable(COUNT) for name in TIMES},
        "request_counts": full({"total": COUNT, "completed": COUNT, "failed": COUNT}),
        "metadata": nullable({"type": "object", "additionalProperties": TEXT}),
        "owner": OWNER,
    },
    optional=("owner",),
)
COMPONENTS: Json = {"FileObject": FILE, "Batch": BATCH}
UPLOAD_FORM: Json = {
    "type": "object",
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": "A JSON object a line for a batch, or an image.",
        },
        "purpose": {"type": "string", "enum": list(UPLOADED)},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}


MAX_PAGE, DEFAULT_PAGE = 100, 20

# Unfinished batches of a key; each has tasks and an index of requests in memory.
MAX_UNFINISHED = 1000
PAGE_QUERY: Json = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "after": TEXT,
}


class Batches:
    def __init__(self, service: Service, storage: BatchStorage, worker: BatchWorker) -> None:
        self._service, self._storage, self._worker = service, storage, worker

    @ENDPOINT(
        method="POST",
        path="/v1/batches",
        operation="createBatch",
        summary="Answer the requests of a file, when nobody else asks",
        request=BatchRequest,
        answer=ref("Batch"),
        also=(429, 503),
    )
    async def create(self) -> Response:
        parsed = await self._service.read(BatchRequest.parse)
        if not self._worker.runs:
            message = (
                "this server runs no batches: the program that it is part of gave `create_app` no "
                "nursery"
            )
            raise RequestFailed(Problem(503, message, "server_error", None, "batches_unavailable"))
        await self._storage.open(create=False)
        owner, owners = self._service.key_identity, self._service.key_identities
        file = self._storage.files.get(parsed.input_file_id, owners, "input_file_id")
        if file.purpose != "batch":
            message = f"input_file_id: the purpose of this file is {file.purpose}, not batch"
            raise bad_request(message, "input_file_id", "invalid_value")
        if self._storage.unfinished(owners) >= MAX_UNFINISHED:
            message = (
                f"{MAX_UNFINISHED} batches of this key have not ended; wait for the end of one, or "
                "cancel one"
            )
            raise RequestFailed(
                Problem(
                    429, message, "rate_limit_error", None, "too_many_batches", retry_after_s=60
                )
            )
        self._storage.require_number(owner, 2, "input_file_id")
        created_at = now()
        spec = BatchSpec(
            id=self._service.new_id("batch_"),
            endpoint=parsed.endpoint,
            input_file_id=file.id,
            completion_window=parsed.completion_window,
            created_at=created_at,
            expires_at=created_at + window_s(parsed.completion_window),
            metadata=parsed.metadata,
            owner=owner,
            output_file_id=self._service.new_id(FILE_PREFIX),
            error_file_id=self._service.new_id(FILE_PREFIX),
        )
        with self._storage.written_for_client(), trio.CancelScope(shield=True):
            batch = await self._storage.create(spec)
        self._worker.start(batch)
        return as_json(batch.body())

    async def _batch(self, batch_id: str, *, managed: bool = False) -> Batch:
        await self._storage.open(create=False)
        service = self._service
        return self._storage.batch(
            batch_id, service.managed_identities if managed else service.key_identities
        )

    def _body(self, batch: Batch, label: dict[str, str]) -> dict[str, Any]:
        own = batch.spec.owner in self._service.key_identities
        return batch.body() | label | ({} if own else {"metadata": None, "errors": None})

    @ENDPOINT(
        method="GET",
        path="/v1/batches",
        operation="listBatches",
        summary="The batches of this key (with the right `admin`, of all keys), the newest first",
        query=PAGE_QUERY,
        answer=list_of(ref("Batch")),
        also=(400, 404, 503),
    )
    async def list(self) -> Response:
        query = Query(request.args, tuple(PAGE_QUERY), self._service.report)
        limit = query.number("limit", DEFAULT_PAGE, 1, MAX_PAGE)
        await self._storage.open(create=False)
        batches = self._storage.of(self._service.managed_identities)[::-1]
        labels = self._service.owner_labels(batch.spec.owner for batch in batches)

        def body(index: int) -> Json:
            return self._body(batches[index], labels[batches[index].spec.owner])

        ids = [batch.spec.id for batch in batches]
        return as_json(page_body(ids, query.given("after"), limit, body))

    @ENDPOINT(
        method="GET",
        path="/v1/batches/<batch_id>",
        operation="retrieveBatch",
        summary="One of them",
        answer=ref("Batch"),
    )
    async def get(self, batch_id: str) -> Response:
        return as_json((await self._batch(batch_id)).body())

    @ENDPOINT(
        method="POST",
        path="/v1/batches/<batch_id>/cancel",
        operation="cancelBatch",
        summary="Cancel it",
        description="What is answered until then is in its output file. A key with the right "
        "`admin` cancels batches of all keys.",
        answer=ref("Batch"),
    )
    async def cancel(self, batch_id: str) -> Response:
        batch = await self._batch(batch_id, managed=True)
        with self._storage.written_for_client():
            await self._worker.cancel(batch)
        owner = batch.spec.owner
        return as_json(self._body(batch, self._service.owner_labels((owner,))[owner]))
