"""Endpoints: one entry routes and describes each."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import attrs
from quart import Response

from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import Json, full, nullable, ref

MARK = "endpoint"
PATH_PARAMETER = re.compile(r"<(?:\w+:)?(\w+)>")
OPENAI_ERROR = ref("Error")
GENERATES = (422, 429, 499, 500, 503, 504)
"""Error statuses of a request that waits for a row and for tokens."""
COUNTS = (429, 500, 503)
"""Error statuses of a request that needs a model to count, make or read tokens."""
Handler = Callable[..., Awaitable[Response]]
HandlerT = TypeVar("HandlerT", bound=Handler)


async def no_handler() -> Response:
    raise NotImplementedError


@attrs.frozen(kw_only=True)
class Endpoint:
    """Decorates the handler, a method. `path` is the router's: "/v1/models/<path:model>". `answer`
    is the schema of a body with status 200, `events` of each streamed event's data."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler = no_handler
    operation: str
    """The operation's unique id: generated clients' method names."""
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

    def __call__(self, handler: HandlerT) -> HandlerT:
        vars(handler)[MARK] = self
        return handler

    @property
    def name(self) -> str:
        """Such as "openai_chat", for the router."""
        return self.handler.__qualname__.replace(".", "_").lower()

    @property
    def path_parameters(self) -> tuple[str, ...]:
        return tuple(PATH_PARAMETER.findall(self.path))

    @property
    def template(self) -> str:
        """Such as "/v1/models/{model}", for OpenAPI."""
        return PATH_PARAMETER.sub(r"{\1}", self.path)

    @property
    def statuses(self) -> tuple[int, ...]:
        codes = {*self.also}
        if self.request is not None or self.form is not None:
            codes |= {400, 404, 408, 413, 415, 500}
        if self.path_parameters:
            codes |= {404}
        return tuple(sorted(codes))


REPORT = partial(Endpoint, method="GET", tag="Server")


def endpoints_of(group: object) -> Iterator[Endpoint]:
    """Yield the endpoints whose handlers are methods of `group`, in order."""
    for name, method in vars(type(group)).items():
        if isinstance(endpoint := getattr(method, MARK, None), Endpoint):
            yield attrs.evolve(endpoint, handler=getattr(group, name))


ERROR = full(
    {
        "error": full(
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
            }
        )
    }
)
