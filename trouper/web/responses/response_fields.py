"""Fields of a response that repeat its request, and its usage."""

from __future__ import annotations

from trouper.web.output.dialect import Json, Usage
from trouper.web.responses.response_request import ResolvedRequest
from trouper.web.service import now


def head_of(resolved: ResolvedRequest, response_id: str, model: str, *, stored: bool) -> Json:
    """Return the fields of a response that do not change while it is generated."""
    parsed, given = resolved.request, resolved.given
    text: Json = given.get("text") or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": now(),
        "model": model,
        "background": parsed.background,
        "instructions": parsed.instructions,
        "previous_response_id": parsed.previous_response_id,
        "max_output_tokens": parsed.max_output_tokens,
        "max_tool_calls": parsed.max_tool_calls,
        "temperature": parsed.temperature,
        "top_p": parsed.top_p,
        "top_logprobs": parsed.top_logprobs or 0,
        "tools": given.get("tools") or [],
        "tool_choice": given.get("tool_choice") or "auto",
        "parallel_tool_calls": parsed.parallel_tool_calls,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": resolved.effort, "summary": None},
        "truncation": "disabled",
        "service_tier": "default",
        "store": stored,
        "metadata": parsed.metadata or {},
        "user": parsed.user,
        "safety_identifier": parsed.safety_identifier,
        "prompt_cache_key": parsed.prompt_cache_key,
    }


def usage_body(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
