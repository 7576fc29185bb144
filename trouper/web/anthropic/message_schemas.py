"""Anthropic's answers as JSON Schema."""

from __future__ import annotations

from trouper.web.anthropic.errors import TYPES
from trouper.web.http.request_schema import (
    COUNT,
    OBJECT,
    TEXT,
    Json,
    array,
    either,
    full,
    nullable,
    ref,
)

REASON: Json = {
    "type": "string",
    "enum": [
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "model_context_window_exceeded",
    ],
}
USAGE = full(
    {
        "input_tokens": COUNT | {"description": "Without those that came from the cache."},
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
        "output_tokens_details": full({"thinking_tokens": COUNT}),
    }
)


def _typed(kind: str, properties: Json) -> Json:
    return full({"type": {"const": kind}, **properties})


BLOCK = either(
    _typed("text", {"text": TEXT}),
    _typed("thinking", {"thinking": TEXT, "signature": TEXT}),
    _typed("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT}),
)
MESSAGE = _typed(
    "message",
    {
        "id": TEXT,
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": array(ref("AnthropicBlock")),
        "stop_reason": nullable(REASON),
        "stop_sequence": nullable(TEXT),
        "usage": ref("AnthropicUsage"),
    },
)
ERROR = _typed(
    "error",
    {
        "error": full(
            {
                "type": {"enum": sorted({*TYPES.values(), "api_error", "invalid_request_error"})},
                "message": TEXT,
                "details": full({"error_code": TEXT}),
            },
            optional=("details",),
        ),
        "request_id": TEXT,
    },
)
DELTA = either(
    _typed("text_delta", {"text": TEXT}),
    _typed("thinking_delta", {"thinking": TEXT}),
    _typed("signature_delta", {"signature": TEXT}),
    _typed("input_json_delta", {"partial_json": TEXT}),
)
_EVENTS = (
    _typed("message_start", {"message": ref("AnthropicMessage")}),
    _typed("content_block_start", {"index": COUNT, "content_block": ref("AnthropicBlock")}),
    _typed("content_block_delta", {"index": COUNT, "delta": DELTA}),
    _typed("content_block_stop", {"index": COUNT}),
    _typed(
        "message_delta",
        {
            "delta": full({"stop_reason": REASON, "stop_sequence": nullable(TEXT)}),
            "usage": ref("AnthropicUsage"),
        },
    ),
    _typed("message_stop", {}),
    _typed("ping", {}),
    ref("AnthropicError"),
)
EVENT = either(*_EVENTS)
COUNTED = full({"input_tokens": COUNT})

COMPONENTS: Json = {
    "AnthropicBlock": BLOCK,
    "AnthropicUsage": USAGE,
    "AnthropicMessage": MESSAGE,
    "AnthropicEvent": EVENT,
    "AnthropicError": ERROR,
}
