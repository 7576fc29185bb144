"""Tools in messages requests."""

from __future__ import annotations

import re
from typing import Any

from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import bad_request
from trouper.web.anthropic.schemas import MAX_TOOLS, TOOL_NAME
from trouper.web.http.body_parsing import combination, flag, json_type, only
from trouper.web.http.request_schema import Json, among
from trouper.web.openai.chat_tools import offered_tools
from trouper.web.output.tool_calls import Tools

NAME = re.compile(TOOL_NAME)
TAKEN = frozenset({"type", "name", "description", "input_schema", "strict"})
HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "cache_control": None,
    "eager_input_streaming": None,
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}
"""Keys of a tool that change no output with these values; None: with any value."""
CHOICES = {
    "auto": frozenset({"type", "disable_parallel_tool_use"}),
    "any": frozenset({"type", "disable_parallel_tool_use"}),
    "tool": frozenset({"type", "disable_parallel_tool_use", "name"}),
    "none": frozenset({"type"}),
}


def tools_of(tools: Any, choice: Any) -> Tools:
    """Parse the tools. Raises `RequestFailed` (400) naming the parameter."""
    offered = () if tools is None else offered_tools(tools, _tool, MAX_TOOLS)
    kind, name, several = _choice(choice)
    if kind == "auto":
        return Tools(offered, (), several)
    if kind == "none":
        return Tools()
    if not offered:
        raise combination("tool_choice needs tools", "tool_choice")
    if kind == "any":
        return Tools(offered, offered, several)
    named = tuple(tool for tool in offered if tool["function"]["name"] == name)
    if not named:
        raise combination(f"tool_choice.name is {name!r}, which is not among the tools", "tool_choice.name")
    return Tools(offered, named, several)


def check_callable(tools: Tools, tokenizer: Tokenizer) -> None:
    """Raise `RequestFailed` (400) if the model would have to call a tool by itself and was not trained to."""
    if not tools.are_callable(tokenizer):
        message = (
            "tools: this model has not learnt to call them by itself; tool_choice of type any or tool forces a call"
        )
        raise bad_request(message, "tools", "tools_not_supported")


def _choice(choice: Any) -> tuple[str, str | None, bool]:
    """Parse tool_choice: its type, the tool's name, and whether several calls are allowed."""
    if choice is None:
        return "auto", None, True
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in CHOICES:
        message = f"tool_choice must be an object of type {', '.join(CHOICES)}"
        raise bad_request(message, "tool_choice", "invalid_value")
    only(choice, CHOICES[kind], "tool_choice")
    name = choice.get("name")
    if kind == "tool" and not isinstance(name, str):
        message = f"tool_choice.name must be a string, not {json_type(name)}"
        raise bad_request(message, "tool_choice.name", "invalid_type")
    single = flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use")
    return kind, name, not single


def _tool(tool: Any, path: str) -> Json:
    """Return a tool as templates expect it, in OpenAI's format."""
    if not isinstance(tool, dict):
        raise bad_request(f"{path} must be an object, not {json_type(tool)}", path, "invalid_type")
    if tool.get("type") not in (None, "custom"):
        message = f"{path}: tools of type {tool['type']!r} are not supported here, only your own (custom)"
        raise bad_request(message, f"{path}.type", "unsupported_parameter")
    _check_names(tool, path)
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{path}.name must be 1 to 128 letters, digits, '_', '-' or '.'"
        raise bad_request(message, f"{path}.name", "invalid_value")
    if not isinstance(schema, dict) or not _takes_an_object(schema):
        message = f"{path}.input_schema must be a JSON Schema of type object"
        raise bad_request(message, f"{path}.input_schema", "invalid_type")
    if not isinstance(tool.get("description"), str | None):
        raise bad_request(f"{path}.description must be a string", f"{path}.description", "invalid_type")
    flag(tool.get("strict"), f"{path}.strict")
    described = {} if tool.get("description") is None else {"description": tool["description"]}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _takes_an_object(schema: Json) -> bool:
    """Whether the root of the schema is an object. The root of a recursive pydantic model is a reference without a
    type."""
    return bool(schema["type"] == "object") if "type" in schema else "$ref" in schema


def _check_names(tool: Json, path: str) -> None:
    for name, value in tool.items():
        if name in TAKEN or value is None:
            continue
        only({name: value}, HARMLESS, path)
        neutral = HARMLESS[name]
        if neutral is not None and not among(value, neutral):
            message = f"{path}.{name} is not supported here; leave it out"
            raise bad_request(message, f"{path}.{name}", "unsupported_parameter")
