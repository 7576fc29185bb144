"""Tools as chat requests offer them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trouper.protocol.errors import bad_request
from trouper.protocol.model import Tokenizer
from trouper.web.parsing import json_type
from trouper.web.tools import Tools

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
Json = dict[str, Any]


def tools_of(tools: Any, choice: Any, parallel: Any) -> Tools:
    """Raises `RequestFailed` (400) naming the parameter."""
    offered = () if tools is None else offered_tools(tools, _tool)
    if parallel not in (None, True, False):
        raise bad_request("parallel_tool_calls must be a boolean", "parallel_tool_calls", "invalid_type")
    several = parallel is not False
    if choice is None or choice == "auto":
        return Tools(offered, (), several)
    if choice == "none":
        return Tools()
    if not offered:
        raise bad_request("tool_choice needs tools", "tool_choice", "invalid_value")
    if choice == "required":
        return Tools(offered, offered, several)
    return Tools(offered, (_named(choice, offered),), several)


def offered_tools(tools: Any, read: Callable[[Any, str], Json]) -> tuple[Json, ...]:
    """`read` checks one of them. Raises `RequestFailed` (400)."""
    if not isinstance(tools, list):
        raise bad_request(f"tools must be an array, not {json_type(tools)}", "tools", "invalid_type")
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools may have {MAX_TOOLS} entries, not {len(tools)}", "tools", "invalid_value")
    checked = tuple(read(tool, f"tools.{place}") for place, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    if len(set(names)) != len(names):
        raise bad_request("two tools have the same name", "tools", "invalid_value")
    return checked


def _tool(tool: Any, path: str) -> Json:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_request(f"{path} must be an object of type function", path, "invalid_type")
    return function_tool(tool["function"], f"{path}.function")


def function_tool(function: Json, path: str) -> Json:
    """A function as templates want it. Raises `RequestFailed` (400) naming what is wrong with it."""
    for name in function:
        if name not in FUNCTION_KEYS:
            raise bad_request(f"unknown parameter '{path}.{name}'", f"{path}.{name}", "unknown_parameter")
    if not isinstance(function.get("name"), str) or not NAME.fullmatch(function["name"]):
        said = f"{path}.name must be 1 to 64 letters, digits, '_', '-' or '.'"
        raise bad_request(said, f"{path}.name", "invalid_value")
    if not isinstance(function.get("description", ""), str | None):
        raise bad_request(f"{path}.description must be a string", f"{path}.description", "invalid_type")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise bad_request(f"{path}.parameters must be a JSON Schema", f"{path}.parameters", "invalid_type")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _named(choice: Any, offered: tuple[Json, ...]) -> Json:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    found = [tool for tool in offered if tool["function"]["name"] == name]
    if not found:
        said = "tool_choice must be none, auto, required, or name one of the tools"
        raise bad_request(said, "tool_choice", "invalid_value")
    return found[0]


def check_learnt(tools: Tools, tokenizer: Tokenizer) -> None:
    """Raises `RequestFailed` (400) if the model would have to call a tool by itself and has not learnt to."""
    if tools.offered and not tools.forced and tokenizer.calling is None:
        said = "this model has not learnt to call tools by itself; tool_choice required or a named tool forces a call"
        raise bad_request(said, "tools", "tools_not_supported")


def past_calls(calls: Any, path: str) -> list[Json]:
    """An assistant message's tool_calls, as templates want them: arguments as an object."""
    if not isinstance(calls, list):
        raise bad_request(f"{path} must be an array, not {json_type(calls)}", path, "invalid_type")
    return [_past_call(call, f"{path}.{place}") for place, call in enumerate(calls)]


def _past_call(call: Any, path: str) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{path}.function must have a name", f"{path}.function", "invalid_type")
    arguments: Any = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            said = f"{path}.function.arguments must be JSON"
            raise bad_request(said, f"{path}.function.arguments", "invalid_value") from None
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
