"""Tools in chat requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType
from typing import Any

import msgspec

from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import bad_request
from trouper.web.http.body_parsing import combination, json_type, only
from trouper.web.output.tool_calls import Tools

MAX_TOOLS = 128
TOOL_KEYS = frozenset({"type", "function", "cache_control"})
FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
CALL_KEYS = frozenset({"id", "type", "index", "function"})
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Json = dict[str, Any]


def tools_of(tools: Any, choice: Any, parallel: bool | None) -> Tools:
    """Parse the tools. Raises `RequestFailed` (400) naming the parameter."""
    offered = () if tools is None else offered_tools(tools, _tool)
    parallel = parallel is not False
    if choice is None or choice == "auto":
        return Tools(offered, (), parallel)
    if choice == "none":
        return Tools()
    if not offered:
        raise combination("tool_choice needs tools", "tool_choice")
    if choice == "required":
        return Tools(offered, offered, parallel)
    return Tools(offered, (_named(choice, offered),), parallel)


def offered_tools(tools: Any, read: Callable[[Any, str], Json], limit: int = MAX_TOOLS) -> tuple[Json, ...]:
    """Parse the offered tools; `read` checks one of them. Raises `RequestFailed` (400)."""
    if not isinstance(tools, list):
        raise bad_request(f"tools must be an array, not {json_type(tools)}", "tools", "invalid_type")
    if len(tools) > limit:
        raise bad_request(f"tools may have {limit} entries, not {len(tools)}", "tools", "invalid_value")
    checked = tuple(read(tool, f"tools.{index}") for index, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) != len(names):
        raise combination("tools: two of them have the same name", "tools")
    return checked


def _tool(tool: Any, path: str) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_request(f"{path} must be an object of type function", path, "invalid_type")
    only(tool, TOOL_KEYS, path)
    return function_tool(tool["function"], f"{path}.function")


def function_tool(function: Json, path: str) -> Json:
    """Return a function as templates expect it. Raises `RequestFailed` (400) naming the fault."""
    only(function, FUNCTION_KEYS, path)
    if type(function.get("strict")) not in (bool, NoneType):
        raise bad_request(f"{path}.strict must be a boolean", f"{path}.strict", "invalid_type")
    if not isinstance(function.get("name"), str) or not NAME.fullmatch(function["name"]):
        message = f"{path}.name must be 1 to 64 letters, digits, '_', '-' or '.'"
        raise bad_request(message, f"{path}.name", "invalid_value")
    if not isinstance(function.get("description", ""), str | None):
        raise bad_request(f"{path}.description must be a string", f"{path}.description", "invalid_type")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise bad_request(f"{path}.parameters must be a JSON Schema", f"{path}.parameters", "invalid_type")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _named(choice: Any, offered: tuple[Json, ...]) -> Json:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        message = "tool_choice must be none, auto, required, or name one of the tools"
        raise bad_request(message, "tool_choice", "invalid_value")
    only(choice, {"type", "function"}, "tool_choice")
    only(function, {"name"}, "tool_choice.function")
    found = [tool for tool in offered if tool["function"]["name"] == name]
    if not found:
        raise combination(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return found[0]


def check_callable(tools: Tools, tokenizer: Tokenizer) -> None:
    """Raise `RequestFailed` (400) if the model would have to call a tool by itself and was not trained to."""
    if not tools.are_callable(tokenizer):
        message = (
            "this model has not learnt to call tools by itself; tool_choice required or a named tool forces a call"
        )
        raise bad_request(message, "tools", "tools_not_supported")


def past_calls(calls: Any, path: str) -> list[Json]:
    """Return an assistant message's tool_calls as templates expect them: arguments as an object."""
    if not isinstance(calls, list):
        raise bad_request(f"{path} must be an array, not {json_type(calls)}", path, "invalid_type")
    return [_past_call(call, f"{path}.{index}") for index, call in enumerate(calls)]


def _past_call(call: Any, path: str) -> Json:
    if not isinstance(call, dict) or call.get("type") not in ("function", None):
        raise bad_request(f"{path} must be an object of type function", path, "invalid_type")
    only(call, CALL_KEYS, path)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{path}.function must have a name", f"{path}.function", "invalid_type")
    only(function, {"name", "arguments"}, f"{path}.function")
    if not isinstance(call.get("id"), str | None):
        raise bad_request(f"{path}.id must be a string", f"{path}.id", "invalid_type")
    arguments = arguments_of(function.get("arguments"), f"{path}.function.arguments")
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def arguments_of(value: Any, path: str) -> Json:
    """Return the arguments as an object; an earlier answer had them as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value or "{}")
        except (msgspec.DecodeError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise bad_request(f"{path} must be the JSON of an object", path, "invalid_json_text")
    if not isinstance(value, dict | None):
        raise bad_request(f"{path} must be JSON, as text, not {json_type(value)}", path, "invalid_type")
    return value or {}
