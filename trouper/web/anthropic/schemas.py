"""JSON Schema of request fields with several JSON types. The schemas agree with the checks beside them."""

from __future__ import annotations

from trouper.web.http.request_schema import FLAG, NULL, OBJECT, TEXT, Json, array, closed, either, needs, nullable
from trouper.web.openai.schemas import MAX_MESSAGES

ANYTHING: Json = {"description": "Changes nothing."}
CACHING: Json = {"cache_control": {"description": "Changes nothing: what is shared is found anyway."}}


def _open(properties: Json, *required: str) -> Json:
    """Return the schema of an object whose unknown names may be null, because clients send back complete answers."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": NULL}


def _block(kind: str, properties: Json, *required: str) -> Json:
    return _open({"type": {"const": kind}, **properties}, "type", *required)


# -- messages ------------------------------------------------------------------------------------------------------

TEXT_BLOCK = _block("text", {"text": TEXT, "citations": {"enum": [[], None]}, **CACHING}, "text")
TEXTS = either(TEXT, array(TEXT_BLOCK))
USE = _block(
    "tool_use",
    {"id": TEXT, "name": TEXT, "input": OBJECT, "caller": {"enum": [{"type": "direct"}, None]}, **CACHING},
    "id", "name", "input",
)  # fmt: skip
RESULT = _block(
    "tool_result",
    {"tool_use_id": TEXT, "content": nullable(TEXTS), "is_error": nullable(FLAG), **CACHING},
    "tool_use_id",
)
THOUGHT = _block("thinking", {"thinking": TEXT, "signature": nullable(TEXT)}, "thinking")
REDACTED = _block("redacted_thinking", {"data": TEXT | {"description": "Changes nothing: nobody can read it."}}, "data")


def _message(role: str, *blocks: Json) -> Json:
    content = either(TEXT, array(either(*blocks)))
    return _open({"role": {"const": role}, "content": content}, "role", "content")


MESSAGES = array(
    either(
        _message("user", TEXT_BLOCK, RESULT),
        _message("assistant", TEXT_BLOCK, USE, THOUGHT, REDACTED),
        _message("system", TEXT_BLOCK),
    ),
    minItems=1,
    maxItems=MAX_MESSAGES,
)

# -- tools ---------------------------------------------------------------------------------------------------------

MAX_TOOLS = 1024
TOOL_NAME = r"[A-Za-z0-9_.-]{1,128}"
TOOL = _open(
    {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
        "description": nullable(TEXT),
        "input_schema": {
            "type": "object",
            "properties": {"type": {"const": "object"}},
            "anyOf": [{"required": ["type"]}, {"required": ["$ref"]}],
            "description": "JSON Schema of the input: of type object, or a reference, as recursive classes have at their root.",
        },
        "strict": nullable(FLAG) | {"description": "A forced call follows its schema in any case."},
        "eager_input_streaming": ANYTHING,
        "defer_loading": {"enum": [False, None]},
        "allowed_callers": {"enum": [["direct"], None]},
        "input_examples": {"enum": [[], None]},
        **CACHING,
    },
    "name", "input_schema",
)  # fmt: skip
TOOLS = array(TOOL, maxItems=MAX_TOOLS)
_SINGLE: Json = {"disable_parallel_tool_use": nullable(FLAG)}
TOOL_CHOICE = either(
    closed({"type": {"enum": ["auto", "any"]}, **_SINGLE}, "type"),
    closed({"type": {"const": "tool"}, "name": TEXT, **_SINGLE}, "type", "name"),
    closed({"type": {"const": "none"}}, "type"),
)
FORCED: Json = {"type": "object", "properties": {"type": {"enum": ["any", "tool"]}}, "required": ["type"]}
FORCED_NEEDS_TOOLS = needs("tool_choice", FORCED, "tools", {"type": "array", "minItems": 1})

# -- the rest ------------------------------------------------------------------------------------------------------

STOPS = array({"type": "string", "minLength": 1}, maxItems=16)
FORMAT = closed({"type": {"const": "json_schema"}, "schema": OBJECT}, "type", "schema")
CLEAR_THINKING = "clear_thinking_20251015"
KEEP_ALL = ("all", {"type": "all"})
_EDIT = closed({"type": {"const": CLEAR_THINKING}, "keep": {"enum": [*KEEP_ALL]}}, "type", "keep")
CONTEXT_MANAGEMENT = closed({"edits": nullable(array(_EDIT))}) | {
    "description": "To keep all thinking is what happens anyway."
}
