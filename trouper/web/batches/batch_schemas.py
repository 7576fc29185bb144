"""JSON Schema of files and batches, and the body that creates a batch."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, ClassVar

from trouper.protocol.problems import bad_request
from trouper.web.batches.batch_table import STATUSES, TIMES
from trouper.web.batches.input_lines import BatchEndpoint
from trouper.web.batches.stored_files import PURPOSES
from trouper.web.http.body_faults import ordered, says
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.field_types import Filled
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import (
    COUNT,
    FLAG,
    NULL,
    TEXT,
    Json,
    Refused,
    array,
    full,
    nullable,
)
from trouper.web.responses.response_request import ResponseMetadata

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

    refused: ClassVar[Refused] = {"output_expires_after": ()}
    essential: ClassVar[frozenset[str]] = frozenset(refused)
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
        "expires_at": NULL,
        "filename": TEXT,
        "purpose": {"enum": list(PURPOSES)},
        "status": {"const": "processed"},
        "status_details": NULL,
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
