"""Rules between fields of a request as JSON Schema; functions beside the request classes check the
same."""

from __future__ import annotations

from trouper.web.http.request_schema import (
    NULL,
    OBJECT,
    Json,
    at_most_one,
    either,
    needs,
    with_properties,
)

_TEXT_FORMAT = with_properties({"type": {"const": "text"}}, "type", additionalProperties=False)
ABSENT: Json = {"enum": [None, False]}
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
NO_STRUCTURE: Json = {
    "response_format": either(NULL, _TEXT_FORMAT),
    "structured_outputs": either(
        NULL, with_properties(dict.fromkeys(CONSTRAINTS, ABSENT), additionalProperties=False)
    ),
    "guided_json": NULL,
    "guided_regex": NULL,
    "guided_choice": NULL,
    "guided_grammar": NULL,
}
ONE_STRUCTURE = at_most_one(NO_STRUCTURE)
ONE_CONSTRAINT = at_most_one(dict.fromkeys(CONSTRAINTS, ABSENT))
OPTIONS_NEED_A_STREAM = needs("stream_options", OBJECT, "stream", {"const": True})
TOP_NEEDS_LOGPROBS = needs(
    "top_logprobs", {"type": "integer", "minimum": 1}, "logprobs", {"const": True}
)
FORCED_NEEDS_TOOLS = needs(
    "tool_choice", either({"const": "required"}, OBJECT), "tools", {"type": "array", "minItems": 1}
)
CONTENT_OR_CALLS = either(
    {"required": ["content"], "properties": {"content": {"not": NULL}}},
    {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
)


def nothing_needs_echo(name: str) -> Json:
    """A length of 0, by any name, requires echo."""
    return needs(name, {"const": 0}, "echo", {"const": True})


OF_MESSAGES = (
    "chat_template_kwargs",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
)
PROMPT_OR_MESSAGES: Json = {
    "anyOf": [
        {
            "properties": {
                "prompt": {"type": "string"},
                "messages": NULL,
                **dict.fromkeys(OF_MESSAGES, ABSENT),
            },
            "required": ["prompt"],
        },
        {"properties": {"prompt": NULL, "messages": {"type": "array"}}, "required": ["messages"]},
    ]
}
