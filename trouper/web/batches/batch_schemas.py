"""JSON Schema of files and batches, and the body that creates a batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.web.batches.batch_record import STATUSES, TIMES
from trouper.web.batches.input_lines import BatchEndpoint
from trouper.web.batches.stored_files import PURPOSES
from trouper.web.http.body_faults import explains, ordered, says
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.field_types import Filled
from trouper.web.http.request_body import Body, Report, refuse, structure
from trouper.web.http.request_schema import (
    COUNT,
    FLAG,
    TEXT,
    Json,
    Refused,
    array,
    full,
    nullable,
    ref,
)
from trouper.web.responses.response_request import (
    MAX_METADATA,
    MAX_METADATA_VALUE,
    Key,
    explain_metadata,
)

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
BatchMetadata = Annotated[
    dict[Key, Annotated[str, Meta(max_length=MAX_METADATA_VALUE)]],
    explains(
        explain_metadata,
        max_length=MAX_METADATA,
        description="Changes nothing: it is returned to the client.",
    ),
]


class BatchRequest(Body, kw_only=True, frozen=True):
    """The body of POST /v1/batches."""

    refused: ClassVar[Refused] = {"output_expires_after": ()}
    essential: ClassVar[frozenset[str]] = frozenset(refused)
    input_file_id: Filled
    endpoint: Annotated[BatchEndpoint, ordered(BatchEndpoint)]
    completion_window: Window
    metadata: BatchMetadata | None = None


def parse_batch(body: dict[str, Any], report: Report = refuse) -> BatchRequest:
    """Raises `RequestFailed` (400)."""
    return structure(body, BatchRequest, report)


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
        "file": {"type": "string", "format": "binary", "description": "A JSON object a line."},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
Order = Literal["asc", "desc"]


def list_of(name: str) -> Json:
    return full(
        {
            "object": {"const": "list"},
            "data": array(ref(name)),
            "first_id": nullable(TEXT),
            "last_id": nullable(TEXT),
            "has_more": FLAG,
        }
    )


def page_body(
    ids: Sequence[str], after: str | None, limit: int, body: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Return the page behind the entry `after`. `body` formats an entry. Raises `RequestFailed`
    (404)."""
    start = 0
    if after is not None:
        start = next((index + 1 for index, name in enumerate(ids) if name == after), 0)
        if not start:
            message = f"after: nothing in this list has the id {after[:80]!r}"
            raise RequestFailed(
                Problem(404, message, "invalid_request_error", "after", "not_in_list")
            )
    page = ids[start : start + limit]
    return {
        "object": "list",
        "data": [body(name) for name in page],
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
        "has_more": start + limit < len(ids),
    }
