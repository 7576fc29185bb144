"""Errors in OpenAI's format, which the HTTP layer sends, too."""

from __future__ import annotations

from trouper.protocol.problems import Problem

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(problem: Problem) -> dict[str, dict[str, str | None]]:
    return {
        "error": {
            "message": problem.message,
            "type": problem.type,
            "param": problem.param,
            "code": problem.code,
        }
    }


def http_problem(status: int, message: str, code: str | None = None) -> Problem:
    """Return the problem of a request that the HTTP layer refuses."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return Problem(status, message, kind, None, code)
