"""JSON Schema of fields with several JSON types: they are typed `Any` and checked by hand. The schemas agree with these
checks; tests send generated bodies through both."""

from __future__ import annotations

from trouper.web.http.request_schema import (
    FLAG,
    NULL,
    OBJECT,
    TEXT,
    TOKEN,
    TOKEN_KEY,
    Json,
    array,
    at_most_one,
    closed,
    either,
    needs,
    nullable,
)

MAX_MESSAGES = 10_000
MAX_TOKENS = 2**20
"""Bound on token ids in a prompt: more than any context holds, and few enough to be checked one by one."""
FILLED: Json = {"type": "string", "minLength": 1}
JSON_TEXT: Json = {"type": "string", "format": "json-object", "description": "A JSON object, as text."}

# -- messages ------------------------------------------------------------------------------------------------------

PART = closed(
    {
        "type": {"const": "text"},
        "text": TEXT,
        "cache_control": {"description": "Changes nothing: what is shared is found anyway."},
        "prompt_cache_breakpoint": {"description": "Changes nothing."},
    },
    "type", "text",
)  # fmt: skip
CONTENT = either(TEXT, array(PART))
CALL = closed(
    {
        "id": nullable(TEXT),
        "type": {"enum": ["function", None]},
        "index": {"description": "Changes nothing."},
        "function": closed({"name": TEXT, "arguments": nullable(either(JSON_TEXT, OBJECT))}, "name"),
    },
    "function",
)


def _message(roles: tuple[str, ...], properties: Json, *required: str) -> Json:
    """Return the schema of a message. Unknown names may be null, because clients send back complete messages."""
    known = {"role": {"type": "string", "enum": list(roles)}, "name": nullable(TEXT), **properties}
    return {
        "type": "object",
        "properties": known,
        "required": ["role", *required],
        "additionalProperties": NULL,
    }


_ANSWERED: Json = {
    "reasoning_content": nullable(TEXT),
    "annotations": {"description": "Changes nothing."},
}
MESSAGE = either(
    _message(("system", "developer", "user"), {"content": CONTENT}, "content"),
    _message(("tool",), {"content": CONTENT, "tool_call_id": nullable(TEXT)}, "content"),
    _message(("assistant",), {"content": CONTENT, "tool_calls": nullable(array(CALL)), **_ANSWERED}, "content"),
    _message(
        ("assistant",),
        {"content": nullable(CONTENT), "tool_calls": array(CALL, minItems=1), **_ANSWERED},
        "tool_calls",
    ),
)
MESSAGES = array(MESSAGE, minItems=1, maxItems=MAX_MESSAGES)

# -- tools ---------------------------------------------------------------------------------------------------------

TOOL = closed(
    {
        "type": {"const": "function"},
        "function": closed(
            {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                "description": nullable(TEXT),
                "parameters": {"type": ["object", "null"], "description": "JSON Schema of the arguments."},
                "strict": nullable(FLAG),
            },
            "name",
        ),
        "cache_control": {"description": "Changes nothing."},
    },
    "type", "function",
)  # fmt: skip
NAMED = closed({"type": {"const": "function"}, "function": closed({"name": TEXT}, "name")}, "type", "function")
TOOL_CHOICE = either({"type": "string", "enum": ["none", "auto", "required"]}, NAMED)
FORCED = either({"const": "required"}, OBJECT)

# -- structure -----------------------------------------------------------------------------------------------------

SCHEMA = either(OBJECT, FLAG, JSON_TEXT) | {"description": "JSON Schema, or its text."}
REGEX: Json = {"type": "string", "minLength": 1, "maxLength": 262144, "description": "As Rust's regex crate reads it."}
LARK: Json = {"type": "string", "minLength": 1, "maxLength": 262144, "description": "A grammar as llguidance reads it."}
OPTIONS = array(FILLED, minItems=1, maxItems=1024)
NAMED_SCHEMA = closed({"name": TEXT, "description": nullable(TEXT), "schema": SCHEMA, "strict": nullable(FLAG)}, "name")
RESPONSE_FORMAT = either(
    closed({"type": {"const": "text"}}, "type"),
    closed({"type": {"const": "json_object"}}, "type"),
    closed({"type": {"const": "json_schema"}, "json_schema": NAMED_SCHEMA}, "type", "json_schema"),
    closed({"type": {"const": "regex"}, "pattern": REGEX}, "type", "pattern"),
    closed({"type": {"const": "grammar"}, "grammar": LARK}, "type", "grammar"),
)
_ABSENT: Json = {"enum": [None, False]}
_CONSTRAINTS: Json = {
    "json": SCHEMA,
    "regex": REGEX,
    "choice": OPTIONS,
    "grammar": LARK,
    "json_object": {"const": True},
}
STRUCTURED_OUTPUTS = either(
    *(closed(dict.fromkeys(_CONSTRAINTS, _ABSENT) | {name: _CONSTRAINTS[name]}) for name in _CONSTRAINTS)
)
NO_STRUCTURE: Json = {
    "response_format": either(NULL, closed({"type": {"const": "text"}}, "type")),
    "structured_outputs": either(NULL, closed(dict.fromkeys(_CONSTRAINTS, _ABSENT))),
    "guided_json": NULL,
    "guided_regex": NULL,
    "guided_choice": NULL,
    "guided_grammar": NULL,
}

# -- the rest ------------------------------------------------------------------------------------------------------

STOP = either(FILLED, array(FILLED, maxItems=16))
LOGIT_BIAS: Json = {
    "type": "object",
    "propertyNames": TOKEN_KEY,
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": 1024,
}


def prompts(limit: int) -> Json:
    """Return the schema of the prompts that `prompts_of` accepts."""
    token_ids = array(TOKEN, minItems=1, maxItems=MAX_TOKENS)
    return either(TEXT, token_ids, array(either(TEXT, token_ids), minItems=1, maxItems=limit))


# -- what holds between parameters ---------------------------------------------------------------------------------

ONE_STRUCTURE = at_most_one(NO_STRUCTURE)
OPTIONS_NEED_A_STREAM = needs("stream_options", OBJECT, "stream", {"const": True})
TOP_NEEDS_LOGPROBS = needs("top_logprobs", {"type": "integer"}, "logprobs", {"const": True})
FORCED_NEEDS_TOOLS = needs("tool_choice", FORCED, "tools", {"type": "array", "minItems": 1})
NOTHING_NEEDS_ECHO = needs("max_tokens", {"const": 0}, "echo", {"const": True})
