"""Errors in Anthropic's format."""

from __future__ import annotations

import attrs

from trouper.protocol.problems import ContextExcess, Problem
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
OVERLOADED = 529
LEAVING = frozenset({"draining", "rank_lost"})
"""Codes of a server that ends. A proxy asks another replica after a 503."""
PREFIXES = {
    "invalid_api_key": "invalid x-api-key: ",
    "body_too_large": "Request exceeds the maximum allowed number of bytes: ",
}
"""Anthropic's own wording, for which clients look, by code."""
CODES = {"thread": "thread_unsupported_request"}
"""Codes after which clients repeat a request without the parameter."""
BUDGET, THINKING = "thinking_token_budget", "thinking.budget_tokens"
"""Name of the limit on reasoning in `Generate`, and in a body."""


def is_anthropic(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def anthropic_status(problem: Problem) -> int:
    """Anthropic's own API is overloaded with a status of its own."""
    overloaded = problem.status == 503 and problem.code not in LEAVING
    return OVERLOADED if overloaded else problem.status


def anthropic_error(problem: Problem, request_id: str) -> Json:
    if problem.code == "no_choice":
        problem = _with_own_budget(problem)
    message = PREFIXES.get(problem.code or "", "") + problem.message
    if problem.context is not None:
        message = _too_long(problem.context)
    elif problem.param is not None and problem.param not in message:
        message = f"{problem.param}: {message}"  # The format has no field for a parameter.
    kind = TYPES.get(
        problem.status, "api_error" if problem.status >= 499 else "invalid_request_error"
    )
    error: Json = {"type": kind, "message": message}
    if problem.code is not None:
        error["details"] = {"error_code": CODES.get(problem.param or "", problem.code)}
    return {"type": "error", "error": error, "request_id": request_id}


def _with_own_budget(problem: Problem) -> Problem:
    param = THINKING if problem.param == BUDGET else problem.param
    return attrs.evolve(problem, message=problem.message.replace(BUDGET, THINKING), param=param)


def _too_long(excess: ContextExcess) -> str:
    """Anthropic's wording, after which agents shorten the conversation by the difference."""
    prompt, answer, limit = excess.prompt_tokens, excess.max_tokens, excess.limit
    if prompt < limit:
        return (
            f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, "
            "decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {prompt} tokens > {min(limit, prompt - 1)} maximum"
