"""JSON Schema of the responses API. Tests compare the schemas with checks and sent answers."""

from __future__ import annotations

from collections.abc import Iterator

from trouper.web.http.named_schemas import pascal
from trouper.web.http.query_parameters import list_of
from trouper.web.http.request_schema import (
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    Json,
    array,
    either,
    full,
    needs,
    nullable,
    ref,
    titled,
)

STATUSES = ("completed", "incomplete", "in_progress")
LOGPROBS = "message.output_text.logprobs"

# -- requests -------------------------------------------------------------------------------------

SOMETHING: Json = {
    "anyOf": [
        {
            "properties": {"input": either(TEXT, {"type": "array", "minItems": 1})},
            "required": ["input"],
        },
        {"properties": {"previous_response_id": TEXT}, "required": ["previous_response_id"]},
    ]
}
TOP_NEEDS_INCLUDE = needs(
    "top_logprobs",
    {"type": "integer", "minimum": 1},
    "include",
    {"type": "array", "contains": {"const": LOGPROBS}},
)


def _without(kind: str) -> Json:
    return either(TEXT, array({"properties": {"type": {"not": {"const": kind}}}}))


_ANSWERS: Json = {"const": "assistant"}
PARTS_OF_ROLES = either(
    {"properties": {"role": _ANSWERS, "content": _without("input_image")}},
    {"properties": {"role": {"not": _ANSWERS}, "content": _without("refusal")}},
)
"""Images are input, and refusals are answers."""

# -- answers --------------------------------------------------------------------------------------

STATUS: Json = {"type": "string", "enum": list(STATUSES)}
TOKEN = {
    "token": TEXT,
    "logprob": NUMBER,
    "bytes": array({"type": "integer", "minimum": 0, "maximum": 255}),
}
TOKEN_LOGPROBS = array(
    titled(
        "OutputLogprob", full({**TOKEN, "top_logprobs": array(titled("TopLogprob", full(TOKEN)))})
    )
)

OUTPUT_TEXT = titled(
    "OutputTextPart",
    full(
        {
            "type": {"const": "output_text"},
            "text": TEXT,
            "annotations": array({}),
            "logprobs": TOKEN_LOGPROBS,
        }
    ),
)
REASONING_TEXT = titled(
    "ReasoningTextPart", full({"type": {"const": "reasoning_text"}, "text": TEXT})
)
MESSAGE = full(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "status": STATUS,
        "content": array(OUTPUT_TEXT),
    }
)
REASONING = full(
    {
        "id": TEXT,
        "type": {"const": "reasoning"},
        "status": STATUS,
        "summary": array({}),
        "content": array(REASONING_TEXT),
        "encrypted_content": nullable(TEXT),
    }
)
CALL = full(
    {
        "id": TEXT,
        "type": {"const": "function_call"},
        "status": STATUS,
        "call_id": TEXT,
        "name": TEXT,
        "arguments": TEXT,
    }
)
CUSTOM_CALL = full(
    {
        "id": TEXT,
        "type": {"const": "custom_tool_call"},
        "status": STATUS,
        "call_id": TEXT,
        "name": TEXT,
        "input": TEXT,
    }
)
BUILT_IN_CALLS: tuple[Json, ...] = tuple(
    {
        "type": "object",
        "properties": {
            "id": TEXT,
            "type": {"const": kind},
            "status": STATUS,
            "call_id": TEXT,
            "action": OBJECT,
            "operation": OBJECT,
            "environment": nullable(OBJECT),
        },
        "required": ["id", "type", "status", "call_id"],
    }
    for kind in ("local_shell_call", "shell_call", "apply_patch_call")
)
USAGE = full(
    {
        "input_tokens": COUNT,
        "input_tokens_details": full({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": full({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
RESPONSE = full(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "completed_at": nullable(COUNT),
        "status": {
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        "error": either(full({"code": TEXT, "message": TEXT}), NULL),
        "incomplete_details": either(full({"reason": {"const": "max_output_tokens"}}), NULL),
        "model": TEXT,
        "output": array(ref("OutputItem")),
        "usage": either(USAGE, NULL),
        "background": FLAG,
        "instructions": nullable(TEXT),
        "previous_response_id": nullable(TEXT),
        "max_output_tokens": nullable(COUNT),
        "max_tool_calls": nullable(COUNT),
        "temperature": NUMBER,
        "top_p": NUMBER,
        "top_logprobs": COUNT,
        "tools": array(OBJECT),
        "tool_choice": either(TEXT, OBJECT),
        "parallel_tool_calls": FLAG,
        "text": full({"format": OBJECT, "verbosity": {"const": "medium"}}),
        "reasoning": full({"effort": nullable(TEXT), "summary": nullable(TEXT)}),
        "truncation": {"const": "disabled"},
        "service_tier": {"const": "default"},
        "store": FLAG,
        "metadata": OBJECT,
        "user": nullable(TEXT),
        "safety_identifier": nullable(TEXT),
        "prompt_cache_key": nullable(TEXT),
    }
)
DELETED = full({"id": TEXT, "object": {"const": "response"}, "deleted": FLAG})
COUNTED = full({"object": {"const": "response.input_tokens"}, "input_tokens": COUNT})
INPUT_ITEMS = list_of(OBJECT)


def _events(kinds: tuple[str, ...], properties: Json) -> Iterator[Json]:
    """Yield a schema for each type of event: generators tell them apart by one value each."""
    for kind in kinds:
        name = f"response.{kind}"
        event = full({"type": {"const": name}, "sequence_number": COUNT, **properties})
        yield titled(f"{pascal(name)}Event", event)


_ITEM: Json = {"item_id": TEXT, "output_index": COUNT}
_PART_LOCATION: Json = {**_ITEM, "content_index": COUNT}
_EVENTS = (
    *_events(
        ("created", "queued", "in_progress", "completed", "incomplete", "failed"),
        {"response": ref("ResponseObject")},
    ),
    *_events(
        ("output_item.added", "output_item.done"),
        {"output_index": COUNT, "item": ref("OutputItem")},
    ),
    *_events(
        ("content_part.added", "content_part.done"),
        {**_PART_LOCATION, "part": titled("OutputPart", either(OUTPUT_TEXT, REASONING_TEXT))},
    ),
    *_events(("output_text.delta",), {**_PART_LOCATION, "delta": TEXT, "logprobs": TOKEN_LOGPROBS}),
    *_events(("output_text.done",), {**_PART_LOCATION, "text": TEXT, "logprobs": TOKEN_LOGPROBS}),
    *_events(("reasoning_text.delta",), {**_PART_LOCATION, "delta": TEXT}),
    *_events(("reasoning_text.done",), {**_PART_LOCATION, "text": TEXT}),
    *_events(("function_call_arguments.delta",), {**_ITEM, "delta": TEXT}),
    *_events(("function_call_arguments.done",), {**_ITEM, "name": TEXT, "arguments": TEXT}),
    *_events(("custom_tool_call_input.delta",), {**_ITEM, "delta": TEXT}),
    *_events(("custom_tool_call_input.done",), {**_ITEM, "input": TEXT}),
    full(
        {
            "type": {"const": "error"},
            "sequence_number": COUNT,
            "code": nullable(TEXT),
            "message": TEXT,
            "param": nullable(TEXT),
            "error": {"type": "object"},
        },
        optional=("error",),
    ),
)
EVENT = either(*_EVENTS)
COMPONENTS: Json = {
    "ResponseObject": RESPONSE,
    "OutputItem": either(MESSAGE, REASONING, CALL, CUSTOM_CALL, *BUILT_IN_CALLS),
    "ResponseEvent": EVENT,
}
