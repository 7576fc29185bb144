"""Errors in Anthropic's format."""

from __future__ import annotations

from trouper.protocol.problems import Problem
from trouper.web.http.request_schema import Json

PREFIX = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
CODES = {"thread": "thread_unsupported_request"}
"""Codes after which clients repeat a request without the parameter."""
TOO_LONG = "prompt is too long: "
"""Anthropic's wording, after which agents shorten the conversation."""


def is_anthropic(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def anthropic_error(problem: Problem, request_id: str) -> Json:
    message = problem.message
    if problem.code == "context_length_exceeded":
        message = TOO_LONG + message
    elif problem.param is not None and problem.param not in message:
        message = f"{problem.param}: {message}"  # The format has no field for a parameter.
    kind = TYPES.get(
        problem.status, "api_error" if problem.status >= 499 else "invalid_request_error"
    )
    error: Json = {"type": kind, "message": message}
    if problem.code is not None:
        error["details"] = {"error_code": CODES.get(problem.param or "", problem.code)}
    return {"type": "error", "error": error, "request_id": request_id}
