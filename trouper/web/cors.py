"""What a browser is told about requests across origins: the Fetch standard's CORS protocol, and the refusals of `decide`.

Never `Access-Control-Allow-Credentials`: keys travel in headers that a page must set itself, and nothing here is a cookie.
"""

from __future__ import annotations

import re

from quart import Request, Response

from trouper.protocol.errors import Problem
from trouper.protocol.settings import ServerSettings
from trouper.web.same_origin import Head, Policy, decide

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = "X-Request-Id, Request-Id, Retry-After"
"""Headers of answers that clients read; a page reads no others."""
REMEMBERED_S = 600
HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,4096}", re.ASCII)


def head_of(request: Request) -> Head:
    """`Head.host` is the header alone: X-Forwarded-Host is whatever its sender wrote."""
    headers = request.headers
    return Head(
        method=request.method,
        host=headers.get("Host"),
        origin=headers.get("Origin"),
        content_type=headers.get("Content-Type"),
        has_body="Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0",
        target=request.scope["path"],
        fetch_site=headers.get("Sec-Fetch-Site"),
        fetch_mode=headers.get("Sec-Fetch-Mode"),
        fetch_dest=headers.get("Sec-Fetch-Dest"),
        wants_method=headers.get("Access-Control-Request-Method"),
    )


class Cors:
    """The settings, applied to Quart's requests and responses."""

    def __init__(self, settings: ServerSettings) -> None:
        self._policy = Policy.of(settings)

    def problem(self, request: Request) -> Problem | None:
        """Why a request is refused, if it is."""
        return decide(head_of(request), self._policy)

    def preflight(self, request: Request) -> Response | None:
        """The answer to a preflight that was not refused; None for other requests. It needs no key, for none is sent."""
        if not head_of(request).is_preflight:
            return None
        response = Response(b"", 204)
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        response.headers["Access-Control-Allow-Methods"] = METHODS
        response.headers["Access-Control-Max-Age"] = str(REMEMBERED_S)
        if HEADER_NAMES.fullmatch(
            wanted
        ):  # Clients send many of their own (x-stainless-*), and `*` covers no Authorization.
            response.headers["Access-Control-Allow-Headers"] = wanted
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response

    def sign(self, request: Request, response: Response) -> None:
        """Lets a page of an origin that is named read this response, whatever it is."""
        policy = self._policy
        if not policy.cors_origins:
            return
        if not policy.any_origin:
            response.vary.add("Origin")
        origin = request.headers.get("Origin")
        if origin is not None and policy.names(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if policy.any_origin else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED
