"""Answers in JSON, long ones written on a thread, and errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import trio
from quart import Response

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.problems import Problem

# Long answers are formatted one at a time: the event loop and the engine's thread wait for Python's
# lock for 5 ms at each turn, once for each thread that computes in Python.
LONG_ANSWERS = trio.CapacityLimiter(1)
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
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return Problem(status, message, kind, None, code)


def as_json(body: Any, status: int = 200) -> Response:
    return encoded(msgspec.json.encode(body), status)


async def formatted(body: Callable[[], Any], *, is_long: bool) -> Response:
    if not is_long:
        return as_json(body())
    return encoded(await long_work(lambda: msgspec.json.encode(body())))


async def long_work(work: Callable[[], bytes]) -> bytes:
    """Format on a thread. Raises `OSError` if no thread starts."""
    return await run_on_thread(work, LONG_ANSWERS, abandon_on_cancel=False)


def encoded(data: bytes, status: int = 200) -> Response:
    return Response(data, status, content_type="application/json")


def error_response(problem: Problem, body: Any = None) -> Response:
    """`body` replaces OpenAI's format."""
    body = error_body(problem) if body is None else body
    response = as_json(body, problem.status)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(problem.retry_after_s)
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
