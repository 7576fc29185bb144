"""CORS of the Fetch standard, and the refusals of `decide`. There are no cookies, hence no
`Access-Control-Allow-Credentials`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quart import Request, Response

from trouper.protocol.problems import Problem
from trouper.protocol.settings import ServerSettings
from trouper.web.http.same_origin import Head, Policy, decide

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, X-Trouper-Ignored, " + ", ".join(
    f"x-ratelimit-{what}-{of}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
REMEMBERED_S = 600
HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,4096}", re.ASCII)


def head_of(request: Request, headers: Mapping[str, str]) -> Head:
    """Return a request's `Head`. `headers` have lower-case names. X-Forwarded-Host does not count:
    any client can send one."""
    return Head(
        method=request.method,
        host=headers.get("host"),
        origin=headers.get("origin"),
        content_type=headers.get("content-type"),
        has_body="transfer-encoding" in headers or headers.get("content-length", "0") != "0",
        target=request.scope["path"],
        fetch_site=headers.get("sec-fetch-site"),
        fetch_mode=headers.get("sec-fetch-mode"),
        fetch_dest=headers.get("sec-fetch-dest"),
        wants_method=headers.get("access-control-request-method"),
    )


class Cors:
    def __init__(self, settings: ServerSettings) -> None:
        self._policy = Policy.of(settings)

    def problem(self, head: Head) -> Problem | None:
        return decide(head, self._policy)

    def preflight(self, head: Head, headers: Mapping[str, str]) -> Response | None:
        """Return the response to a preflight, before any check of keys; None for other requests."""
        if not head.is_preflight:
            return None
        response = Response(b"", 204)
        requested = headers.get("access-control-request-headers", "")
        response.headers["Access-Control-Allow-Methods"] = METHODS
        response.headers["Access-Control-Max-Age"] = str(REMEMBERED_S)
        # Clients send many headers of their own (x-stainless-*), and `*` does not cover
        # Authorization.
        if HEADER_NAMES.fullmatch(requested):
            response.headers["Access-Control-Allow-Headers"] = requested
        if headers.get("access-control-request-private-network") == "true":
            response.headers["Access-Control-Allow-Private-Network"] = "true"
        return response

    def sign(self, headers: Mapping[str, str], response: Response) -> None:
        """Let pages of --cors-origins read this response, even an error."""
        policy = self._policy
        if not policy.cors_origins:
            return
        if not policy.any_origin:
            response.vary.add("Origin")
        origin = headers.get("origin")
        if origin is not None and policy.names(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if policy.any_origin else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED
