"""Endpoints: one entry routes and describes each."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import attrs
from quart import Response

from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import Json, closed, nullable, ref

PATH_PARAMETER = re.compile(r"<(?:\w+:)?(\w+)>")
OPENAI_ERROR = ref("Error")
GENERATES = (422, 429, 499, 500, 503, 504)
"""Error statuses of a request that waits for a row and for tokens."""
COUNTS = (429, 500, 503)
"""Error statuses of a request that needs a model to count, make or read tokens."""


@attrs.frozen(kw_only=True)
class Endpoint:
    """`path` is the router's: "/v1/models/<path:model>". `answer` is the schema of a body with
    status 200, `events` of each streamed event's data."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[..., Awaitable[Response]]
    operation: str
    """The operation's unique id, which generated clients take for the name of a method."""
    summary: str
    tag: str
    description: str = ""
    request: type[Body] | None = None
    form: Json | None = None
    query: Mapping[str, Json] = attrs.field(factory=dict)
    answer: Json
    content_type: str = "application/json"
    events: Json | None = None
    last_event: str | None = None
    """Data of a last event outside `events`."""
    error: Json = attrs.field(factory=lambda: OPENAI_ERROR)
    also: tuple[int, ...] = ()
    """Error statuses besides 403, and besides 400, 404, 408, 413 and 415 of bodies."""
    examples: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """The router's name: "openai_chat"."""
        return self.handler.__qualname__.replace(".", "_").lower()

    @property
    def path_parameters(self) -> tuple[str, ...]:
        return tuple(PATH_PARAMETER.findall(self.path))

    @property
    def template(self) -> str:
        """The OpenAPI path: "/v1/models/{model}"."""
        return PATH_PARAMETER.sub(r"{\1}", self.path)

    @property
    def statuses(self) -> tuple[int, ...]:
        codes = {*self.also}
        if self.request is not None or self.form is not None:
            codes |= {400, 404, 408, 413, 415, 500}
        if self.path_parameters:
            codes |= {404}
        return tuple(sorted(codes))


ERROR = closed(
    {
        "error": closed(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": nullable(
                    {
                        "type": "string",
                        "description": "The parameter at fault: `messages.0.content`.",
                    }
                ),
                "code": nullable({"type": "string"}),
            },
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
