"""Responses to refused requests, with their headers."""

from __future__ import annotations

from typing import Any

import msgspec
from quart import Response

from trouper.protocol.problems import Problem
from trouper.web.http.error_body import error_body


def error_response(problem: Problem, body: Any = None) -> Response:
    """`body` replaces OpenAI's format."""
    body = error_body(problem) if body is None else body
    response = Response(msgspec.json.encode(body), problem.status, content_type="application/json")
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(problem.retry_after_s)
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
