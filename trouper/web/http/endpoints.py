"""What an endpoint is: one entry that routes it and describes it, so that neither can be without the other."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
from quart import Response

from trouper.web.http.api_keys import OPEN_PATHS
from trouper.web.http.request_schema import Json, Refused, closed, nullable, ref

PATH_PARAMETER = re.compile(r"<(?:\w+:)?(\w+)>")
"""A part of a path as the router writes it."""
OPENAI_ERROR = ref("Error")
GENERATES = (422, 429, 499, 500, 503, 504)
"""What may become of a request that waits for a row and for tokens."""


@attrs.frozen(kw_only=True)
class Endpoint:
    """`path` is the router's: "/v1/models/<path:model>".

    `request` is the class that its body is read into, `refused` the table beside it, `rules` what holds between fields.
    `answer` is the schema of a body with status 200, or of something else than JSON if `content_type` says so; `events`
    that of each event's data where it can be streamed.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str
    tag: str
    description: str = ""
    request: type | None = None
    refused: Refused = attrs.field(factory=dict)
    rules: Sequence[Json] = ()
    query: Mapping[str, Json] = attrs.field(factory=dict)
    """Parameters of the query, none of them required."""
    answer: Json
    content_type: str = "application/json"
    events: Json | None = None
    last_event: str | None = None
    """The data of a last one that is not as `events`."""
    error: Json = attrs.field(factory=lambda: OPENAI_ERROR)
    also: tuple[int, ...] = ()
    """Further statuses it may have; a request with a body has 400, 404, 408, 413 and 415 anyway, and each has 403."""
    examples: Mapping[str, Any] = attrs.field(factory=dict)
    """Bodies, by name."""

    @property
    def name(self) -> str:
        """Of the operation, unique: "openai_chat"."""
        return self.handler.__qualname__.replace(".", "_").lower()

    @property
    def path_parameters(self) -> tuple[str, ...]:
        """What of the path is a parameter."""
        return tuple(PATH_PARAMETER.findall(self.path))

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it: "/v1/models/{model}"."""
        return PATH_PARAMETER.sub(r"{\1}", self.path)

    @property
    def open(self) -> bool:
        """Needs no key."""
        return self.path in OPEN_PATHS

    @property
    def statuses(self) -> tuple[int, ...]:
        """Of errors."""
        codes = {*self.also}
        if self.request is not None:
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
                "param": nullable({"type": "string", "description": "The parameter at fault: `messages.0.content`."}),
                "code": nullable({"type": "string"}),
            },
            "message", "type", "param", "code",
        )
    },
    "error",
)  # fmt: skip
"""OpenAI's shape."""
